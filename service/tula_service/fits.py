"""Fits: computed one at a time, in a process of their own, so that none takes the interpreter from requests.

The process begins with the service and ends with it, also with one that is killed; one that has died is replaced. What
passes between the two is plain data that pickles.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Final, ParamSpec, Protocol, TypeVar

from tula_service.errors import Busy

_LONGEST_QUEUE_S: Final = 15.0
_NICENESS: Final = 5
_ONE_THREAD: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_ANALYSIS: Final = "tula_service.analysis.questions"
P = ParamSpec("P")
T = TypeVar("T")


class Compute(Protocol):
    """Calls a function of a module with arguments that pickle, and returns what it returns or raises."""

    def __call__(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...


class Fits:
    """The queue before the one computation, which threads share.

    It computes in the caller's thread until a process is ready: at once after `start()`, none waits for that to import
    SciPy, and a store that no service opened has no process.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._pool: ProcessPoolExecutor | None = None
        self._ready: Future[None] | None = None

    def start(self) -> Future[None]:
        """Start the process; the result comes once it is ready to compute."""
        self._ready = self._started().submit(_import_analysis)
        return self._ready

    def close(self) -> None:
        """End the process once it has computed what it is at."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    @contextmanager
    def turn(self) -> Iterator[Compute]:
        """Wait until no other thread has its turn; yields what computes. Raises Busy after `_LONGEST_QUEUE_S`.

        Whoever takes the turn before it reads, and looks for a stored answer then, computes nothing twice.
        """
        if not self._turn.acquire(timeout=_LONGEST_QUEUE_S):
            raise Busy(
                "More fits are requested than the service can compute: retry, or ask less often.", retry_after_s=5.0
            )
        try:
            has_process = self._ready is not None and self._ready.done()
            yield self._in_process if has_process else _in_thread
        finally:
            self._turn.release()

    def _in_process(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        for _ in range(2):
            pool = self._started()
            try:
                return pool.submit(function, *args, **kwargs).result()
            except (BrokenProcessPool, OSError):  # OSError: no process can be started
                pool.shutdown(wait=False, cancel_futures=True)
                self._pool = None
        raise Busy(
            "The process of fits was ended twice, maybe for want of memory: retry, or give the service more.",
            retry_after_s=5.0,
        )

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            # Not forked: a fork of a process with threads may wait for ever for a lock that one of them held.
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(max_workers=1, mp_context=spawn, initializer=_begin)
        return self._pool


def _in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    return function(*args, **kwargs)


def _begin() -> None:
    """Prepare this process, before anything imports NumPy: one thread for linear algebra, and an end with the parent.

    Requests go first where cores are scarce. Signals that a terminal or a supervisor sends to the whole group are for
    the parent, which still answers.
    """
    os.environ.update(dict.fromkeys(_ONE_THREAD, "1"))
    os.nice(_NICENESS)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # The pool's own pipe does not tell: this process holds both of its ends.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(0)


def _import_analysis() -> None:
    importlib.import_module(_ANALYSIS)
