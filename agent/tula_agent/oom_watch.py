"""Ends all ranks soon after one of them runs out of memory, so that none keeps waiting in a collective.

When a rank runs out of memory, the other ranks wait in a collective until the backend's timeout (30 minutes). So the
rank that detects the error publishes a notice in the ranks' key-value store and reports the error to the service. A
thread on every rank checks the store once a second, and ends its process if the process is still running EXIT_WITHIN_S
seconds after the notice. The rank that detected the error may host the store, so it keeps the store open until the
other ranks have acknowledged the notice, or until twice the interval between checks has passed.

A rank detects an exception that ends the process, an exception that the script reports with `run.report_out_of_memory`,
and a CUDA error that the script catches without reporting it. The allocator counts errors of the last kind, but also
errors that torch itself catches while it searches for the fastest kernel. So a counted error ends a training run only
if this rank and another rank have both been stuck in a step for STALLED_S seconds.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import torch

from tula_agent.rank_channel import CONNECT_WITHIN_S

EXIT_WITHIN_S: Final = 10.0
"""Seconds from the notice to the end of every rank; long enough for clean-up and the agent's last requests."""
LOOK_EVERY_S: Final = 1.0
STALLED_S: Final = 60.0
"""Seconds without a new batch during a step after which a rank counts as stuck, or ten times its longest wait if that
is longer.
"""
_TIMES_LONGEST: Final = 10.0
_SETTLED_AFTER: Final = 3
"""Number of batches before a rank can count as stuck, since torch compiles and selects kernels during the first
batches.
"""
EXIT_CODE: Final = 137
"""The exit status that a shell reports for a process killed by the kernel's OOM killer; launchers recognise this
status.
"""
_KEY: Final = "out_of_memory"
_SUSPECTED: Final = "suspected"

_SIGNS: Final = ("out of memory", "can't allocate memory", "not enough memory", "cublas_status_alloc_failed")


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if `error` is an out-of-memory error of torch, a CUDA library, NumPy or Python, on a device or the
    host.
    """
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS)


def caught_by_the_script() -> str | None:
    """Return the last out-of-memory error that the script caught, or None; must be called on the training thread."""
    lowered_for = getattr(sys.modules.get("tula_startup"), "lowered_for", None)
    if lowered_for:
        return str(lowered_for[0])
    return "CUDA out of memory, caught by the script." if cuda_oom_count(_own_device()) else None


class OomWatch:
    """Watches one rank from a separate thread.

    channel: a function that takes a time limit in seconds and returns the connection to the other ranks, or None if no
    connection exists within that time; for a single rank, `channel` is None. report: a function that sends a message
    and the batch size to the service. progress: a function that returns the number of batches so far, and whether a
    step is in progress whose optimizer has not stepped yet.
    """

    def __init__(
        self,
        channel: Callable[[float], Any] | None,
        *,
        rank: int,
        report: Callable[[str | None, int | None], None],
        batch_size: Callable[[], int | None],
        progress: Callable[[], tuple[int, bool]] = lambda: (0, False),
        stalled_s: float = STALLED_S,
        count: Callable[[], int] | None = None,
        end: Callable[[int], None] = os._exit,
        exit_within_s: float = EXIT_WITHIN_S,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._channel = channel
        self._used_channel: Any = None  # carried the notice, so it must stay open until this process ends
        self._rank = rank
        self._report = report
        self._batch_size = batch_size
        self._progress = progress
        self._stalled_s = stalled_s
        self._count = count or (lambda: cuda_oom_count(self._device))
        self._device: int | None = None
        self._end = end
        self._exit_within_s = exit_within_s
        self._look_every_s = look_every_s
        # Errors counted at the last check, and at the last check before the current batch.
        self._counted = self._counted_before = 0
        self._batches, self._moved_at, self._longest_s = 0, time.monotonic(), 0.0
        self._suspicions = 0
        self._suspects = False
        self._noticed = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the daemon thread that watches the device of the calling thread, the training thread.

        A single rank keeps no other rank waiting, so it starts no thread.
        """
        if self._channel is None:
            return
        self._device = _own_device()
        self._counted = self._counted_before = self._count()
        self._thread = threading.Thread(target=self._look, name="tula-out-of-memory", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, since the run has ended."""
        self._closed.set()

    def close(self, within_s: float) -> None:
        """Stop, and wait at most `within_s` seconds for an unfinished call to the store or to `report`.

        A thread that returns from C++ into an interpreter that is shutting down ends the process with "terminate called
        without an active exception" (Python before 3.14).
        """
        self.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, within_s))
        self._channel = None

    def notify(self, message: str | None, local_batch_size: int | None = None) -> None:
        """Notify the other ranks and the service that this rank is out of memory, and end all processes."""
        with self._lock:
            if self._noticed.is_set():
                return
            self._noticed.set()
        batch = local_batch_size or self._batch_size()
        _log(f"rank {self._rank} ran out of memory" + (f" at a local batch of {batch}" if batch else ""))
        if self._channel is not None:
            self._schedule_exit()
            try:
                self._used_channel = self._channel(CONNECT_WITHIN_S)  # no connection exists yet during the first step
                if self._used_channel is None:
                    _log("the other ranks could not be notified: there is no connection to them")
                else:
                    self._used_channel.set(_KEY, {"rank": self._rank, "local_batch_size": batch})
            except Exception as error:  # the process that hosts the store has ended, so the group has too
                self._used_channel = None
                _log(f"the other ranks could not be notified ({error})")
        ends = time.monotonic() + 2 * self._look_every_s
        self._report(message, batch)
        if (channel := self._used_channel) is not None:  # this process may host the store that other ranks check
            others = [f"heard/{rank}" for rank in range(channel.world_size) if rank != self._rank]
            with suppress(Exception):
                while not channel.has(*others) and time.monotonic() < ends:
                    time.sleep(min(0.02, self._look_every_s))

    def _look(self) -> None:
        lost: Any = None  # the channel whose store has closed
        while not (self._closed.wait(self._look_every_s) or self._noticed.is_set()):
            stands_still = self._stands_still()
            ask, channel, notice = self._channel, None, None
            try:
                channel = None if ask is None else ask(0.0)
                if channel is not None and channel is not lost:
                    if self._others_agree(channel, stands_still):
                        self.notify("CUDA out of memory, caught by the script.")
                        return
                    if channel.has(_KEY):
                        notice = channel.get(_KEY)
            except Exception:
                lost = channel
            if channel is not None and notice is not None:  # another rank is out of memory: acknowledge, and end soon
                self._noticed.set()
                self._used_channel = channel
                _log(f"rank {notice['rank']} ran out of memory, so rank {self._rank} ends too")
                self._schedule_exit()
                with suppress(Exception):
                    channel.set(f"heard/{self._rank}", True)

    def _stands_still(self) -> bool:
        """Return True if no batch has arrived for a long time within a step; an evaluation is not part of a step."""
        (batches, in_step), now, counted = self._progress(), time.monotonic(), self._count()
        if batches != self._batches or not in_step:
            if in_step:
                self._longest_s = max(self._longest_s, now - self._moved_at)
            self._batches, self._moved_at = batches, now
            self._counted_before, self._suspects = self._counted, False
        self._counted = counted
        waits_s = max(self._stalled_s, _TIMES_LONGEST * self._longest_s)
        return batches >= _SETTLED_AFTER and now - self._moved_at >= waits_s

    def _others_agree(self, channel: Any, stands_still: bool) -> bool:
        """Return True if this rank is stuck and has counted an error, and another rank has confirmed that it is stuck.

        A stuck rank confirms another rank's suspicion, and publishes its own suspicion if it has counted an error.
        """
        if not stands_still:
            return False
        if channel.has(_SUSPECTED):  # confirm even if this rank counted an error, since then both ranks wait
            rank, number = channel.get(_SUSPECTED)
            if rank != self._rank:
                channel.set(f"waits/{rank}/{number}", True)
        if self._counted > self._counted_before:
            if not self._suspects:
                self._suspects, self._suspicions = True, self._suspicions + 1
                channel.set(_SUSPECTED, [self._rank, self._suspicions])
            return bool(channel.has(f"waits/{self._rank}/{self._suspicions}"))
        return False

    def _schedule_exit(self) -> None:
        """End this process after `exit_within_s` seconds if it still runs, since a collective or destructor may hang.

        The timer keeps a reference to this object, so the store stays open for other ranks that may still read from it.
        """
        timer = threading.Timer(self._exit_within_s, lambda: self._end(EXIT_CODE))
        timer.daemon = True
        timer.start()


def _own_device() -> int | None:
    """Return the CUDA device of the calling thread, or None if CUDA is not in use."""
    in_use = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.current_device() if in_use else None


def cuda_oom_count(device: int | None) -> int:
    """Return the number of out-of-memory errors of this process's CUDA allocator on `device`; 0 without CUDA.

    device: the device's index (None without CUDA), which is needed because the current device differs between threads.
    """
    if device is None:
        return 0
    return int(torch.cuda.memory_stats(device).get("num_ooms", 0))


def _log(text: str) -> None:
    print(f"tula: {text}", file=sys.stderr, flush=True)
