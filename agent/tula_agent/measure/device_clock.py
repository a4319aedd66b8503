"""Step time by the device's clock: events recorded in the stream, read once the device has passed them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from tula_agent.guard import logger
from tula_agent.readings import Interval

POOL_SIZE = 256
"""Events at most: four a step, so that 64 steps may be in flight; a step beyond that has wall time only."""


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
        self.events_made = 0
        self._make = make
        self._pool_size = pool_size
        self._free: deque[Any] = deque()  # this thread takes events, the shipping thread gives them back
        self._record = record
        self.capturing = capturing  # an event recorded while a CUDA graph is captured would be part of it
        self._open: Interval | None = None
        self._broken = False

    def begin(self) -> None:
        """A step begins; an unfinished one before it is discarded."""
        self.drop()
        start = self._mark()
        self._open = None if start is None else Interval(self._free, start)

    def batch(self) -> None:
        """Its first batch has arrived."""
        if self._open is not None and self._open.batch is None:
            self._open.batch = self._mark()

    def optimizer(self) -> None:
        """Its first optimizer is about to step."""
        if self._open is not None and self._open.optimizer is None and not self.capturing():
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
            if self._free:
                event = self._free.popleft()
            elif self.events_made < self._pool_size:
                self.events_made += 1
                event = self._make()
            else:
                return None  # all are in flight
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
