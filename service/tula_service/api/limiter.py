"""Rate limits: requests of a token per minute, and wrong tokens of an address per minute."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import FixedWindowRateLimiter

from tula_service.errors import Busy, Unauthenticated
from tula_service.usecases.access import Principal

GUESSES_PER_MINUTE: Final = 600


class Limiter:
    """Counts in fixed windows of a minute, in the memory of this process: each worker has its own limits."""

    def __init__(self, *, requests_per_minute: int, ingest_per_minute: int) -> None:
        self._counts = MemoryStorage()
        self._limiter = FixedWindowRateLimiter(self._counts)
        self._requests = RateLimitItemPerMinute(requests_per_minute)
        self._ingest = RateLimitItemPerMinute(ingest_per_minute)
        self._guesses = RateLimitItemPerMinute(GUESSES_PER_MINUTE)

    def admit(self, principal: Principal, *, ingest: bool) -> None:
        """Count a request. Raises Busy beyond the limit."""
        item, kind = (self._ingest, "ingest") if ingest else (self._requests, "requests")
        token = principal.token_id or principal.name
        if not self._limiter.hit(item, kind, token):
            raise self._refusal(item, kind, token)

    @contextmanager
    def guess(self, address: str) -> Iterator[None]:
        """Around the check of a token that is not cached. Raises Busy after too many wrong ones from this address.

        Counts before the check, so that a burst of concurrent checks cannot exceed the limit, and takes the count back
        unless the token was wrong: behind a proxy all valid tokens come from one address.
        """
        admitted, wrong = self._limiter.hit(self._guesses, "guess", address), False
        try:
            if not admitted:
                raise self._refusal(self._guesses, "guess", address)
            yield
        except Unauthenticated:
            wrong = True
            raise
        finally:
            if not wrong:
                self._counts.decr(self._guesses.key_for("guess", address))

    def _refusal(self, item: RateLimitItemPerMinute, *identifiers: str) -> Busy:
        reset_time = self._limiter.get_window_stats(item, *identifiers).reset_time
        return Busy(
            f"More than {item.amount} requests in a minute: send fewer, larger ones, after Retry-After seconds.",
            retry_after_s=max(1.0, reset_time - time.time()),
            limited=True,
        )
