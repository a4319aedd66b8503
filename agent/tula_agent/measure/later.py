"""Numbers that are still on a device: brought to the host without waiting, read once they have arrived."""

from __future__ import annotations

import math
from typing import Any

import torch

from tula_agent.torch_private import local_part

__all__ = ["Later", "to_number"]


class Later:
    """A scalar on its way to the host. `ready` never waits; `value` is only meaningful once it is ready."""

    __slots__ = ("_event", "_host", "_root")

    def __init__(self, scalar: torch.Tensor, root: bool = False) -> None:
        self._host = torch.empty((), dtype=torch.float32, pin_memory=True)
        self._host.copy_(scalar.detach().float(), non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(scalar.device))  # the current device may be another one
        self._root = root

    @property
    def ready(self) -> bool:
        """True once the copy is done."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    @property
    def value(self) -> float:
        """The number; its square root where a squared norm was stored."""
        number = float(self._host)
        return math.sqrt(number) if self._root and number >= 0 else number


def to_number(value: Any, root: bool = False) -> float | Later:
    """A float now where that costs nothing, else a `Later`. Raises TypeError or ValueError for what is no number."""
    if isinstance(value, torch.Tensor):
        value = local_part(value)  # anything else on a DTensor may start a collective, and only one rank is here
        if value.numel() != 1:
            raise ValueError(f"a tensor of shape {tuple(value.shape)} is not one number: log its mean")
        if value.device.type == "cuda":
            return Later(value.reshape(()), root)
        value = value.detach().reshape(()).item()
    number = float(value)
    return math.sqrt(number) if root and number >= 0 else number
