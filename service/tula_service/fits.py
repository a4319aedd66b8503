"""Computes fits one at a time in a separate process, so that requests do not wait for the GIL.

The process starts with the service and ends with it, even if the service is killed. If the process dies or hangs, it is
replaced. The service and the process exchange only plain data that can be pickled.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Final, ParamSpec, Protocol, TypeVar

from cachetools import TTLCache

from tula_service.errors import Busy
from tula_wire.format import duration

_LOG = logging.getLogger("tula.service")
_LONGEST_QUEUE_S: Final = 15.0
LONGEST_FIT_S: Final = 60.0
"""Longest time for a fit in seconds; since proxies usually time out after a minute, a slower result would be lost.

Most fits take tenths of a second, and fits of large jobs take ten seconds.
"""
_REFUSED_S: Final = 600.0
"""Seconds before a fit that timed out may be tried again, since each attempt blocks all other fits."""
_NICENESS: Final = 5
_ONE_THREAD: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_ANALYSIS: Final = "tula_service.analysis.questions"
_NOT_STARTED: Final = (OSError, RuntimeError)
"""The exceptions that Python raises if the machine allows no further process or thread."""
P = ParamSpec("P")
T = TypeVar("T")


class Compute(Protocol):
    """Calls a module-level function with picklable arguments, and returns its result or raises its exception."""

    def __call__(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...


class Fits:
    """The queue of fits, which all threads share, and the process that computes the fits.

    Until the process is ready, fits are computed in the caller's thread, so that no request waits for the process to
    import SciPy after `start()`. If `start()` is never called (for a store outside a service, for example), all fits
    are computed in the caller's thread. longest_s: the maximum duration of a fit in the process, in seconds.
    """

    def __init__(self, *, longest_s: float = LONGEST_FIT_S) -> None:
        self._turn = threading.Lock()
        self._longest_s = longest_s
        self._pool: ProcessPoolExecutor | None = None
        self._process: Future[int] | None = None  # the process's id
        self._ready: Future[None] | None = None
        self._ended: TTLCache[bytes, str] = TTLCache(64, _REFUSED_S)  # by key; access only while holding the turn

    def start(self) -> Future[None] | None:
        """Start the process; return a future that is done once the process is ready, or None if it cannot start."""
        try:
            self._ready = self._started().submit(_import_analysis)
        except _NOT_STARTED as error:
            self._drop()
            remedy = "allow the service one more process per worker, and restart it"
            _LOG.warning(
                "The process that computes fits could not be started (%s), so fits will slow down requests: %s.",
                error,
                remedy,
            )
        return self._ready

    def close(self) -> None:
        """End the process once it has finished its current fit."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    @contextmanager
    def turn(self) -> Iterator[Compute]:
        """Wait until no other thread holds the turn, then yield a `Compute`. Raises Busy after `_LONGEST_QUEUE_S`.

        To avoid computing an answer twice, a caller should acquire the turn before it looks for a stored answer.
        """
        if not self._turn.acquire(timeout=_LONGEST_QUEUE_S):
            raise Busy(
                "The service cannot compute as many fits as are requested: retry later, or send fewer requests.",
                retry_after_s=5.0,
            )
        try:
            has_process = self._ready is not None and self._ready.done()
            yield self._in_process if has_process else _in_thread
        finally:
            self._turn.release()

    def _in_process(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._ended and (sentence := self._ended.get(_key(function, args, kwargs))):
            raise Busy(f"{sentence}: the fit can be tried again after ten minutes.", retry_after_s=60.0)
        for _ in range(2):
            try:
                fit = self._started().submit(function, *args, **kwargs)
            except _NOT_STARTED:  # including BrokenProcessPool
                self._drop()
                continue
            if not self._ends(fit):
                was_starting = self._process is None or not self._process.done()
                self._drop(kill=True)
                if was_starting:
                    continue
                took = f"A fit was stopped after {duration(self._longest_s)}"
                sentence = f"{took}, and the previous result was kept"
                self._ended[_key(function, args, kwargs)] = sentence
                _LOG.error("%s.", sentence)
                raise Busy(f"{sentence}: retry later, and report this error if it occurs again.", retry_after_s=60.0)
            try:
                return fit.result()
            except BrokenProcessPool:
                self._drop()
        raise Busy(
            "The process that computes fits failed twice, perhaps because of too little memory: retry, or give the "
            "service more memory.",
            retry_after_s=5.0,
        )

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            # The process is spawned, because a process forked while other threads run may wait forever for a lock that
            # one of those threads held.
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(max_workers=1, mp_context=spawn, initializer=_begin)
            self._process = self._pool.submit(os.getpid)
        return self._pool

    def _ends(self, fit: Future[T]) -> bool:
        """Wait for the process to start and for the fit to end; return False if either takes too long."""
        assert self._process is not None
        return bool(wait([self._process], LONGEST_FIT_S).done and wait([fit], self._longest_s).done)

    def _drop(self, *, kill: bool = False) -> None:
        """Let the process end or, if `kill` is True because it hangs, kill it; the next fit starts a new process."""
        pool, self._pool, self._process = self._pool, None, None
        if pool is None:
            return
        for process in list((pool._processes or {}).values()) if kill else ():  # kill_workers() is new in Python 3.14
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)


def _key(function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> bytes:
    """Return a key that identifies a call by its function and arguments, so changed data result in a new key."""
    return hashlib.sha256(pickle.dumps((function, args, kwargs))).digest()


def _in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    return function(*args, **kwargs)


def _begin() -> None:
    """Prepare this process before NumPy is imported: use one thread for linear algebra, and exit with the parent.

    The process gets a low priority, so that requests take precedence. It ignores the signals that a terminal or a
    supervisor sends to the whole process group, since the parent must first finish its requests.
    """
    os.environ.update(dict.fromkeys(_ONE_THREAD, "1"))
    os.nice(_NICENESS)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # The pool's own pipe does not reveal that the parent has exited, since this process holds both ends of the pipe.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(0)


def _import_analysis() -> None:
    importlib.import_module(_ANALYSIS)
