"""Limits the rate of requests by token, or by address for failed authentications and open routes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from cachetools import TTLCache

from tula_service.errors import Busy

FAILED_PER_MINUTE: Final = 600
OPEN_PER_MINUTE: Final = 1_200
"""Requests per minute from one address to routes that need no token, except probes."""
WINDOW_S: Final = 60.0
_SENDERS: Final = 100_000


@dataclass
class _Window:
    """The requests of one sender until `ends`, a monotonic time."""

    ends: float
    count: int = 0


class RequestLimits:
    """Counts the requests of each sender in windows of a minute, in memory, separately for each worker.

    Only the event loop counts, so no lock is needed.
    """

    def __init__(self, *, requests_per_minute: int, ingest_per_minute: int) -> None:
        self._requests_per_minute = requests_per_minute
        self._ingest_per_minute = ingest_per_minute
        self._windows: TTLCache[tuple[str, str], _Window] = TTLCache(_SENDERS, WINDOW_S)

    def count_request(self, sender: str, *, ingest: bool = False) -> None:
        """Count a request from an authenticated sender. Raises Busy beyond the limit."""
        limit, kind = (self._ingest_per_minute, "ingest") if ingest else (self._requests_per_minute, "requests")
        remedy = f"More than {limit} requests in a minute: send fewer, larger ones, after Retry-After seconds."
        self._count(kind, sender, limit, remedy)

    def count_failed_auth(self, address: str) -> None:
        """Count a wrong, missing or malformed token from this address. Raises Busy after too many of them.

        A valid token never counts, since behind a proxy all tokens come from one address.
        """
        remedy = (
            f"More than {FAILED_PER_MINUTE} requests of this address in a minute failed authentication: set TULA_TOKEN "
            "to one that `tula token create` printed, or wait Retry-After seconds."
        )
        self._count("failed", address, FAILED_PER_MINUTE, remedy)

    def count_open(self, address: str) -> None:
        """Count a request to a route that needs no token. Raises Busy after too many requests from the address."""
        remedy = f"More than {OPEN_PER_MINUTE} requests of this address in a minute: wait Retry-After seconds."
        self._count("open", address, OPEN_PER_MINUTE, remedy)

    def _count(self, kind: str, sender: str, limit: int, remedy: str) -> None:
        now = time.monotonic()
        window = self._windows.get((kind, sender))
        if window is None or window.ends <= now:
            window = self._windows[kind, sender] = _Window(now + WINDOW_S)
        window.count += 1
        if window.count > limit:
            raise Busy(remedy, retry_after_s=max(1.0, window.ends - now), limited=True)
