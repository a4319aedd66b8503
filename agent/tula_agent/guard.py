"""Nothing of the agent may raise into training: every entry from the job runs under one of these guards."""

from __future__ import annotations

import logging
import threading
from types import TracebackType

logger = logging.getLogger("tula_agent")

GIVE_UP_AFTER = 5
"""Failures of one part after which it is left out for the rest of the run."""


class Guard:
    """Swallows what a part of the agent raises; says it once, and gives the part up when it goes on failing.

    `with guard("memory"): ...` never raises an `Exception`; `KeyboardInterrupt` and `SystemExit` are the job's.
    """

    def __init__(self) -> None:
        self.failures: dict[str, int] = {}
        self._lock = threading.Lock()

    def __call__(self, part: str) -> _Quiet:
        """A context manager that protects the job from `part`."""
        return _Quiet(self, part)

    def works(self, part: str) -> bool:
        """False once `part` has failed too often to be worth another try."""
        return self.failures.get(part, 0) < GIVE_UP_AFTER

    def note(self, part: str, error: BaseException) -> None:
        """Count a failure; the first of a part is logged with its traceback, the last with what it costs."""
        with self._lock:
            count = self.failures[part] = self.failures.get(part, 0) + 1
        if count == 1:
            logger.warning("%s failed, training goes on without it: %r", part, error, exc_info=error)
        elif count == GIVE_UP_AFTER:
            logger.warning("%s failed %d times and is left out from now on", part, count)


class _Quiet:
    __slots__ = ("_guard", "_part")

    def __init__(self, guard: Guard, part: str) -> None:
        self._guard = guard
        self._part = part

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        self._guard.note(self._part, error)
        return True
