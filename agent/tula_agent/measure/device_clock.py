"""Step time by the device's clock: events recorded in the stream, read once the device has passed them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from tula_agent.guard import logger
from tula_agent.readings import DeviceTiming

POOL_SIZE = 256
"""Events at most: four a step, so that 64 steps may be in flight; a step beyond that has wall time only."""


class EventPool:
    """Events that are reused. The training thread takes them, the shipping thread gives them back."""

    def __init__(self, make: Callable[[], Any], limit: int = POOL_SIZE) -> None:
        self.made = 0
        self._make = make
        self._limit = limit
        self._free: deque[Any] = deque()

    def take(self) -> Any | None:
        """An event to record, or None when all are in flight."""
        try:
            return self._free.popleft()
        except IndexError:
            if self.made >= self._limit:
                return None
        self.made += 1
        return self._make()

    def give(self, events: list[Any]) -> None:
        """Put back events that were read or discarded; recording one again overwrites its time."""
        self._free.extend(events)


class Interval:
    """The events of one step, open until `DeviceClock.end`. Once `poll` has answered, they are back in their pool."""

    __slots__ = ("_pool", "batch", "end", "optimizer", "start")

    def __init__(self, pool: EventPool, start: Any) -> None:
        self._pool = pool
        self.start = start
        self.batch: Any = None
        self.optimizer: Any = None
        self.end: Any = None

    def poll(self) -> DeviceTiming | None:
        """The times, or None while the device has not reached the end of the step; never waits."""
        if self.end is None or not self.end.query():
            return None
        try:
            whole = self.start.elapsed_time(self.end) * 1e-3
            waited = None if self.batch is None else self.start.elapsed_time(self.batch) * 1e-3
            stepped = None if self.optimizer is None else self.optimizer.elapsed_time(self.end) * 1e-3
        finally:
            self.release()
        return DeviceTiming(whole, waited, stepped)

    def release(self) -> None:
        """Give the events back to the pool, read or not."""
        held = [e for e in (self.start, self.batch, self.optimizer, self.end) if e is not None]
        self.start = self.batch = self.optimizer = self.end = None
        self._pool.give(held)


class DeviceClock:
    """Marks the moments of a step in the device's stream; nothing waits for the device.

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
        self.pool = EventPool(make, pool_size)
        self._record = record
        self._capturing = capturing  # an event recorded while a CUDA graph is captured would be part of it
        self._open: Interval | None = None
        self._broken = False

    def begin(self) -> None:
        """A step begins; an unfinished one before it is discarded."""
        self.drop()
        start = self._mark()
        self._open = None if start is None else Interval(self.pool, start)

    def batch(self) -> None:
        """Its first batch has arrived."""
        if self._open is not None and self._open.batch is None:
            self._open.batch = self._mark()

    def optimizer(self) -> None:
        """Its first optimizer is about to step."""
        if self._open is not None and self._open.optimizer is None and not self._capturing():
            self._open.optimizer = self._mark()

    def end(self) -> Interval | None:
        """The step is over: poll the result for its times; None when it was not marked."""
        interval, self._open = self._open, None
        if interval is None:
            return None
        interval.end = self._mark()
        if interval.end is None:
            interval.release()
            return None
        return interval

    def drop(self) -> None:
        """Discard the step under way: the loop was left in it."""
        if self._open is not None:
            self._open.release()
            self._open = None

    def _mark(self) -> Any | None:
        if self._broken:
            return None
        try:
            event = self.pool.take()
            if event is not None:
                self._record(event)
        except Exception as error:  # a guard would cost more than the mark
            self._broken = True
            logger.warning("the device's clock failed, step times are wall time from now on: %r", error)
            return None
        return event


def clock_for(device: torch.device) -> DeviceClock | None:
    """The clock of `device`; None for everything but CUDA (and ROCm)."""
    if device.type != "cuda" or not hasattr(torch.cuda, "Event") or not hasattr(torch.cuda, "current_stream"):
        return None

    def make() -> Any:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def record(event: Any) -> None:
        # The current device may differ from the one that the model runs on.
        event.record(torch.cuda.current_stream(device))

    return DeviceClock(make, record, capturing=torch.cuda.is_current_stream_capturing)
