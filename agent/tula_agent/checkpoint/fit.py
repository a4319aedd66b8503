"""Whether a checkpoint fits a training, told before anything of it is loaded: torch loads what fits, then raises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tula_agent.torch_private import has_own_loading, has_plain_loading

__all__ = ["misfit"]


def misfit(saved: Mapping[str, Any], model: torch.nn.Module, optimizer: Any) -> str | None:
    """What of the state saved under `model` and `optimizer` torch would refuse, in words; None where nothing is known.

    Nothing is known of sharded weights, nor of models and optimizers that load in a way of their own: they may well
    read what was saved under other names.
    """
    found = None
    if "model" in saved and not has_own_loading(model):
        found = _of_model(saved["model"], model.state_dict())
    inner = getattr(optimizer, "optimizer", optimizer)
    if found is None and saved.get("optimizer") is not None and has_plain_loading(inner):
        found = _of_optimizer(saved["optimizer"]["param_groups"], inner.param_groups)
    return found


def _of_model(there: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    for name, value in here.items():
        if name not in there:
            return f"the model's {name} is not in it"
        if not (isinstance(value, torch.Tensor) and isinstance(there[name], torch.Tensor)):
            continue
        then, now = list(there[name].shape), list(value.shape)
        if then != now and (then, now) != ([1], []):  # which torch takes
            return f"the model's {name} has shape {then} there and {now} here"
    unknown = next((name for name in there if name not in here), None)
    return None if unknown is None else f"the model has no {unknown}"


def _of_optimizer(there: list[Any], here: list[Any]) -> str | None:
    then, now = ([len(group["params"]) for group in groups] for groups in (there, here))
    return None if then == now else f"the optimizer's groups have {then} parameters there and {now} here"
