"""Measures the energy of a step in joules with a device's energy counter, read through NVML."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from tula_agent.measure.memory import total_energy_j

_LEAST_S = 1.0  # the counter is updated about ten times per second


class EnergyMeter:
    """Measures the energy per step on this rank's device.

    The energy per step is the mean power since `begin`, multiplied by the mean step time.

    Work between steps, such as an evaluation, affects the mean power but not the time of a step. `read_j` returns the
    energy in joules that a device has used so far, or None if the device has no counter. No reading waits for the
    device, so the result includes steps that were queued at the first reading, but not steps that are still queued at
    the last one.
    """

    def __init__(
        self,
        read_j: Callable[[torch.device | None], float | None] = total_energy_j,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read_j, self._clock = read_j, clock
        self._begin: tuple[int | None, float, float] | None = None
        self._steps, self._in_steps_s = 0, 0.0

    def begin(self, local_batch_size: int | None, device: torch.device | None) -> None:
        """Start counting at the first measured step of a batch size."""
        joules = self._read_j(device)
        self._begin = None if joules is None else (local_batch_size, self._clock(), joules)
        self._steps, self._in_steps_s = 0, 0.0

    def add_step(self, step_time_s: float) -> None:
        """Count a step that took `step_time_s` seconds."""
        self._steps += 1
        self._in_steps_s += step_time_s

    def joules_per_step(self, local_batch_size: int | None, device: torch.device | None) -> float | None:
        """Return the mean energy per step in joules, measured since `begin`.

        Returns None if there is no counter, if less than a second has passed, or if the batch size has changed since
        `begin`.
        """
        if self._begin is None or not self._steps:
            return None
        batch, began_s, before = self._begin
        elapsed_s = self._clock() - began_s
        if batch != local_batch_size or elapsed_s < _LEAST_S:
            return None
        joules = self._read_j(device)
        if joules is None or joules <= before:
            return None
        return (joules - before) / elapsed_s * self._in_steps_s / self._steps
