"""Rate limits: requests of a token per minute, and wrong tokens of an address per minute."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tula_service.errors import Busy, Unauthenticated
from tula_service.usecases.access import Principal

GUESSES_PER_MINUTE: Final = 600
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
        self._count(kind, principal.token_id or principal.name, limit)

    @contextmanager
    def guess(self, address: str) -> Iterator[None]:
        """Around the check of a token that is not cached. Raises Busy after too many wrong ones from this address.

        Counts before the check, so that a burst of concurrent checks cannot exceed the limit, and takes the count back
        unless the token was wrong: behind a proxy all valid tokens come from one address.
        """
        wrong = False
        try:
            self._count("guess", address, GUESSES_PER_MINUTE)
            yield
        except Unauthenticated:
            wrong = True
            raise
        finally:
            if not wrong:
                with self._lock:
                    self._counts["guess", address] -= 1

    def _count(self, kind: str, sender: str, limit: int) -> None:
        with self._lock:
            now = time.monotonic()
            if now >= self._window_ends:
                self._counts.clear()
                self._window_ends = now + _WINDOW_S
            self._counts[kind, sender] += 1
            if self._counts[kind, sender] <= limit:
                return
            left_s = self._window_ends - now
        raise Busy(
            f"More than {limit} requests in a minute: send fewer, larger ones, after Retry-After seconds.",
            retry_after_s=max(1.0, left_s),
            limited=True,
        )
