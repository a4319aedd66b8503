"""Provides a clock that tests can advance without waiting."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone


class ManualClock:
    """A stand-in for `utc_now` whose time changes only when `advance` is called."""

    def __init__(self, start: datetime | None = None) -> None:
        self.moment = start or datetime(2026, 1, 1, tzinfo=timezone.utc)

    def __call__(self) -> datetime:
        """Return the current time of this clock."""
        return self.moment

    def advance(self, seconds: float) -> None:
        """Advance the clock by this number of seconds."""
        self.moment += timedelta(seconds=seconds)
