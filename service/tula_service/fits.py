"""Fits: computed one at a time, in a process of their own, so that none takes the interpreter from requests.

The process begins with the service and ends with it, also with one that is killed; one that has died or hangs is
replaced. What passes between the two is plain data that pickles.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from typing import Final, ParamSpec, Protocol, TypeVar

from tula_service.errors import Busy
from tula_wire.format import duration

_LOG = logging.getLogger("tula.service")
_LONGEST_QUEUE_S: Final = 15.0
LONGEST_FIT_S: Final = 60.0
"""A fit takes tenths of a second, and proxies wait a minute for an answer: one that takes longer has nobody to wait."""
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
    SciPy, and a store that no service opened has no process. longest_s: how long the process may take for a fit.
    """

    def __init__(self, *, longest_s: float = LONGEST_FIT_S) -> None:
        self._turn = threading.Lock()
        self._longest_s = longest_s
        self._pool: ProcessPoolExecutor | None = None
        self._process: Future[int] | None = None  # its id
        self._ready: Future[None] | None = None

    def start(self) -> Future[None] | None:
        """Start the process; the result comes once it is ready to compute. None where it can't be started."""
        try:
            self._ready = self._started().submit(_import_analysis)
        except OSError as error:
            self._drop()
            remedy = "allow the service one process for each worker, and restart it"
            _LOG.warning("The process of fits cannot be started (%s), so fits slow other requests: %s.", error, remedy)
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
            try:
                fit = self._started().submit(function, *args, **kwargs)
                if self._ends(fit):
                    return fit.result()
            except (BrokenProcessPool, OSError):  # OSError: no process can be started
                self._drop()
            else:
                self._drop(kill=True)
                took = f"A fit took more than {duration(self._longest_s)} and was ended"
                sentence = f"{took}, and what it was to replace stays"
                _LOG.error("%s.", sentence)
                raise Busy(f"{sentence}: retry later, and report it if that takes as long.", retry_after_s=60.0)
        raise Busy(
            "The process of fits was ended twice, maybe for want of memory: retry, or give the service more.",
            retry_after_s=5.0,
        )

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            # Not forked: a fork of a process with threads may wait for ever for a lock that one of them held.
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(max_workers=1, mp_context=spawn, initializer=_begin)
            self._process = self._pool.submit(os.getpid)
        return self._pool

    def _ends(self, fit: Future[T]) -> bool:
        """Wait for the process to start, and then for the fit: False where either takes too long."""
        assert self._process is not None
        return bool(wait([self._process], LONGEST_FIT_S).done and wait([fit], self._longest_s).done)

    def _drop(self, *, kill: bool = False) -> None:
        """Leave the process to its end, or kill one that hangs: the next fit starts another."""
        pool, process, self._pool, self._process = self._pool, self._process, None, None
        if kill and process is not None and process.done():
            with suppress(ProcessLookupError):
                os.kill(process.result(), signal.SIGKILL)
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


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
