"""Whether ranks hold only parts of what is trained."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["is_sharded"]


def is_sharded(parameters: Iterable[torch.Tensor], models: Iterable[torch.nn.Module] = ()) -> bool:
    """True for FSDP, either version, and tensor parallelism: no rank holds these parameters, or their gradients, whole.

    models: where they are at hand, also asked for FSDP's own modules.
    """
    if any(_is_part(parameter) for parameter in parameters):
        return True
    return any(type(module).__name__ == "FullyShardedDataParallel" for model in models for module in model.modules())


def _is_part(parameter: torch.Tensor) -> bool:
    """A DTensor or FSDP's flat parameter; with `use_orig_params` the first version only marks its plain ones."""
    return (
        hasattr(parameter, "to_local")
        or type(parameter).__name__ == "FlatParameter"
        or getattr(parameter, "_fsdp_flattened", False)
    )
