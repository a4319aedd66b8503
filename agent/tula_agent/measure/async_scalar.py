"""Numbers that are still on a device: copied to the host without waiting, read once they have arrived."""

from __future__ import annotations

import math
from typing import Any

import torch

from tula_agent.torch_private import local_part


class PendingScalar:
    """A scalar on its way to pinned host memory. With `root`, `poll` answers its square root."""

    __slots__ = ("_event", "_host", "_root")

    def __init__(self, scalar: torch.Tensor, root: bool = False) -> None:
        self._host = torch.empty((), dtype=torch.float32, pin_memory=True)
        self._host.copy_(scalar.detach().float(), non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(scalar.device))  # the current device may be another one
        self._root = root

    def poll(self) -> float | None:
        """The number, or None while the copy is under way; never waits."""
        if not self._event.query():  # type: ignore[no-untyped-call]
            return None
        return _rooted(float(self._host), self._root)


def to_number(value: Any, root: bool = False) -> float | PendingScalar:
    """A float where that needs no wait, else a `PendingScalar`; with `root`, its square root.

    Raises TypeError or ValueError for anything that is not one number.
    """
    if isinstance(value, torch.Tensor):
        value = local_part(value)  # anything else on a DTensor may start a collective, and only one rank calls this
        if value.numel() != 1:
            raise ValueError(f"a tensor of shape {tuple(value.shape)} is not one number: log its mean")
        if value.device.type == "cuda":
            return PendingScalar(value.reshape(()), root)
        value = value.detach().reshape(()).item()
    return _rooted(float(value), root)


def _rooted(number: float, root: bool) -> float:
    return math.sqrt(number) if root and number >= 0 else number
