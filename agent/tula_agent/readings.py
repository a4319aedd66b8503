"""The inbox between the training thread, which measures, and the shipping thread, which sends.

`measure/` returns the records below, the recorder puts them into `Readings`, and `ship/` takes them out. Neither of the
two packages imports the other.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import torch

from tula_agent.torch_private import local_part

T = TypeVar("T")
_THREAD_LOCAL = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, the mode of a thread that ignores captures in other threads."""


class StepTiming(NamedTuple):
    """One optimizer step on this rank, in seconds: `step_time_s` spans batch to batch, including waits for data.

    `uneven`: its micro-steps had different batch sizes, or the step differs from the run's usual step.
    `optimizer_time_s` is the time from the first optimizer's call to the end of the step, including the clearing of
    gradients; None if no optimizer was watched or the host does not wait for the device.
    """

    step: int
    step_time_s: float
    input_time_s: float
    micro_steps: int
    local_batch_size: int | None
    uneven: bool
    optimizer_time_s: float | None = None


class CommTiming(NamedTuple):
    """The times of one step by DDP's clock on this rank, in seconds, including waits for slower ranks."""

    step: int
    step_time_s: float
    input_time_s: float
    comm_time_s: float
    exposed_comm_time_s: float

    @property
    def compute_time_s(self) -> float:
        """Return the step's time without waits for data or collectives."""
        return max(0.0, self.step_time_s - self.input_time_s - self.exposed_comm_time_s)


class HostCopy:
    """A GPU tensor that is being copied to pinned host memory; `host` has the values once `event` has passed."""

    __slots__ = ("event", "host")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self.host.copy_(tensor, non_blocking=True)
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(torch.cuda.current_stream(tensor.device))  # the current device may be another one


def to_number(value: Any) -> float | HostCopy:
    """Return a float if that needs no wait, else a `HostCopy`.

    Raises TypeError or ValueError if `value` is not a single number.
    """
    if isinstance(value, torch.Tensor):
        value = local_part(value)  # anything else on a DTensor may start a collective, and only one rank calls this
        if value.numel() != 1:
            raise ValueError(f"a tensor of shape {tuple(value.shape)} is not one number: log its mean")
        if value.device.type == "cuda":
            return HostCopy(value.detach().float().reshape(()))
        value = value.detach().reshape(()).item()
    return float(value)


class Interval:
    """The events of one step in the device's stream; open until the end of the step is recorded.

    The events return to `free` once `poll` has returned times, or after `release`.
    """

    __slots__ = ("_free", "batch", "end", "optimizer", "start")

    def __init__(self, free: deque[Any], start: Any) -> None:
        self._free = free
        self.start = start
        self.batch: Any = None
        self.optimizer: Any = None
        self.end: Any = None

    def poll(self) -> tuple[float, float | None, float | None] | None:
        """Return the times of the step in seconds, or None while the device has not reached its end; never waits.

        The three times are the whole step; the wait for data, which is zero while the device had other work; and the
        time from the optimizer's call to the end of the step. The last two are None if their event was not recorded.
        """
        if self.end is None or not self.end.query():
            return None
        try:
            whole = self.start.elapsed_time(self.end) * 1e-3
            waited = None if self.batch is None else self.start.elapsed_time(self.batch) * 1e-3
            stepped = None if self.optimizer is None else self.optimizer.elapsed_time(self.end) * 1e-3
        finally:
            self.release()
        return whole, waited, stepped

    def release(self) -> None:
        """Return the events to `free`; recording an event again overwrites its time."""
        held = [e for e in (self.start, self.batch, self.optimizer, self.end) if e is not None]
        self.start = self.batch = self.optimizer = self.end = None
        self._free.extend(held)


@contextmanager
def beside_captures() -> Iterator[None]:
    """Let this thread query events while another thread captures a CUDA graph.

    In a thread of the default mode, such a query ends the capture with an error. PyTorch has no public way to set this
    mode of the driver; its own NCCL watchdog sets it around each query.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield
        return
    library, name = ("libamdhip64.so", "hip") if torch.version.hip else ("libcuda.so.1", "cu")
    try:
        exchange = getattr(ctypes.CDLL(library), f"{name}ThreadExchangeStreamCaptureMode")
    except (OSError, AttributeError):  # the captures of a driver without it are in danger, as the documents say
        yield
        return
    mode = ctypes.c_int(_THREAD_LOCAL)
    exchange(ctypes.byref(mode))  # `mode` has the former one now
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


class Readings:
    """Bounded queues that the training thread only appends to and the shipping thread only takes from.

    `deque.append` and `popleft` are atomic, so the training thread takes no lock. If a queue has `limit` entries, a new
    entry is dropped and counted. `steps`: timing, warm-up, sampled; `comm`: DDP's times of earlier steps, of which the
    oldest are dropped instead, since the steps are kept; `device`: steps that the device times, added before they end;
    `memory`: the newest breakdown by local batch; `energy_per_step_j`: the newest joules of a step, by local batch;
    `timelines`: the timeline of buckets from `measure/ddp.py`, by local batch; `all_reduces`: the result of a probe;
    `host`: facts about the script and the host, by the names of `tula_wire.HostFacts`; `epochs_before`: the epochs that
    earlier processes of this training completed (None: unknown); `expects_comm`: every rank reports `CommTiming`s.
    """

    def __init__(self, limit: int) -> None:
        self.dropped = 0
        self.memory: dict[int | None, dict[str, Any]] = {}
        self.energy_per_step_j: dict[int | None, float] = {}
        self.timelines: dict[int | None, dict[str, list[float]]] = {}
        self.all_reduces: dict[str, Any] | None = None
        self.host: dict[str, Any] = {}
        self.epochs_before: float | None = None
        self.expects_comm = False
        self._limit = limit
        self.steps: deque[tuple[StepTiming, bool, bool]] = deque()
        self._values: deque[tuple[int, str, float | HostCopy]] = deque()
        self.comm: deque[CommTiming] = deque(maxlen=limit)
        self.device: deque[tuple[int, Interval]] = deque()  # bounded by the pool of events

    def add_step(self, timing: StepTiming, warmup: bool, sampled: bool = True) -> None:
        """Add a step that has ended.

        Every step is a point of the step-time series; only a sampled step becomes a sample.
        """
        if len(self.steps) >= self._limit:
            self.dropped += 1
        else:
            self.steps.append((timing, warmup, sampled))

    def add_value(self, step: int, name: str, value: float | HostCopy) -> None:
        """Add a named number of a step."""
        if len(self._values) >= self._limit:
            self.dropped += 1
        else:
            self._values.append((step, name, value))

    def take_values(self) -> list[tuple[int, str, float]]:
        """Take all numbers that have arrived on the host; leave numbers that are still on a device."""
        arrived: list[tuple[int, str, float]] = []
        for step, name, value in take(self._values):
            if not isinstance(value, HostCopy):
                arrived.append((step, name, value))
            elif value.event.query():  # type: ignore[no-untyped-call]
                arrived.append((step, name, float(value.host)))
            else:
                self._values.append((step, name, value))
        return arrived


def take(queue: deque[T]) -> list[T]:
    """Empty `queue` and return its entries, oldest first. Another thread may take from it meanwhile."""
    taken: list[T] = []
    with suppress(IndexError):
        # This does not loop until the queue is empty, since a training thread may add as fast as this thread takes. It
        # takes entries one by one, so that no taken entry is lost.
        for _ in range(len(queue)):
            taken.append(queue.popleft())  # noqa: PERF401
    return taken
