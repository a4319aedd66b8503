"""Computes how long to wait before a retry; the current time and the random number are arguments."""

from __future__ import annotations

from datetime import datetime, timezone
from email.utils import parsedate_to_datetime


def backoff_s(failures: int, jitter: float, *, base_s: float, cap_s: float, asked_s: float | None = None) -> float:
    """Return the seconds to wait after `failures` failed attempts (at least 1): exponential backoff with full jitter.

    If `jitter` is uniform in [0, 1), the backoff is uniform in [0, min(cap_s, base_s * 2**(failures - 1))]. `asked_s`,
    the seconds in `Retry-After` (RFC 9110, section 10.2.3), is added to the backoff.
    """
    doublings = min(failures - 1, 60)  # a larger exponent could overflow
    return jitter * min(cap_s, base_s * 2.0**doublings) + (asked_s or 0.0)


def retry_after_s(header: str | None, now: datetime) -> float | None:
    """Return the wait in seconds that a `Retry-After` header requests, or None if it is absent or malformed.

    The header contains seconds or a date. `now` must have a time zone.
    """
    if not header:
        return None
    text = header.strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        when = parsedate_to_datetime(text)
    except (TypeError, ValueError, OverflowError):
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=timezone.utc)
    return max(0.0, (when - now).total_seconds())
