"""Checkpoints of a sharded model (FSDP): every rank writes and reads its part by torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

FOLDER: Final = "shards"


def save_parts(folder: Path, model: torch.nn.Module, optimizer: Any) -> list[Callable[[], None]]:
    """Functions that every rank must call in this order, each only if the one before succeeded on all ranks.

    They contain collectives of torch: a rank that failed before would leave the others waiting.
    """
    state: dict[str, Any] = {}

    def write() -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        with _plain_errors():
            save(state, checkpoint_id=str(folder / FOLDER))

    return [lambda: state.update(_gathered(model, optimizer)), write]


def load_parts(folder: Path, model: torch.nn.Module, optimizer: Any) -> list[Callable[[], None]]:
    """The functions that load what those of `save_parts` wrote; the same rules hold."""
    state: dict[str, Any] = {}

    def read() -> None:
        from torch.distributed.checkpoint.state_dict_loader import load

        with _plain_errors():
            load(state, checkpoint_id=str(folder / FOLDER))

    def apply() -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(model, _inner(optimizer), model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    return [lambda: state.update(_gathered(model, optimizer)), read, apply]


def _gathered(model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    of_model, of_optimizer = get_state_dict(model, _inner(optimizer))
    return {"model": of_model, "optimizer": of_optimizer}


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise RuntimeError with the first rank's cause: torch's own is no `Exception` and holds every rank's stack."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, (cause, *_) = next(iter(error.failures.items()))
        raise RuntimeError(f"the shard of rank {rank}: {type(cause).__name__}: {cause}") from error


def _inner(optimizer: Any) -> Any:
    """The optimizer with the sharded state; factors of gradient scaling are estimated again after a sharded resume."""
    return () if optimizer is None else getattr(optimizer, "optimizer", optimizer)
