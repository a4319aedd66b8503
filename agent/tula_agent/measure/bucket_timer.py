"""When the gradients of each bucket that DDP reduces are complete, in a few backward passes of the first rank."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial
from itertools import chain
from statistics import median
from typing import Any

import torch

from tula_agent.torch_private import ddp_buckets

TIMED_STEPS = 5
"""Backward passes that are timed; each bucket's time is their median."""
MOST_STEPS = 20
"""Steps after which a model whose gradients never come whole is given up."""


class BucketTimer:
    """Times the parameters of one DDP module by hooks on them, which are gone after TIMED_STEPS steps.

    The module is held by a weak reference. On CUDA the times are those of events, read once the device is past them.
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
        """A micro-step begins; only the last one of a step counts."""
        if self._hooks:
            self._start, self._seen = self._now(), []

    def end(self) -> dict[str, list[float]] | None:
        """A step has ended: the timeline once it is known, and an empty one where it can't be."""
        self._steps += 1
        if self._hooks:
            if len(self._seen) == len(self._bytes) and self._start is not None:
                self._timed.append((self._start, self._seen))
            if len(self._timed) < TIMED_STEPS and self._steps < MOST_STEPS:
                return None
            self.close()
        if not self._timed:
            return {}
        if not all(_is_over(stamp) for _, seen in self._timed for _, stamp in seen[-1:]):
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
        except Exception:  # in the middle of a backward pass, which must not notice
            self._seen = []

    def _timeline(self) -> dict[str, list[float]]:
        model = self._model()
        buckets = None if model is None else ddp_buckets(model)
        if not buckets or sorted(chain.from_iterable(buckets)) != list(range(len(self._bytes))):
            return {}
        times = [{index: _seconds(start, stamp) for index, stamp in seen} for start, seen in self._timed]
        ready = [median(max(each[index] for index in bucket) for each in times) for bucket in buckets]
        return {"bucket_bytes": [sum(self._bytes[i] for i in bucket) for bucket in buckets], "ready_s": ready}


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _is_over(stamp: Any) -> bool:
    return isinstance(stamp, float) or bool(stamp.query())


def _seconds(start: Any, stamp: Any) -> float:
    return float(stamp - start) if isinstance(stamp, float) else float(start.elapsed_time(stamp)) * 1e-3
