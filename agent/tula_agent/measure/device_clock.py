"""Step time by the device's own clock: events recorded in the stream, read once the device has passed them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tula_agent.guard import logger

__all__ = ["POOL_SIZE", "DeviceClock", "DeviceTiming", "EventPool", "Interval", "clock_for"]

POOL_SIZE = 256
"""Events in existence at most: four a step, so 64 steps may be under way; beyond that a step has wall time only."""


class DeviceTiming(NamedTuple):
    """One step as the device lived it, seconds; None where its moment was not marked.

    `input_time_s` is the wait for data that the device felt: none while it had other work. `optimizer_time_s` is what
    follows the optimizer's call, the clearing of gradients included.
    """

    step_time_s: float
    input_time_s: float | None
    optimizer_time_s: float | None


class EventPool:
    """Events that are made once and lent again. The training thread takes, the shipping thread gives back."""

    def __init__(self, make: Callable[[], Any], limit: int = POOL_SIZE) -> None:
        self.made = 0
        self._make = make
        self._limit = limit
        self._free: deque[Any] = deque()

    def take(self) -> Any | None:
        """An event to record, or None when all are under way."""
        try:
            return self._free.popleft()
        except IndexError:
            if self.made >= self._limit:
                return None
        self.made += 1
        return self._make()

    def give(self, events: list[Any]) -> None:
        """These have been read, or are not wanted any more; recording one again forgets what it said."""
        self._free.extend(events)


class Interval:
    """The events of one step. `poll` never waits; once it has answered, the events are back in their pool."""

    __slots__ = ("_batch", "_end", "_optimizer", "_pool", "_start")

    def __init__(self, pool: EventPool, start: Any) -> None:
        self._pool = pool
        self._start = start
        self._batch: Any = None
        self._optimizer: Any = None
        self._end: Any = None

    def poll(self) -> DeviceTiming | None:
        """What the device says, or None while it has not come to the end of the step."""
        if self._end is None or not self._end.query():
            return None
        try:
            whole = self._start.elapsed_time(self._end) * 1e-3
            waited = None if self._batch is None else self._start.elapsed_time(self._batch) * 1e-3
            stepped = None if self._optimizer is None else self._optimizer.elapsed_time(self._end) * 1e-3
        finally:
            self.release()
        return DeviceTiming(whole, waited, stepped)

    def release(self) -> None:
        """Back to the pool, read or not."""
        held = [e for e in (self._start, self._batch, self._optimizer, self._end) if e is not None]
        self._start = self._batch = self._optimizer = self._end = None
        self._pool.give(held)


class DeviceClock:
    """Marks the moments of a step in the device's stream. Nothing here waits for the device.

    Called on the training thread, and never raises: `begin`, then `batch` and `optimizer` once each, then `end`. A
    mark costs one event record, a few microseconds of the host's time.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        record: Callable[[Any], None],
        pool_size: int = POOL_SIZE,
        capturing: Callable[[], bool] = lambda: False,
    ) -> None:
        self._pool = EventPool(make, pool_size)
        self._record = record
        self._capturing = capturing  # an event recorded while a CUDA graph is captured would be part of it
        self._open: Interval | None = None
        self._broken = False

    def begin(self) -> None:
        """A step begins; one that was begun before is forgotten."""
        self.drop()
        start = self._mark()
        self._open = None if start is None else Interval(self._pool, start)

    def batch(self) -> None:
        """Its first batch has arrived."""
        if self._open is not None and self._open._batch is None:
            self._open._batch = self._mark()

    def optimizer(self) -> None:
        """Its first optimizer is about to step."""
        if self._open is not None and self._open._optimizer is None and not self._capturing():
            self._open._optimizer = self._mark()

    def end(self) -> Interval | None:
        """It is over: what to poll for its times, or None when it was not marked."""
        interval, self._open = self._open, None
        if interval is None:
            return None
        interval._end = self._mark()
        if interval._end is None:
            interval.release()
            return None
        return interval

    def drop(self) -> None:
        """The step under way is nobody's: the loop was left in it."""
        if self._open is not None:
            self._open.release()
            self._open = None

    def _mark(self) -> Any | None:
        if self._broken:
            return None
        try:
            event = self._pool.take()
            if event is not None:
                self._record(event)
        except Exception as error:  # a guard would cost more than the mark
            self._broken = True
            logger.warning("the device's clock failed, step times are by wall from now on: %r", error)
            return None
        return event


def clock_for(device: torch.device) -> DeviceClock | None:
    """The clock of `device`, or None where it has none that this code knows: everything but CUDA (and ROCm)."""
    if device.type != "cuda" or not hasattr(torch.cuda, "Event") or not hasattr(torch.cuda, "current_stream"):
        return None

    def make() -> Any:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def record(event: Any) -> None:
        # Named, since the current device may be another one here than in the model's forward.
        event.record(torch.cuda.current_stream(device))

    return DeviceClock(make, record, capturing=torch.cuda.is_current_stream_capturing)
