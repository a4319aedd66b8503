"""How a factor reaches the weights: through the gradient, the learning rate or the update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

__all__ = ["ApplyTo", "resolve_target", "scaled_learning_rate"]

ApplyTo = Literal["auto", "gradient", "update"]


def resolve_target(optimizer: torch.optim.Optimizer, apply_to: ApplyTo) -> Literal["gradient", "update"]:
    """Plain SGD takes a scaled gradient; an optimizer that normalises gradients would divide the factor away again."""
    if apply_to != "auto":
        return apply_to
    return "gradient" if isinstance(optimizer, (torch.optim.SGD, torch.optim.ASGD)) else "update"


@contextmanager
def scaled_learning_rate(groups: list[dict[str, Any]], factor: float) -> Iterator[None]:
    """Every group's learning rate times `factor` inside the block, put back exactly even if the step raises.

    For SGD, Adam and their kin the update is linear in the learning rate, so this scales the update, decoupled
    weight decay included, without touching a tensor.
    """
    kept = [group["lr"].clone() if isinstance(group["lr"], torch.Tensor) else group["lr"] for group in groups]
    try:
        for group in groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].mul_(factor)
            else:
                group["lr"] = group["lr"] * factor
        yield
    finally:
        for group, value in zip(groups, kept, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].copy_(value)
            else:
                group["lr"] = value
