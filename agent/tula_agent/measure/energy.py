"""Joules of a step, from the counter of energy that NVML keeps of a device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from tula_agent.measure.memory import total_energy_j

_LEAST_S = 1.0  # the counter moves some ten times a second


class EnergyMeter:
    """Joules that this rank's device takes for a step, between the first measured step of a batch and a reading.

    `read_j` returns the joules that a device has taken so far, None where nothing counts them. Both ends are read
    without waiting for the device, so steps that are queued there count at the end that they run in.
    """

    def __init__(
        self,
        read_j: Callable[[torch.device | None], float | None] = total_energy_j,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read_j, self._clock = read_j, clock
        self._begin: tuple[int, float, float] | None = None

    def begin(self, step: int, device: torch.device | None) -> None:
        """The measured steps of a batch begin with `step`."""
        joules = self._read_j(device)
        self._begin = None if joules is None else (step, self._clock(), joules)

    def joules_per_step(self, step: int, device: torch.device | None) -> float | None:
        """Return the mean of the steps before `step`; None without a counter, and within the first second."""
        if self._begin is None:
            return None
        first, began_s, before = self._begin
        if step <= first or self._clock() - began_s < _LEAST_S:
            return None
        joules = self._read_j(device)
        return None if joules is None or joules <= before else (joules - before) / (step - first)
