"""Determines where each step ends and the next begins, and times steps with the clocks of the host and the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from tula_agent.guard import logger
from tula_agent.readings import Interval, StepTiming

_PATIENCE = 8
"""The timer waits this many times the expected number of micro-steps for a watched optimizer's first step."""
POOL_SIZE = 256
"""Maximum number of events. A step uses four, so 64 steps can be in flight; further steps have only wall time."""


class StepTimer:
    """Computes the timings of optimizer steps from a loop's two events, batch requested and batch ready.

    A step ends at the first boundary after the optimizer has stepped or, if no optimizer is watched, after
    `grad_accum_steps` micro-steps. A step that the optimizer skips (because of an inf under AMP) ends after the number
    of micro-steps on which two successive steps last agreed, since a script may not accumulate as configured.
    """

    # This code runs with cold caches at every step; `__slots__` halves its cost.
    __slots__ = (
        "_clock", "_expected", "_input", "_known", "_last", "_left_at", "_optimizer_at", "_sizes", "_started",
        "_stepped", "_wanted", "batches", "rose_from", "step", "watched",
    )  # fmt: skip

    def __init__(self, grad_accum_steps: int | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.step = self.batches = 0
        self.watched = False
        self.rose_from = 0  # the usual number of micro-steps before it first rose; 0: it never rose
        self._clock = clock
        self._expected = grad_accum_steps
        self._known = False  # True: `_expected` has been observed
        self._last = 0
        self._stepped = False
        self._started: float | None = None
        self._wanted = 0.0
        self._input = 0.0
        self._optimizer_at: float | None = None
        self._left_at: float | None = None
        self._sizes: list[int | None] = []

    @property
    def grad_accum_steps(self) -> int:
        """Return the number of micro-steps per step.

        The result is the configured number until two successive steps agree on another number. If no number is
        configured, the result is 1 during the first step, which then determines the number.
        """
        return self._expected or 1

    @property
    def between_steps(self) -> bool:
        """Return True if the last step has ended and the first batch of the next step has not arrived."""
        return not self._sizes

    @property
    def in_step(self) -> bool:
        """Return True if a batch has arrived, the optimizer has not stepped yet, and time is being counted."""
        return bool(self._sizes) and not self._stepped and self._left_at is None

    def optimizer_stepped(self, timed: bool = False) -> None:
        """Process a call of an optimizer's step; `timed` is False if the call also computes the gradients.

        A call without a preceding batch is not a training step: torch.distributed.checkpoint calls `step` in this way
        to create the optimizer's state. The time of the optimizer's step is measured from the first call.
        """
        if not self._sizes:
            return
        if not self._stepped and timed:
            self._optimizer_at = self._clock()
        elif not timed:
            self._optimizer_at = None
        self._stepped = True

    def forget_optimizer(self) -> None:
        """Discard the time of the optimizer's step, because it would include other work."""
        self._optimizer_at = None

    def want_batch(self) -> StepTiming | None:
        """Process the loop's request for a batch; return the timing of the step that ends here, or None."""
        now = self._wanted = self._clock()
        if self._started is None or not self._sizes:
            self._started = now
            return None
        micro = len(self._sizes)
        if self._stepped:
            if micro == self._last or self._expected is None:
                if self._known and micro > self.grad_accum_steps:
                    self.rose_from = self.rose_from or self.grad_accum_steps  # twice: not an epoch's end
                self._expected, self._known = micro, True
            self._last = micro
        else:
            expected = self._expected or (None if self.watched else 1)
            if self.watched and expected is not None and micro >= _PATIENCE * expected:
                self._known = True  # steps cannot be observed, as in a CUDA graph
            if expected is None or micro < expected or (self.watched and not self._known):
                return None
        uneven = micro > 1 and len(set(self._sizes)) > 1
        optimizer_s = None if self._optimizer_at is None else now - self._optimizer_at
        timing = StepTiming(self.step, now - self._started, self._input, micro, self._sizes[0], uneven, optimizer_s)
        self._begin(now)
        self.step += 1
        return timing

    def wanted(self) -> None:
        """Record that the loop requests a batch within a step."""
        self._wanted = self._clock()

    def waited(self) -> None:
        """Count the time since the loop's request for a batch as waiting for data."""
        self._input += self._clock() - self._wanted

    def batch_ready(self, local_batch_size: int | None) -> None:
        """Count a batch that the loader has delivered."""
        self.waited()
        self._sizes.append(local_batch_size)
        self.batches += 1

    def stepped_after(self, micro_steps: int, local_batch_size: int) -> None:
        """Record that the optimizer has stepped after `micro_steps` micro-steps.

        A micro-step without an observed batch gets the size of the last observed batch or else `local_batch_size`.
        """
        if self._started is not None:
            sizes = self._sizes or [local_batch_size]
            self._sizes = (sizes + sizes[-1:] * micro_steps)[:micro_steps]
            self._stepped = True

    def more_micro_steps(self, count: int) -> None:
        """Count `count` more micro-steps, whose batches were fetched with the last batch and have the same size."""
        self._sizes += self._sizes[-1:] * count

    def pause(self) -> None:
        """Leave the loop; the time until the loop's next batch (such as an evaluation) is not part of any step."""
        self._begin(None)
        self._left_at = None

    def _begin(self, started: float | None) -> None:
        self._started, self._input, self._sizes, self._stepped, self._optimizer_at = started, 0.0, [], False, None

    def leave_out(self) -> None:
        """Stop counting time until `count_again` is called, even within a step."""
        self._left_at = self._clock()

    def count_again(self) -> None:
        """Resume counting time; shift the start of the step and of its wait for data by the time since `leave_out`."""
        now, left_at = self._clock(), self._left_at
        self._left_at = None
        if left_at is not None and self._started is not None:
            self._started = min(now, self._started + now - left_at)
            self._wanted = min(now, self._wanted + now - left_at)
            if self._optimizer_at is not None:
                self._optimizer_at = min(now, self._optimizer_at + now - left_at)

    def restart(self) -> None:
        """Begin the next step now, so that its time excludes the agent's own work since the boundary."""
        if self._started is not None and not self._sizes:
            self._started = self._wanted = self._clock()


class DeviceClock:
    """Records events in the device's stream to time a step, without waiting for the device.

    The methods must be called on the training thread in this order: `begin`, then `batch` and `optimizer` once each,
    then `end`. They never raise. Each call records one event, which takes a few microseconds on the host.
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
        self._free: deque[Any] = deque()  # this thread takes events, and the shipping thread returns them
        self._record = record
        self.capturing = capturing  # an event recorded during a capture would become part of the CUDA graph
        self._open: Interval | None = None
        self._broken = False

    def begin(self) -> None:
        """Begin a step; discard an unfinished previous step."""
        self.drop()
        start = self._mark()
        self._open = None if start is None else Interval(self._free, start)

    def batch(self) -> None:
        """Record that the step's first batch has arrived."""
        if self._open is not None and self._open.batch is None:
            self._open.batch = self._mark()

    def optimizer(self) -> None:
        """Record that the step's first optimizer is about to step."""
        if self._open is not None and self._open.optimizer is None and not self.capturing():
            self._open.optimizer = self._mark()

    def end(self) -> Interval | None:
        """End the step and return its interval, which can be polled for the times; None if no events were recorded."""
        interval, self._open = self._open, None
        if interval is None:
            return None
        interval.end = self._mark()
        if interval.end is None:
            interval.release()
            return None
        return interval

    def drop(self) -> None:
        """Discard the current step, since the loop was left during the step."""
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
                return None  # all events are in flight
            self._record(event)
        except Exception as error:  # a guard would take longer than recording an event
            self._broken = True
            logger.warning("the device's clock failed, so step times are wall-clock times from now on: %r", error)
            return None
        return event


def clock_for(device: torch.device) -> DeviceClock | None:
    """Return the clock of `device`, or None if the device is neither CUDA nor ROCm."""
    if device.type != "cuda":
        return None

    def make() -> Any:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def record(event: Any) -> None:
        # The current device may differ from the device on which the model runs.
        event.record(torch.cuda.current_stream(device))

    return DeviceClock(make, record, capturing=torch.cuda.is_current_stream_capturing)
