"""Guards calls from the training script, so that a failed measurement never raises an exception in the script."""

from __future__ import annotations

import logging
from types import TracebackType


def _prefixed(record: logging.LogRecord) -> bool:
    """Prefix the message with `tula: `, which marks it in the script's log and lets `tula tune` recognise it."""
    record.msg = f"tula: {record.msg}"
    return True


logger = logging.getLogger("tula_agent")
"""Logger for all messages of the agent."""
logger.addFilter(_prefixed)

GIVE_UP_AFTER = 5
"""Number of failures after which a part is turned off for the rest of the run."""


class Guard:
    """Catches the exceptions of each part of the agent, logs the first exception of a part, and turns off a part that
    keeps failing.

    `with guard("memory"): ...` never raises an `Exception`; `KeyboardInterrupt` and `SystemExit` pass through. A guard
    has no lock, because frameworks may pickle a callback with its guard, and locks cannot be pickled; at worst, a line
    is logged twice.
    """

    def __init__(self) -> None:
        self.failures: dict[str, int] = {}

    def __call__(self, part: str) -> _Quiet:
        """Return a context manager that catches the exceptions of `part`."""
        return _Quiet(self, part)

    def works(self, part: str) -> bool:
        """Return False once `part` has failed GIVE_UP_AFTER times."""
        return self.failures.get(part, 0) < GIVE_UP_AFTER

    def note(self, part: str, error: BaseException) -> None:
        """Count a failure of `part`; log the first one with its traceback, and log when the part is turned off."""
        count = self.failures[part] = self.failures.get(part, 0) + 1
        if count == 1:
            logger.warning("%s failed; training continues without it: %r", part, error, exc_info=error)
        elif count == GIVE_UP_AFTER:
            logger.warning("%s failed %d times and is turned off", part, count)


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
