"""Whether a checkpoint fits a training, before any of it is loaded: torch loads what fits and raises after that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tula_agent.torch_private import has_own_loading, has_plain_loading


def mismatch(saved: Mapping[str, Any], model: torch.nn.Module, optimizer: Any) -> str | None:
    """What torch would refuse of the state saved under `model` and `optimizer`, in words; None if nothing is known.

    Sharded weights are not compared, nor models and optimizers with their own loading: they may accept other names.
    """
    found = None
    if "model" in saved and not has_own_loading(model):
        found = _of_model(saved["model"], model.state_dict())
    inner = getattr(optimizer, "optimizer", optimizer)
    if found is None and saved.get("optimizer") is not None and has_plain_loading(inner):
        found = _of_optimizer(saved["optimizer"]["param_groups"], inner.param_groups)
    return found


def _of_model(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str | None:
    for name, value in current.items():
        if name not in saved:
            return f"the model's {name} is not in it"
        if not (isinstance(value, torch.Tensor) and isinstance(saved[name], torch.Tensor)):
            continue
        before, now = list(saved[name].shape), list(value.shape)
        if before != now and (before, now) != ([1], []):  # torch loads one element into a scalar
            return f"the model's {name} has shape {before} there and {now} here"
    unknown = next((name for name in saved if name not in current), None)
    return None if unknown is None else f"the model has no {unknown}"


def _of_optimizer(saved: list[Any], current: list[Any]) -> str | None:
    before, now = ([len(group["params"]) for group in groups] for groups in (saved, current))
    return None if before == now else f"the optimizer's groups have {before} parameters there and {now} here"
