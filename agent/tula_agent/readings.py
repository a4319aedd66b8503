"""The inbox between the training thread, which measures, and the shipping thread, which sends.

`measure/` returns the records below, the recorder puts them into `Readings`, and `ship/` takes them out. Neither of the
two packages imports the other.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, Protocol, TypeVar

T = TypeVar("T")


class StepTiming(NamedTuple):
    """One optimizer step on this rank, seconds: `step_time_s` spans batch to batch, waiting for data included.

    `uneven`: its micro-steps had different batch sizes.
    """

    step: int
    step_time_s: float
    input_time_s: float
    micro_steps: int
    local_batch_size: int | None
    uneven: bool


class CommTiming(NamedTuple):
    """What DDP's clock on this rank says of one step, seconds. It includes waiting for slower ranks."""

    step: int
    step_time_s: float
    input_time_s: float
    comm_time_s: float
    exposed_comm_time_s: float

    @property
    def compute_time_s(self) -> float:
        """The step without waiting for data and for collectives."""
        return max(0.0, self.step_time_s - self.input_time_s - self.exposed_comm_time_s)


class DeviceTiming(NamedTuple):
    """One step by the device's clock, seconds; None where its event was not recorded.

    `input_time_s` is how long the device waited for data: zero while it had other work. `optimizer_time_s` runs from
    the optimizer's call to the end of the step, the clearing of gradients included.
    """

    step_time_s: float
    input_time_s: float | None
    optimizer_time_s: float | None


class PendingNumber(Protocol):
    """A number that is still on its way from the device."""

    def poll(self) -> float | None:
        """The number, or None while it has not arrived; never waits."""


class PendingDeviceTiming(Protocol):
    """The times of a step that the device has not finished yet."""

    def poll(self) -> DeviceTiming | None:
        """The times, or None while the device has not reached the end of the step; never waits."""

    def release(self) -> None:
        """Give its events back unread."""


class Readings:
    """Bounded queues that the training thread only appends to and the shipping thread only takes from.

    `deque.append` and `popleft` are atomic, so the training thread takes no lock. Over `limit` entries a new one is
    dropped and counted. `memory` is the newest breakdown, `epochs_before` the epochs that earlier processes of this
    training completed (None: unknown), `expects_comm` is True where every rank reports `CommTiming`s.
    """

    def __init__(self, limit: int) -> None:
        self.dropped = 0
        self.memory: dict[str, Any] | None = None
        self.epochs_before: float | None = None
        self.expects_comm = False
        self._limit = limit
        self._steps: deque[tuple[StepTiming, bool, bool]] = deque()
        self._values: deque[tuple[int, str, float | PendingNumber]] = deque()
        self._comm: deque[CommTiming] = deque(maxlen=limit)
        self._device: deque[tuple[int, PendingDeviceTiming]] = deque()  # bounded by the pool of events

    def add_step(self, timing: StepTiming, warmup: bool, sampled: bool = True) -> None:
        """A step has ended; only a sampled one becomes a sample, every one a point of the step-time series."""
        if len(self._steps) >= self._limit:
            self.dropped += 1
        else:
            self._steps.append((timing, warmup, sampled))

    def add_value(self, step: int, name: str, value: float | PendingNumber) -> None:
        """A named number of a step."""
        if len(self._values) >= self._limit:
            self.dropped += 1
        else:
            self._values.append((step, name, value))

    def add_comm(self, timing: CommTiming) -> None:
        """DDP's times of an earlier step; over the bound the oldest is dropped, since the step itself is kept."""
        self._comm.append(timing)

    def add_device(self, step: int, timing: PendingDeviceTiming) -> None:
        """The device will time `step`; call it before `add_step`."""
        self._device.append((step, timing))

    @property
    def empty(self) -> bool:
        """True when the shipping thread has taken everything."""
        return not (self._steps or self._values or self._comm or self._device)

    def take_steps(self) -> list[tuple[StepTiming, bool, bool]]:
        """All steps so far, oldest first: timing, warm-up, sampled."""
        return _take(self._steps)

    def take_values(self) -> list[tuple[int, str, float]]:
        """All numbers that have arrived; those still on a device stay."""
        arrived: list[tuple[int, str, float]] = []
        for step, name, value in _take(self._values):
            number = value if isinstance(value, (int, float)) else value.poll()
            if number is None:
                self._values.append((step, name, value))
            else:
                arrived.append((step, name, number))
        return arrived

    def take_comm(self) -> list[CommTiming]:
        """All of DDP's times so far, oldest first."""
        return _take(self._comm)

    def take_device(self) -> list[tuple[int, PendingDeviceTiming]]:
        """All steps that the device times, by step."""
        return _take(self._device)

    def take_memory(self) -> dict[str, Any] | None:
        """The newest memory breakdown, once."""
        memory, self.memory = self.memory, None
        return memory


def _take(queue: deque[T]) -> list[T]:
    return [queue.popleft() for _ in range(len(queue))]
