"""Reads what DDP does in a step on this rank: how long its reductions take, and when each bucket is complete."""

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
"""Steps between two readings in training; the first ten are always read."""
CUDA_TRAIN_INTERVAL, CUDA_PROFILE_INTERVAL = 100, 4
"""The same on CUDA, where DDP waits for the device at the start of each step that it times.

In training this is as rare as by DDP's default; in a profiling run it is rare enough to leave most steps undisturbed.
"""
ALWAYS_SAMPLED = 10
_KEPT_STEPS = 4
TIMED_STEPS = 5
"""Backward passes that are timed; each bucket's time is their median."""
MOST_STEPS = 20
"""Steps after which the timer gives up on a model whose gradients are never complete."""


def sample_interval(models: list[Any], profiling: bool) -> int:
    """Return the number of steps between two readings of the DDP modules `models`."""
    if any(getattr(model, "device_type", "cpu") == "cuda" for model in models):
        return CUDA_PROFILE_INTERVAL if profiling else CUDA_TRAIN_INTERVAL
    return 1 if profiling else TRAIN_INTERVAL


class CommSplit:
    """Reads the DDP modules among `models` at each boundary between two micro-steps.

    DDP's statistics lag: the forward pass of a synchronised iteration publishes the times of the previous one, and its
    `iteration` shows whether anything new was published. The timings of the last few steps are therefore kept until
    their communication times are published. `usable` is False without a DDP module, or if DDP does not time its
    reductions. Models are held by weak references.
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
        self._reductions = [1] * len(timed)  # of a step, by model: each micro-step makes one without `no_sync`
        self._counted_at: tuple[list[int], int] | None = None  # iterations by model, at the first reading in a step
        for model in timed:
            set_ddp_statistics_interval(model, self._interval)

    def at_boundary(self, step: int, ended: StepTiming | None) -> CommTiming | None:
        """Return the times of an earlier step, if DDP has published them since the last boundary.

        step: the current step; ended: the step's timing if it ends at this boundary. A call costs about 8 us when it
        reads, and next to nothing while DDP cannot have published.
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
        """Return the step and its total and exposed communication in seconds, or None if DDP published nothing new."""
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
            # DDP publishes next at the next multiple of the interval.
            self._boundaries_to_skip = max(0, self._interval - iteration % self._interval - 1)
            self._synced_step = None
            measured = step - 1 if self._reductions[0] == 1 else measured
        if measured is None or communication < 0 or overlap < 0:
            return None
        return measured, communication, max(0.0, communication - overlap)


class BucketTimer:
    """Times when the gradients of one DDP module are ready, by hooks that are removed after TIMED_STEPS steps.

    The module is held by a weak reference. On CUDA, the times come from events, which are read once the device has
    passed them.
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
        """Begin a micro-step; only the last one of a step counts."""
        if self._hooks:
            self._start, self._seen = self._now(), []

    def end(self) -> dict[str, list[float]] | None:
        """End a step.

        Return the timeline once it is complete, an empty timeline if it cannot be measured, and None until then.
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
        except Exception:  # runs in the middle of a backward pass, which it must not disturb
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
        raise RuntimeError("an event that is recorded in a capture has no time")
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _seconds(start: Any, stamp: Any) -> float:
    return float(stamp - start) if isinstance(stamp, float) else float(start.elapsed_time(stamp)) * 1e-3
