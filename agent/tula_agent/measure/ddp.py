"""Measures how long DDP's reductions take in a step on this rank, and when each bucket of gradients is complete."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial
from itertools import chain
from statistics import median
from typing import Any

import torch

from tula_agent.readings import CommTiming, StepTiming
from tula_agent.torch_private import (
    ddp_buckets,
    ddp_models,
    ddp_statistics,
    has_ddp_statistics,
    set_ddp_statistics_interval,
)

TRAIN_INTERVAL = 50
"""Number of steps between two readings in training; the first ten steps are always read."""
CUDA_TRAIN_INTERVAL, CUDA_PROFILE_INTERVAL = 100, 4
"""Numbers of steps between two readings on CUDA, where DDP waits for the device at the start of each step that it
times.

In training, the number is DDP's default; in a profiling run, it leaves most steps undisturbed.
"""
ALWAYS_SAMPLED = 10
_KEPT_STEPS = 4
TIMED_STEPS = 5
"""Number of backward passes that are timed; each bucket's time is the median over these passes."""
MOST_STEPS = 20
"""Number of steps after which the timer stops if the model's gradients are never complete."""


def sample_interval(models: list[Any], profiling: bool) -> int:
    """Return the number of steps between two readings of the communication times of `models`."""
    if any(getattr(model, "device_type", "cpu") == "cuda" for model in models):
        return CUDA_PROFILE_INTERVAL if profiling else CUDA_TRAIN_INTERVAL
    return 1 if profiling else TRAIN_INTERVAL


class CommSplit:
    """Reads the communication times of the DDP modules among `models` at each boundary between two micro-steps.

    DDP publishes statistics late: the forward pass of a synchronised iteration publishes the times of the previous
    iteration, and the field `iteration` shows whether these times are new. Therefore, this class keeps the timings of
    the last few steps until DDP publishes their communication times. `usable` is False if there is no DDP module or if
    DDP does not time its reductions. The models are kept as weak references.
    """

    def __init__(self, models: list[Any], profiling: bool) -> None:
        timed = [model for model in ddp_models(models) if has_ddp_statistics(model)]
        self.usable = bool(timed)
        self._models = [weakref.ref(model) for model in timed]
        self._interval = sample_interval(timed, profiling)
        self._timings: dict[int, StepTiming] = {}
        self._iteration = -1
        self._synced_step: int | None = None
        self._boundaries_to_skip = 0
        self._reductions = [1] * len(timed)  # reductions in a step, by model; one per micro-step without `no_sync`
        self._counted_at: tuple[list[int], int] | None = None  # iterations by model, and the step of that reading
        for model in timed:
            set_ddp_statistics_interval(model, self._interval)

    def at_boundary(self, step: int, ended: StepTiming | None) -> CommTiming | None:
        """Return the times of an earlier step, if DDP has published them since the last boundary.

        step: the current step. ended: the timing of the step that ends at this boundary, or None. A call takes about 8
        us if it reads DDP's statistics, and almost no time if DDP cannot have published new ones.
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
        """Return a step's number and its total and exposed communication time in seconds; None if nothing is new."""
        models = [model() for model in self._models]
        data = [ddp_statistics(model) for model in models if model is not None]
        iterations = [int(statistics.get("iteration", 0)) for statistics in data]
        iteration = iterations[0] if data else 0
        if iteration == self._iteration or iteration == 0:
            return None
        measured, self._synced_step = self._synced_step, step
        self._iteration = iteration
        if self._counted_at is None or step > self._counted_at[1]:
            if self._counted_at is not None and len(self._counted_at[0]) == len(iterations):
                steps = step - self._counted_at[1]
                pairs = zip(iterations, self._counted_at[0], strict=True)
                self._reductions = [max(1, round((now - before) / steps)) for now, before in pairs]
            self._counted_at = (iterations, step)
        parts = list(zip(data, self._reductions, strict=False))
        communication = sum(n * int(d.get("backward_comm_time", 0)) for d, n in parts) * 1e-9
        overlap = sum(n * int(d.get("backward_compute_comm_overlap_time", 0)) for d, n in parts) * 1e-9
        if self._interval > 1 and iteration >= ALWAYS_SAMPLED:
            # DDP's next publication is at the next multiple of the interval.
            self._boundaries_to_skip = max(0, self._interval - iteration % self._interval - 1)
            self._synced_step = None
            measured = step - 1 if self._reductions[0] == 1 else measured
        if measured is None or communication < 0 or overlap < 0:
            return None
        return measured, communication, max(0.0, communication - overlap)


class BucketTimer:
    """Records with hooks when the gradients of one DDP module are ready; removes the hooks after TIMED_STEPS steps.

    The module is kept as a weak reference. On CUDA, the times come from events, which are read once they have
    completed.
    """

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        parameters = [p for p in model.parameters() if p.requires_grad]
        self._bytes = [p.numel() * p.element_size() for p in parameters]
        on_device = bool(parameters) and parameters[0].is_cuda
        self._now: Callable[[], Any] = _event if on_device else time.perf_counter
        self._seen: list[tuple[int, Any]] = []
        self._start: Any = None
        self._timed: list[tuple[Any, list[tuple[int, Any]]]] = []
        self._steps = 0
        self._hooks = [p.register_post_accumulate_grad_hook(partial(self._ready, i)) for i, p in enumerate(parameters)]

    def begin(self) -> None:
        """Begin a micro-step; only the last micro-step of a step is recorded."""
        if self._hooks:
            self._start, self._seen = self._now(), []

    def end(self) -> dict[str, list[float]] | None:
        """End a step; return the timeline once it is complete, and None until then.

        If the timeline cannot be measured, it is empty.
        """
        self._steps += 1
        if self._hooks:
            if len(self._seen) == len(self._bytes) and self._start is not None:
                self._timed.append((self._start, self._seen))
            if len(self._timed) < TIMED_STEPS and self._steps < MOST_STEPS:
                return None
            self.close()
        if not self._timed:
            return {}
        if not all(isinstance(stamp, float) or stamp.query() for _, seen in self._timed for _, stamp in seen[-1:]):
            return None
        return self._timeline()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _ready(self, index: int, _: torch.Tensor) -> None:
        try:
            self._seen.append((index, self._now()))
        except Exception:  # the backward pass, which is running now, must not be disturbed
            self._seen = []

    def _timeline(self) -> dict[str, list[float]]:
        model = self._model()
        buckets = None if model is None else ddp_buckets(model)
        if not buckets or sorted(chain.from_iterable(buckets)) != list(range(len(self._bytes))):
            return {}
        times = [{index: _seconds(start, stamp) for index, stamp in seen} for start, seen in self._timed]
        ready = [median(max(step[index] for index in bucket) for step in times) for bucket in buckets]
        return {"bucket_bytes": [sum(self._bytes[i] for i in bucket) for bucket in buckets], "ready_s": ready}


def _event() -> Any:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("an event cannot be timed if it is recorded while a CUDA graph is captured")
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _seconds(start: Any, stamp: Any) -> float:
    return float(stamp - start) if isinstance(stamp, float) else float(start.elapsed_time(stamp)) * 1e-3
