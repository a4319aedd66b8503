"""How many requests a token may send: a runaway client is slowed before it slows others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from limits import RateLimitItemPerMinute
from limits.strategies import FixedWindowRateLimiter

from tula_service.api.security.counts import SharedCounts
from tula_service.errors import Busy, Unauthenticated
from tula_service.usecases.access import Principal

__all__ = ["Limiter"]

GUESSES_PER_MINUTE: Final = 600
INGEST_BLOCK: Final = 32
"""Ingest is counted in blocks, each when it begins: a count costs what a tenth of a small request does."""


class Limiter:
    """Counts per token, over all workers that share `counts`; each replica has a limit of its own."""

    def __init__(self, *, requests_per_minute: int, ingest_per_minute: int, counts: Path | None = None) -> None:
        self._counts = SharedCounts(counts)
        self._limiter = FixedWindowRateLimiter(self._counts)
        self._requests = RateLimitItemPerMinute(requests_per_minute)
        self._ingest = RateLimitItemPerMinute(ingest_per_minute)
        self._guesses = RateLimitItemPerMinute(GUESSES_PER_MINUTE)
        self._uncounted: dict[str, int] = {}

    def admit(self, principal: Principal, *, ingest: bool) -> None:
        """Count a request. Raises Busy beyond the limit."""
        who = principal.token_id or principal.name
        if not ingest:
            if not self._limiter.hit(self._requests, "requests", who):
                raise self._refusal(self._requests, "requests", who)
            return
        uncounted = self._uncounted.get(who, 0) + 1
        self._uncounted[who] = uncounted % INGEST_BLOCK
        if uncounted > 1:  # a block is counted when it begins, so that the limit is never exceeded by one
            return
        if not self._limiter.hit(self._ingest, "ingest", who, cost=min(INGEST_BLOCK, self._ingest.amount)):
            self._uncounted.pop(who, None)
            raise self._refusal(self._ingest, "ingest", who)

    @contextmanager
    def guess(self, address: str) -> Iterator[None]:
        """Around the check of a token that was not seen lately. Raises Busy when too many from this address were wrong.

        Counted before the check, or a burst would pass whose checks are all still under way; taken back unless the
        token was wrong: behind a balancer all right ones come from one address.
        """
        key = self._guesses.key_for("guess", address)
        count, window_ends = self._counts.count(key, self._guesses.get_expiry())
        right = True
        try:
            if count > self._guesses.amount:
                raise self._refusal(self._guesses, "guess", address)
            yield
        except Unauthenticated:
            right = False
            raise
        finally:
            if right:
                self._counts.take_back(key, window_ends)

    def close(self) -> None:
        """Let go of the shared counts."""
        self._counts.close()

    def _refusal(self, item: RateLimitItemPerMinute, *who: str) -> Busy:
        return Busy(
            f"More than {item.amount} requests in a minute: send fewer, larger ones, after Retry-After seconds.",
            retry_after_s=self._retry_after_s(item, *who),
            limited=True,
        )

    def _retry_after_s(self, item: RateLimitItemPerMinute, *who: str) -> float:
        return max(1.0, self._limiter.get_window_stats(item, *who).reset_time - time.time())
