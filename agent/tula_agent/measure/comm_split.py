"""Compute apart from communication on this rank, by the times that DDP takes of its reductions."""

from __future__ import annotations

from typing import Any

from tula_agent.readings import CommTiming, StepTiming
from tula_agent.torch_private import ddp_models, ddp_statistics, has_ddp_statistics, set_ddp_statistics_interval
from tula_agent.weak_refs import WeakList

TRAIN_INTERVAL = 50
"""Steps between two readings in training; the first ten are always read."""
CUDA_TRAIN_INTERVAL, CUDA_PROFILE_INTERVAL = 100, 4
"""On CUDA, DDP waits for the device at the start of a step that it times: in training as seldom as DDP does by default,
and in a profiling run seldom enough to leave most steps undisturbed."""
ALWAYS_SAMPLED = 10
_KEPT_STEPS = 4


def sample_interval(models: list[Any], profiling: bool) -> int:
    """Steps from one reading of `models` (DDP) to the next."""
    if any(getattr(model, "device_type", "cpu") == "cuda" for model in models):
        return CUDA_PROFILE_INTERVAL if profiling else CUDA_TRAIN_INTERVAL
    return 1 if profiling else TRAIN_INTERVAL


class CommSplit:
    """Reads the DDP modules among `models` at each boundary between two micro-steps.

    DDP's statistics lag: the forward pass of one synchronised iteration publishes the times of the one before, and its
    `iteration` shows whether anything new was published. So the timings of the last few steps are kept until then.
    `usable` is False without a DDP module, or where DDP takes no times. Models are held by weak references.
    """

    def __init__(self, models: list[Any], profiling: bool) -> None:
        timed = [model for model in ddp_models(models) if has_ddp_statistics(model)]
        self.usable = bool(timed)
        self._models = WeakList(timed)
        self._interval = sample_interval(timed, profiling)
        self._timings: dict[int, StepTiming] = {}
        self._iteration = -1
        self._synced_step: int | None = None
        self._boundaries_to_skip = 0
        self._iterations_per_step = 1.0
        self._last_change: tuple[int, int] | None = None  # iteration and step of the last publication
        for model in timed:
            set_ddp_statistics_interval(model, self._interval)

    def at_boundary(self, step: int, ended: StepTiming | None) -> CommTiming | None:
        """The times of an earlier step, if DDP has published them since the last boundary.

        step: the step under way; ended: that step's timing when this boundary is its end. Costs about 8 us when it
        reads, and next to nothing at boundaries before DDP can have published.
        """
        if ended is not None:
            self._timings[ended.step] = ended
            self._timings.pop(ended.step - _KEPT_STEPS, None)
        if self._boundaries_to_skip > 0:
            self._boundaries_to_skip -= 1
            return None
        published = self._read(step)
        timing = None if published is None else self._timings.get(published[0])
        if published is None or timing is None:
            return None
        return CommTiming(timing.step, timing.step_time_s, timing.input_time_s, *published[1:])

    def _read(self, step: int) -> tuple[int, float, float] | None:
        """(step, communication, exposed communication in seconds) if something new was published, else None."""
        data = [ddp_statistics(model) for model in self._models]
        iteration = int(data[0].get("iteration", 0)) if data else 0
        if iteration == self._iteration or iteration == 0:
            return None
        measured, self._synced_step = self._synced_step, step
        self._iteration = iteration
        if self._last_change is not None and step > self._last_change[1]:
            iterations, steps = iteration - self._last_change[0], step - self._last_change[1]
            self._iterations_per_step = max(1.0, iterations / steps)
        self._last_change = (iteration, step)
        communication = sum(int(d.get("backward_comm_time", 0)) for d in data) * 1e-9
        overlap = sum(int(d.get("backward_compute_comm_overlap_time", 0)) for d in data) * 1e-9
        if self._interval > 1 and iteration >= ALWAYS_SAMPLED:
            # DDP publishes next at the next multiple of the interval.
            self._boundaries_to_skip = max(0, self._interval - iteration % self._interval - 1)
            self._synced_step = None
            measured = step - 1 if self._iterations_per_step < 1.5 else measured
        if measured is None or communication < 0 or overlap < 0:
            return None
        return measured, communication, max(0.0, communication - overlap)
