"""Defines the queues through which the training thread passes measurements to the shipping thread.

`measure/` returns the records in this module, the recorder puts them into `Readings`, and `ship/` takes them out.
`measure/` and `ship/` do not import each other.
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
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, the mode in which a thread ignores captures in other threads."""


class StepTiming(NamedTuple):
    """Times of one optimizer step on this rank, in seconds.

    `step_time_s`: the time from batch to batch, including waits for data. `uneven`: True if the micro-steps had
    different batch sizes, or if the step is not comparable with the run's usual steps. `optimizer_time_s`: the time
    from the first optimizer's call to the end of the step, including the clearing of gradients; None if no optimizer
    was watched or the host does not wait for the device.
    """

    step: int
    step_time_s: float
    input_time_s: float
    micro_steps: int
    local_batch_size: int | None
    uneven: bool
    optimizer_time_s: float | None = None


class CommTiming(NamedTuple):
    """Times of one step on this rank in seconds, measured by DDP, including waits for slower ranks."""

    step: int
    step_time_s: float
    input_time_s: float
    comm_time_s: float
    exposed_comm_time_s: float

    @property
    def compute_time_s(self) -> float:
        """Return the step time without the waits for data and for collectives."""
        return max(0.0, self.step_time_s - self.input_time_s - self.exposed_comm_time_s)


class HostCopy:
    """A GPU tensor that is being copied to pinned host memory; `host` is complete once `event` has completed."""

    __slots__ = ("event", "host")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self.host.copy_(tensor, non_blocking=True)
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(torch.cuda.current_stream(tensor.device))  # the current device may be another one


def to_number(value: Any) -> float | HostCopy:
    """Return `value` as a float if this does not require waiting for a device, or else as a `HostCopy`.

    Raises TypeError or ValueError if `value` is not a single number.
    """
    if isinstance(value, torch.Tensor):
        value = local_part(value)  # only one rank calls this, so no operation may start a collective
        if value.numel() != 1:
            raise ValueError(f"a tensor of shape {tuple(value.shape)} is not a single number: log its mean instead")
        if value.device.type == "cuda":
            return HostCopy(value.detach().float().reshape(()))
        value = value.detach().reshape(()).item()
    return float(value)


class Interval:
    """CUDA events of one step in the device's stream; the interval is open until the end of the step is recorded.

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
        """Return the step's times in seconds without waiting; None if the device has not completed the step yet.

        The three times are the duration of the whole step; the wait for data, which is zero if the device had other
        work; and the time from the optimizer's call to the end of the step. Each of the last two is None if its event
        was not recorded.
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
        """Return the events to `free` for reuse; recording an event again will overwrite its time."""
        held = [e for e in (self.start, self.batch, self.optimizer, self.end) if e is not None]
        self.start = self.batch = self.optimizer = self.end = None
        self._free.extend(held)


@contextmanager
def beside_captures() -> Iterator[None]:
    """Let this thread query events while another thread captures a CUDA graph.

    If this thread is in the driver's default capture mode, its query ends the capture with an error. PyTorch has no
    public function that sets the mode; PyTorch's own NCCL watchdog sets it around each query.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield
        return
    library, name = ("libamdhip64.so", "hip") if torch.version.hip else ("libcuda.so.1", "cu")
    try:
        exchange = getattr(ctypes.CDLL(library), f"{name}ThreadExchangeStreamCaptureMode")
    except (OSError, AttributeError):  # without this function, a query may end a capture, as documented
        yield
        return
    mode = ctypes.c_int(_THREAD_LOCAL)
    exchange(ctypes.byref(mode))  # `mode` now contains the previous mode
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


class Readings:
    """Bounded queues to which the training thread only adds entries and from which the shipping thread only takes them.

    `deque.append` and `popleft` are atomic, so the training thread takes no lock. If a queue has `limit` entries, a new
    entry is dropped and counted. `steps`: each step's timing, whether it belongs to the warm-up, and whether it is
    sampled. `comm`: DDP's times of earlier steps; if this queue is full, the oldest entry is dropped instead, since the
    steps themselves are kept. `device`: steps that the device times, added before they end. `memory`: the latest memory
    breakdown for each local batch size. `energy_per_step_j`: the latest energy per step in joules for each local batch
    size. `timelines`: the timeline of buckets from `measure/ddp.py` for each local batch size. `all_reduces`: the
    result of the probe in `measure/all_reduces.py`. `host`: facts about the script and the host, named as in
    `tula_wire.HostFacts`. `epochs_before`: the number of epochs that earlier processes of this training completed
    (None: unknown). `expects_comm`: True if every rank reports `CommTiming`s.
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
        self.device: deque[tuple[int, Interval]] = deque()  # its length is limited by the number of events

    def add_step(self, timing: StepTiming, warmup: bool, sampled: bool = True) -> None:
        """Add a step that has ended.

        Every step becomes a point in the step-time series, but only a sampled step becomes a sample.
        """
        if len(self.steps) >= self._limit:
            self.dropped += 1
        else:
            self.steps.append((timing, warmup, sampled))

    def add_value(self, step: int, name: str, value: float | HostCopy) -> None:
        """Add a named value of a step."""
        if len(self._values) >= self._limit:
            self.dropped += 1
        else:
            self._values.append((step, name, value))

    def take_values(self) -> list[tuple[int, str, float]]:
        """Remove and return the values that have arrived on the host; keep values that are still on a device."""
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
    """Remove and return the entries of `queue`, oldest first; another thread may take entries at the same time."""
    taken: list[T] = []
    with suppress(IndexError):
        # Do not loop until the queue is empty, since a training thread may add entries as fast as this thread removes
        # them. Remove the entries one by one, so that none is lost.
        for _ in range(len(queue)):
            taken.append(queue.popleft())  # noqa: PERF401
    return taken
