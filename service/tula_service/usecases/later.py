"""What a request leaves to be done when it has been answered: one piece after the other, in a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeAlias

from tula_service.errors import ServiceError
from tula_service.store import Store

__all__ = ["Later", "Work"]

_LOG = logging.getLogger("tula.service")
_MOST_WAITING: Final = 1000

Work: TypeAlias = Callable[[Store], None]


class Later:
    """Keeps nothing over an end of the process: whoever leaves work notes in the store that it is due, and asks again.

    Bounded: work that waits for the same run already, or behind too much other work, is not taken.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = _thread()
        self._lock = threading.Lock()
        self._waiting: set[str] = set()
        self._closed = False

    def do(self, run_id: str, work: Work) -> None:
        """Do this soon."""
        with self._lock:
            if self._closed or run_id in self._waiting or len(self._waiting) >= _MOST_WAITING:
                return
            try:
                self._thread.submit(self._do, run_id, work)
            except RuntimeError:  # no thread is to be had: the request was answered well, and the next one asks again
                _LOG.warning("left for later", exc_info=True, extra={"run_id": run_id})
                self._thread = _thread()  # the other kept the work, and would do it besides
                return
            self._waiting.add(run_id)

    def close(self) -> None:
        """Finish what is at work; what only waits is left."""
        with self._lock:
            self._closed = True
        self._thread.shutdown(cancel_futures=True)

    def _do(self, run_id: str, work: Work) -> None:
        try:
            work(self._store)
        except ServiceError:  # the run is gone, or the database busy: who sends its next samples asks again
            _LOG.info("left for later", extra={"run_id": run_id})
        except Exception:
            _LOG.exception("work after a request failed", extra={"run_id": run_id})
        finally:
            with self._lock:
                self._waiting.discard(run_id)


def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="tula-later")
