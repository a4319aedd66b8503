"""A clock for tests, which is advanced without waiting."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone


class ManualClock:
    """Called like `utc_now`; stands still until `advance`."""

    def __init__(self, start: datetime | None = None) -> None:
        self.moment = start or datetime(2026, 1, 1, tzinfo=timezone.utc)

    def __call__(self) -> datetime:
        """Return the current time of this clock."""
        return self.moment

    def advance(self, seconds: float) -> None:
        """Advance the clock."""
        self.moment += timedelta(seconds=seconds)
