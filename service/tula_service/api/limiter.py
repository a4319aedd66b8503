"""Rate limits: requests of a token, and requests of an address without a right one, per minute."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Final

from tula_service.errors import Busy
from tula_service.usecases.access import Principal

WRONG_PER_MINUTE: Final = 600
_WINDOW_S: Final = 60.0


class Limiter:
    """Counts in fixed windows of a minute, in the memory of this process: each worker has its own limits."""

    def __init__(self, *, requests_per_minute: int, ingest_per_minute: int) -> None:
        self._requests_per_minute = requests_per_minute
        self._ingest_per_minute = ingest_per_minute
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._window_ends = 0.0

    def admit(self, principal: Principal, *, ingest: bool) -> None:
        """Count a request. Raises Busy beyond the limit."""
        limit, kind = (self._ingest_per_minute, "ingest") if ingest else (self._requests_per_minute, "requests")
        remedy = f"More than {limit} requests in a minute: send fewer, larger ones, after Retry-After seconds."
        self._count(kind, principal.sender, limit, remedy)

    def refuse_wrong(self, address: str) -> None:
        """Count a wrong, missing or malformed token of this address. Raises Busy after too many of them.

        A right one never counts: behind a proxy all tokens come from one address.
        """
        remedy = (
            f"More than {WRONG_PER_MINUTE} requests of this address in a minute had no right token: set TULA_TOKEN to "
            "one that `tula token create` printed, or wait Retry-After seconds."
        )
        self._count("wrong", address, WRONG_PER_MINUTE, remedy)

    def _count(self, kind: str, sender: str, limit: int, remedy: str) -> None:
        with self._lock:
            now = time.monotonic()
            if now >= self._window_ends:
                self._counts.clear()
                self._window_ends = now + _WINDOW_S
            self._counts[kind, sender] += 1
            if self._counts[kind, sender] <= limit:
                return
            left_s = self._window_ends - now
        raise Busy(remedy, retry_after_s=max(1.0, left_s), limited=True)
