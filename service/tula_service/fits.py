"""Computes fits one at a time, in a separate process, so that fits do not keep the interpreter from requests.

The process starts and ends with the service, even if the service is killed; a process that has died or hangs is
replaced. The two exchange only plain data that can be pickled.
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
"""Most fits take tenths of a second, and fits of large jobs ten seconds.

Proxies wait a minute, so longer fits are useless.
"""
_REFUSED_S: Final = 600.0
"""How long a fit that was ended is not repeated, since each attempt would block all others for LONGEST_FIT_S."""
_NICENESS: Final = 5
_ONE_THREAD: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_ANALYSIS: Final = "tula_service.analysis.questions"
_NOT_STARTED: Final = (OSError, RuntimeError)
"""The errors if this machine allows no further process or thread."""
P = ParamSpec("P")
T = TypeVar("T")


class Compute(Protocol):
    """Calls a module's function with picklable arguments, and returns its result or raises its exception."""

    def __call__(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...


class Fits:
    """The queue for the process that computes fits, shared by threads.

    Until the process is ready, fits are computed in the caller's thread, so that no request waits for the process to
    import SciPy after `start()`; a store opened outside a service has no such process. longest_s: the longest time that
    the process may take for a fit.
    """

    def __init__(self, *, longest_s: float = LONGEST_FIT_S) -> None:
        self._turn = threading.Lock()
        self._longest_s = longest_s
        self._pool: ProcessPoolExecutor | None = None
        self._process: Future[int] | None = None  # its id
        self._ready: Future[None] | None = None
        self._ended: TTLCache[bytes, str] = TTLCache(64, _REFUSED_S)  # by key; used in one's turn only

    def start(self) -> Future[None] | None:
        """Start the process; return a future that is done once it is ready, or None if it cannot be started."""
        try:
            self._ready = self._started().submit(_import_analysis)
        except _NOT_STARTED as error:
            self._drop()
            remedy = "allow the service one process for each worker, and restart it"
            _LOG.warning(
                "The process that computes fits cannot start (%s), so they slow other requests: %s.", error, remedy
            )
        return self._ready

    def close(self) -> None:
        """End the process once it has finished its current fit."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    @contextmanager
    def turn(self) -> Iterator[Compute]:
        """Wait until no other thread has its turn; yield the `Compute`. Raises Busy after `_LONGEST_QUEUE_S`.

        A caller that reads data and looks for a stored answer only after taking its turn computes nothing twice.
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
        if self._ended and (sentence := self._ended.get(_key(function, args, kwargs))):
            raise Busy(f"{sentence}: it is not tried again for some minutes.", retry_after_s=60.0)
        for _ in range(2):
            try:
                fit = self._started().submit(function, *args, **kwargs)
            except _NOT_STARTED:  # also a BrokenProcessPool
                self._drop()
                continue
            if not self._ends(fit):
                was_starting = self._process is None or not self._process.done()
                self._drop(kill=True)
                if was_starting:
                    continue
                took = f"A fit took more than {duration(self._longest_s)} and was ended"
                sentence = f"{took}, and what it was to replace stays"
                self._ended[_key(function, args, kwargs)] = sentence
                _LOG.error("%s.", sentence)
                raise Busy(f"{sentence}: retry later, and report it if that takes as long.", retry_after_s=60.0)
            try:
                return fit.result()
            except BrokenProcessPool:
                self._drop()
        raise Busy(
            "The process that computes fits ended twice or cannot start, maybe for lack of memory: retry, or give the "
            "service more.",
            retry_after_s=5.0,
        )

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            # The process is not forked, since a fork of a process with threads may wait forever for a lock that one of
            # them held.
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(max_workers=1, mp_context=spawn, initializer=_begin)
            self._process = self._pool.submit(os.getpid)
        return self._pool

    def _ends(self, fit: Future[T]) -> bool:
        """Wait for the process to start, and then for the fit; return False if either takes too long."""
        assert self._process is not None
        return bool(wait([self._process], LONGEST_FIT_S).done and wait([fit], self._longest_s).done)

    def _drop(self, *, kill: bool = False) -> None:
        """Let the process end, or kill it if it hangs; the next fit starts another."""
        pool, self._pool, self._process = self._pool, None, None
        if pool is None:
            return
        for process in list((pool._processes or {}).values()) if kill else ():  # kill_workers() is new in Python 3.14
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)


def _key(function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> bytes:
    """Return a key that identifies a computation, so that a job whose data changed is computed again."""
    return hashlib.sha256(pickle.dumps((function, args, kwargs))).digest()


def _in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    return function(*args, **kwargs)


def _begin() -> None:
    """Prepare this process before anything imports NumPy: use one thread for linear algebra, and end with the parent.

    The process has a low priority, so that requests take precedence. It ignores signals that a terminal or a supervisor
    sends to the whole group: these are for the parent, which still answers requests.
    """
    os.environ.update(dict.fromkeys(_ONE_THREAD, "1"))
    os.nice(_NICENESS)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # The pool's own pipe cannot show the parent's end, since this process has both of its ends.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(0)


def _import_analysis() -> None:
    importlib.import_module(_ANALYSIS)
