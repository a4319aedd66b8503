"""Compute apart from communication: what DDP's own clock says on each rank, and what that means over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from tula_agent.torch_private import ddp_statistics, has_ddp_statistics, set_ddp_statistics_interval
from tula_agent.weakly import Weakly

__all__ = ["DdpClock", "Reading", "Split", "merge", "sample_rate"]

TRAIN_RATE = 50
"""Steps between two readings in training; the first ten are always read."""
CUDA_TRAIN_RATE, CUDA_PROFILE_RATE = 100, 4
"""On CUDA, DDP waits for the device at the start of a step whose times it takes: no oftener than by itself in training,
and seldom enough in a profiling run to leave most steps alone."""
ALWAYS_SAMPLED = 10
STRAGGLER_SHARE = 0.02
"""Skew below this share of the step names nobody."""


@dataclass(frozen=True)
class Reading:
    """One rank's own view of one step, seconds. It includes waiting for late ranks, so alone it says little."""

    step: int
    step_time_s: float
    input_time_s: float
    comm_time_s: float
    exposed_comm_time_s: float

    @property
    def compute_time_s(self) -> float:
        """What the rank itself did: the step less waiting for data and for collectives."""
        return max(0.0, self.step_time_s - self.input_time_s - self.exposed_comm_time_s)


@dataclass(frozen=True)
class Split:
    """One step over all ranks, seconds. `straggler_rank` is None where the ranks arrive together."""

    compute_time_s: float
    comm_time_s: float
    exposed_comm_time_s: float
    skew_s: float
    straggler_rank: int | None


def merge(readings: Mapping[int, Reading]) -> Split:
    """One step's split from the reading of every rank, by rank.

    The last rank to arrive waits for nobody, so the least exposed time is the communication itself; what the others
    wait beyond it is skew, and the rank that waits least is the straggler. Compute is the median over ranks.
    """
    exposed = {rank: reading.exposed_comm_time_s for rank, reading in readings.items()}
    least = min(exposed.values())
    skew = max(exposed.values()) - least
    step_time = max(reading.step_time_s for reading in readings.values())
    last = min(exposed, key=lambda rank: (exposed[rank], rank))
    return Split(
        compute_time_s=median(reading.compute_time_s for reading in readings.values()),
        comm_time_s=min(reading.comm_time_s for reading in readings.values()),
        exposed_comm_time_s=least,
        skew_s=skew,
        straggler_rank=last if skew > STRAGGLER_SHARE * step_time else None,
    )


def sample_rate(models: list[Any], profiling: bool) -> int:
    """Steps from one reading of `models` (DDP) to the next."""
    if any(getattr(model, "device_type", "cpu") == "cuda" for model in models):
        return CUDA_PROFILE_RATE if profiling else CUDA_TRAIN_RATE
    return 1 if profiling else TRAIN_RATE


class DdpClock:
    """Reads DDP's runtime statistics: private since torch 1.8 and still there in 2.13, hence feature-detected.

    They lag: what the forward of one synchronised iteration publishes are the times of the one before. `iteration`
    tells whether anything new was published. `poll` is called at the end of every micro-step, in order. The models
    stay the script's: one that it lets go is read no more.
    """

    def __init__(self, models: list[Any], rate: int) -> None:
        self._models = Weakly(m for m in models if has_ddp_statistics(m))
        self._rate = rate
        self._iteration = -1
        self._synced_step: int | None = None
        self._wait = 0
        self._per_step = 1.0
        self._fresh_at: tuple[int, int] | None = None
        for model in self._models:
            set_ddp_statistics_interval(model, rate)

    @property
    def usable(self) -> bool:
        """False where there is no DDP, or one without statistics."""
        return bool(self._models)

    def poll(self, step: int) -> tuple[int, float, float] | None:
        """(step, communication, exposed communication in seconds) of an earlier micro-step, if there is news.

        step: the step under way at this boundary. Costs about 8 us when it looks, nothing when it is too early to.
        """
        if self._wait > 0:
            self._wait -= 1
            return None
        data = [ddp_statistics(model) for model in self._models]
        if not data:
            return None
        iteration = int(data[0].get("iteration", 0))
        if iteration == self._iteration or iteration == 0:
            return None
        previous, self._iteration = self._synced_step, iteration
        self._synced_step = step
        if self._fresh_at is not None and step > self._fresh_at[1]:
            self._per_step = max(1.0, (iteration - self._fresh_at[0]) / (step - self._fresh_at[1]))
        self._fresh_at = (iteration, step)
        communication = sum(int(d.get("backward_comm_time", 0)) for d in data) * 1e-9
        overlap = sum(int(d.get("backward_compute_comm_overlap_time", 0)) for d in data) * 1e-9
        if self._rate > 1 and iteration >= ALWAYS_SAMPLED:
            # The next is published at the next multiple of the rate.
            self._wait = max(0, self._rate - iteration % self._rate - 1)
            self._synced_step = None
            previous = step - 1 if self._per_step < 1.5 else previous
        if previous is None or communication < 0 or overlap < 0:
            return None
        return previous, communication, max(0.0, communication - overlap)
