"""One rank's out-of-memory never hangs the others: they are told, and end within a stated time.

A rank that runs out of memory leaves its peers waiting in a collective, for as long as the backend's timeout (30
minutes). So the rank that notices says so in the job's own key-value store and at the service, and a thread on every
rank looks there once a second; whoever still runs EXIT_WITHIN_S later is ended. The rank that noticed keeps the store
open, which may be its own, until the others have heard or should have. Noticed are an exception that ends
the process, one that the script caught and reported with `run.report_out_of_memory`, and one of CUDA that the script
caught and kept to itself (the allocator counts them).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import torch

from tula_agent.channel import CONNECT_WITHIN_S, Channel

if TYPE_CHECKING:
    from tula_agent.recorder import Recorder
    from tula_agent.session import Run

__all__ = ["EXIT_CODE", "EXIT_WITHIN_S", "STALLED_S", "OutOfMemoryWatch", "is_out_of_memory", "watch_for"]

EXIT_WITHIN_S: Final = 10.0
"""Seconds from the notice to the end of every rank; time enough for clean-up and for the agent's last words."""
LOOK_EVERY_S: Final = 1.0
STALLED_S: Final = 60.0
EXIT_CODE: Final = 137
"""What a shell shows for a process that the kernel killed for its memory, which launchers already understand."""
_KEY: Final = "out_of_memory"

_SIGNS: Final = ("out of memory", "can't allocate memory", "not enough memory", "cublas_status_alloc_failed")


def is_out_of_memory(error: BaseException) -> bool:
    """True for what torch, CUDA libraries, NumPy and Python raise when memory is gone, on device or host."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS)


class OutOfMemoryWatch:
    """One rank's look-out.

    `channel`, given the seconds that it may wait, answers the way to the other ranks, or None while there is none; it
    is None itself where there is one rank. `report` tells the service (message, batch); `batch_size` and `steps` are
    asked for at the moment. An error of CUDA that the script caught counts at once in a profiling run; in training only
    when no step follows for STALLED_S, since scripts exist that try a smaller batch by themselves.
    """

    def __init__(
        self,
        channel: Callable[[float], Any] | None,
        *,
        rank: int,
        report: Callable[[str | None, int | None], None],
        batch_size: Callable[[], int | None],
        steps: Callable[[], int] = lambda: 0,
        stalled_s: float = 0.0,
        count: Callable[[], int] | None = None,
        end: Callable[[int], None] = os._exit,
        exit_within_s: float = EXIT_WITHIN_S,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._channel = channel
        self._told: Any = None  # the channel over which the word went out or came: it stays open to the process's end
        self._rank = rank
        self._report = report
        self._batch_size = batch_size
        self._steps = steps
        self._stalled_s = stalled_s
        self._count = count or cuda_count
        self._end = end
        self._exit_within_s = exit_within_s
        self._look_every_s = look_every_s
        self._seen = self._count()
        self._caught_at: tuple[float, int] | None = None
        self._known = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to look out, on a daemon thread."""
        self._thread = threading.Thread(target=self._look, name="tula-out-of-memory", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop looking out: the run is over."""
        self._closed.set()

    def close(self, within_s: float) -> None:
        """Stop, and wait `within_s` seconds at most for a question to the store or a report that is under way.

        A thread that comes back from C++ into an interpreter that is being torn down ends the process with "terminate
        called without an active exception" (Python before 3.14).
        """
        self.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, within_s))
        self._channel = None

    def tell(self, message: str | None, local_batch_size: int | None = None) -> None:
        """This rank is out of memory: tell the others and the service, and see that all processes end."""
        with self._lock:
            if self._known.is_set():
                return
            self._known.set()
        batch = local_batch_size or self._batch_size()
        self._say(f"rank {self._rank} ran out of memory" + (f" at a local batch of {batch}" if batch else ""))
        if self._channel is not None:
            self._later()
            try:
                self._told = self._channel(CONNECT_WITHIN_S)  # in the first step the ranks may not have met yet
                if self._told is None:
                    self._say("the other ranks could not be told: there is no way to them")
                else:
                    self._told.set(_KEY, {"rank": self._rank, "local_batch_size": batch})
            except Exception as error:  # the store's rank is gone, and with it the group
                self._told = None
                self._say(f"the other ranks could not be told ({error})")
        ends = time.monotonic() + 2 * self._look_every_s
        self._report(message, batch)
        self._until_heard(ends)

    def _until_heard(self, ends: float) -> None:
        """Wait until the others have said that they heard, or `ends`: this process may host the store they look in."""
        if self._told is None:
            return
        others = [f"heard/{rank}" for rank in range(self._told.world_size) if rank != self._rank]
        with suppress(Exception):
            while not self._told.has(*others) and time.monotonic() < ends:
                time.sleep(min(0.02, self._look_every_s))

    def _look(self) -> None:
        ask, lost = self._channel or (lambda _within_s: None), None
        while not (self._closed.wait(self._look_every_s) or self._known.is_set()):
            if self._caught():
                self.tell("CUDA out of memory, caught by the script.")
                return
            channel = told = None
            try:
                channel = ask(0.0)
                if channel is not None and channel is not lost and channel.has(_KEY):
                    told = channel.get(_KEY)
            except Exception:  # the store has closed: nothing more to hear there
                lost = channel
            if channel is not None and told is not None:
                self._known.set()
                self._told = channel
                self._say(f"rank {told['rank']} ran out of memory, so rank {self._rank} ends too")
                self._later()
                with suppress(Exception):
                    channel.set(f"heard/{self._rank}", True)

    def _caught(self) -> bool:
        """True when the script caught an out-of-memory and training does not go on."""
        count, steps, now = self._count(), self._steps(), time.monotonic()
        if count > self._seen:
            self._seen, self._caught_at = count, (now, steps)
        if self._caught_at is None:
            return False
        since, steps_then = self._caught_at
        if self._stalled_s and steps > steps_then + 1:
            self._caught_at = None
            return False
        return now - since >= self._stalled_s

    def _later(self) -> None:
        """End this process unless it ends by itself; a hung collective or destructor would not.

        Until then the timer holds this look-out, and with it the store that others may still look in.
        """
        timer = threading.Timer(self._exit_within_s, self._end_now)
        timer.daemon = True
        timer.start()

    def _end_now(self) -> None:
        self._end(EXIT_CODE)

    @staticmethod
    def _say(text: str) -> None:
        print(f"tula: {text}", file=sys.stderr, flush=True)


def watch_for(run: Run, recorder: Recorder) -> OutOfMemoryWatch:
    """Start the look-out of this process, once its ranks are about to train together."""

    def channel(within_s: float) -> Channel | None:
        meeting = recorder.reporter.meeting
        return None if meeting is None else meeting.channel(within_s)

    def report(message: str | None, batch: int | None) -> None:
        with run.guard("reporting out of memory"):
            recorder.finish("out_of_memory", message, batch)

    watch = OutOfMemoryWatch(
        channel if recorder.world_size > 1 else None,
        rank=recorder.config.rank,
        report=report,
        batch_size=lambda: recorder.local_batch_size,
        steps=lambda: recorder.timer.step,
        stalled_s=0.0 if recorder.plan is not None else STALLED_S,
    )
    watch.start()
    return watch


def cuda_count() -> int:
    """Out-of-memory errors that this process's CUDA allocator has raised so far; 0 without CUDA."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return 0
    return int(torch.cuda.memory_stats().get("num_ooms", 0))
