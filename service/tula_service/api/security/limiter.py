"""How many requests a token may send: a runaway client is slowed before it slows others."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from limits import RateLimitItemPerMinute
from limits.strategies import FixedWindowRateLimiter

from tula_service.api.security.counts import SharedCounts
from tula_service.errors import Busy
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
            self._hit(self._requests, "requests", who)
            return
        uncounted = self._uncounted.get(who, 0) + 1
        self._uncounted[who] = uncounted % INGEST_BLOCK
        if uncounted == 1:  # a block is counted when it begins, so that the limit is never exceeded by one
            self._hit(self._ingest, "ingest", who, cost=min(INGEST_BLOCK, self._ingest.amount))

    def admit_guess(self, address: str) -> None:
        """Let a token that was not seen lately be tried, unless too many from this address were wrong. Raises Busy."""
        if not self._limiter.test(self._guesses, "guess", address):
            raise self._refusal(self._guesses, "guess", address)

    def count_guess(self, address: str) -> None:
        """Count a token that was wrong. Right ones cost nothing: behind a balancer all come from one address."""
        self._limiter.hit(self._guesses, "guess", address)

    def close(self) -> None:
        """Let go of the shared counts."""
        self._counts.close()

    def _hit(self, item: RateLimitItemPerMinute, *who: str, cost: int = 1) -> None:
        if not self._limiter.hit(item, *who, cost=cost):
            self._uncounted.pop(who[-1], None)
            raise self._refusal(item, *who)

    def _refusal(self, item: RateLimitItemPerMinute, *who: str) -> Busy:
        return Busy(
            f"More than {item.amount} requests in a minute: send fewer, larger ones, after Retry-After seconds.",
            retry_after_s=self._retry_after_s(item, *who),
            limited=True,
        )

    def _retry_after_s(self, item: RateLimitItemPerMinute, *who: str) -> float:
        return max(1.0, self._limiter.get_window_stats(item, *who).reset_time - time.time())
