"""Which requests to send again, and when to give up: pure, so the random number is an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from tula_wire.retry import backoff_s

Failure = Literal["not_sent", "lost"]

NOT_PROCESSED: Final = frozenset({429, 503})
"""Statuses by which a server says that it has not processed the request."""
MAYBE_PROCESSED: Final = frozenset({502, 504})
"""Statuses of a gateway that does not know what the server did with the request."""


@dataclass(frozen=True)
class Outcome:
    """The result of an attempt: a status, or the failure that left it without one.

    `not_sent`: no connection was made, so the service has seen nothing. `lost`: it may have acted.
    """

    status: int | None = None
    failure: Failure | None = None
    retry_after_s: float | None = None

    def worth_repeating(self, idempotent: bool) -> bool:
        """True if another attempt may succeed and does no harm."""
        if self.failure == "not_sent" or self.status in NOT_PROCESSED:
            return True
        return idempotent and (self.failure == "lost" or self.status in MAYBE_PROCESSED)


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with full jitter (`tula_wire.retry`), bounded in attempts and in seconds of waiting.

    Requests that are not idempotent are repeated only if the service cannot have acted on them.
    """

    max_attempts: int = 5
    base_s: float = 0.2
    cap_s: float = 5.0
    budget_s: float = 30.0

    def wait_s(self, outcome: Outcome, *, attempt: int, waited_s: float, idempotent: bool, dice: float) -> float | None:
        """Seconds to wait before the next attempt, or None to give up.

        `attempt` counts from 1, `waited_s` is the sum of earlier waits, `dice` is uniform in [0, 1).
        """
        if attempt >= self.max_attempts or not outcome.worth_repeating(idempotent):
            return None
        wait = backoff_s(attempt, dice, base_s=self.base_s, cap_s=self.cap_s, asked_s=outcome.retry_after_s)
        return wait if waited_s + wait <= self.budget_s else None


NO_RETRY: Final = RetryPolicy(max_attempts=1)
