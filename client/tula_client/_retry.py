"""When to ask again and how long to wait first: pure, so the clock and the dice are arguments."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Final, Literal

__all__ = ["NO_RETRY", "Outcome", "RetryPolicy", "retry_after_s"]

Trouble = Literal["not_sent", "lost"]

REFUSED_UNREAD: Final = frozenset({429, 503})
"""Statuses with which a server says that it has not taken the request on."""
MAYBE_DONE: Final = frozenset({502, 504})
"""Statuses of a gateway that does not know what became of the request."""


@dataclass(frozen=True)
class Outcome:
    """What an attempt came to: a status, or the trouble that left it without one.

    `not_sent`: no connection was made, so the service has seen nothing. `lost`: it may have acted.
    """

    status: int | None = None
    trouble: Trouble | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with full jitter, bounded in attempts and in time.

    The wait before attempt k+1 is uniform in [0, min(cap_s, base_s * 2**(k-1))], and never less than what
    `Retry-After` asks (RFC 9110, section 10.2.3). Requests that are not idempotent are repeated only when
    the service cannot have acted on them.
    """

    max_attempts: int = 5
    base_s: float = 0.2
    cap_s: float = 5.0
    budget_s: float = 30.0

    def wait_s(self, outcome: Outcome, *, attempt: int, waited_s: float, idempotent: bool, dice: float) -> float | None:
        """Seconds to wait before trying again, or None to give up.

        `attempt` counts from 1, `waited_s` is what earlier waits came to, `dice` is uniform in [0, 1).
        """
        if attempt >= self.max_attempts or not _worth_it(outcome, idempotent):
            return None
        wait = dice * min(self.cap_s, self.base_s * 2.0 ** (attempt - 1))
        if outcome.retry_after_s is not None:
            wait += outcome.retry_after_s
        return wait if waited_s + wait <= self.budget_s else None


NO_RETRY: Final = RetryPolicy(max_attempts=1)


def retry_after_s(header: str | None, now: datetime | None = None) -> float | None:
    """Seconds that a `Retry-After` header asks for, from seconds or an HTTP date; None when absent or unreadable."""
    if not header:
        return None
    text = header.strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        when = parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=timezone.utc)
    return max(0.0, (when - (now or datetime.now(timezone.utc))).total_seconds())


def _worth_it(outcome: Outcome, idempotent: bool) -> bool:
    if outcome.trouble == "not_sent" or outcome.status in REFUSED_UNREAD:
        return True
    return idempotent and (outcome.trouble == "lost" or outcome.status in MAYBE_DONE)
