"""New thresholds reach every rank at the same step: the first rank's word travels by a reduction at a fixed cadence."""

from __future__ import annotations

import torch

from tula_agent.scaling.ranks import Arrival, Ranks
from tula_agent.scaling.thresholds import VECTOR_LENGTH, ScalingThresholds

__all__ = ["AGREE_EVERY", "Agreement"]

AGREE_EVERY = 16  # steps between two chances to change thresholds


class Agreement:
    """Every rank calls `poll` once a step, in the same order; a proposal of the first rank wins, others are ignored.

    The sum is started at every AGREE_EVERY-th step and read at the next one, so no step waits for it.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._proposed: ScalingThresholds | None = None
        self._arrival: Arrival | None = None

    def propose(self, thresholds: ScalingThresholds) -> None:
        """Ask for `thresholds`; safe from another thread (one reference is assigned)."""
        self._proposed = thresholds

    def settle(self, thresholds: ScalingThresholds, device: torch.device) -> ScalingThresholds:
        """The first rank's `thresholds`, on every rank, now: for the very first step."""
        vector = self._ranks.sum_(self._vector(thresholds, device))
        return ScalingThresholds.from_vector([float(x) for x in vector.tolist()[1:]])

    def poll(self, step: int, device: torch.device) -> ScalingThresholds | None:
        """What all ranks switch to at this step, if anything."""
        agreed = None
        if self._arrival is not None:
            values = self._arrival.values()
            self._arrival = None
            if values[0] > 0.5:
                agreed = ScalingThresholds.from_vector(values[1:])
        if step % AGREE_EVERY == 0:
            proposed, self._proposed = self._proposed, None
            self._arrival = self._ranks.send(self._vector(proposed, device))
        return agreed

    def _vector(self, thresholds: ScalingThresholds | None, device: torch.device) -> torch.Tensor:
        slots = [0.0] * (1 + VECTOR_LENGTH)
        if thresholds is not None and self._ranks.is_first:
            slots = [1.0, *thresholds.to_vector()]
        vector = torch.tensor(slots, dtype=torch.float64)
        if self._ranks.size == 1:
            return vector  # nothing to send, and no device to wait for
        if device.type == "cuda":
            vector = vector.pin_memory()  # or the copy would wait for all that the device has to do
        return vector.to(device, non_blocking=True)

    def state(self) -> list[float] | None:
        """A proposal still on its way, for a checkpoint; waits for the sum if it is in flight."""
        return None if self._arrival is None else self._arrival.values()

    def load(self, values: list[float] | None) -> None:
        """Inverse of `state`."""
        self._arrival = None if values is None else Arrival(torch.tensor(values, dtype=torch.float64))
