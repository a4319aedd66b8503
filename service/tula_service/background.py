"""Work that a request leaves to be done after its answer, one item after another in one thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeAlias

from tula_service.errors import ServiceError

_LOG = logging.getLogger("tula.service")
MAX_WAITING: Final = 1000

Work: TypeAlias = Callable[[], None]


class BackgroundQueue:
    """Not durable: callers record pending work in the database and enqueue it again.

    Bounded: work for a run that has some waiting already, or beyond `max_waiting` items, is dropped.
    """

    def __init__(self, *, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tula-background")
        self._executor.submit(int)  # starts the thread now: where no other can be started, a request must not fail
        self._lock = threading.Lock()
        self._waiting: set[str] = set()
        self._closed = False

    def enqueue(self, run_id: str, work: Work) -> None:
        """Do this work soon, unless it is dropped."""
        with self._lock:
            if self._closed or run_id in self._waiting or len(self._waiting) >= self._max_waiting:
                return
            self._waiting.add(run_id)
            self._executor.submit(self.run, run_id, work)

    def close(self) -> None:
        """Finish the current item; waiting items are dropped."""
        with self._lock:
            self._closed = True
        self._executor.shutdown(cancel_futures=True)

    def run(self, run_id: str, work: Work) -> None:
        """Do work now and log what it raises."""
        try:
            work()
        except ServiceError as error:  # the run was deleted or the database is busy: the work is enqueued again later
            _LOG.info("background work postponed: %s", error, extra={"run_id": run_id})
        except Exception:
            _LOG.exception("background work failed", extra={"run_id": run_id})
        finally:
            with self._lock:
                self._waiting.discard(run_id)
