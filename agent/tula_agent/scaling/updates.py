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
    kept = [group["lr"] for group in groups]
    # One tensor given to an optimizer becomes the rate of every group that names none.
    tensors = {id(rate): rate for rate in kept if isinstance(rate, torch.Tensor)}
    values = {key: rate.clone() for key, rate in tensors.items()}
    try:
        for rate in tensors.values():
            rate.mul_(factor)
        for group in groups:
            if not isinstance(group["lr"], torch.Tensor):
                group["lr"] = group["lr"] * factor
        yield
    finally:
        for key, rate in tensors.items():
            rate.copy_(values[key])
        for group, rate in zip(groups, kept, strict=True):
            group["lr"] = rate
