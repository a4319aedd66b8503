"""Limits the request rate per token, or per address for failed authentications and routes that require no token."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from cachetools import TTLCache

from tula_service.errors import Busy

FAILED_PER_MINUTE: Final = 600
OPEN_PER_MINUTE: Final = 1_200
"""Maximum requests per minute from one address to routes that require no token, not counting probes."""
WINDOW_S: Final = 60.0
_SENDERS: Final = 100_000


@dataclass
class _Window:
    """The number of requests from one sender in a time window that ends at `ends`, in monotonic seconds."""

    ends: float
    count: int = 0


class RequestLimits:
    """Counts each sender's requests in one-minute windows, in memory and separately for each worker.

    Only the event loop calls its methods, so no lock is needed.
    """

    def __init__(self, *, requests_per_minute: int, ingest_per_minute: int) -> None:
        self._requests_per_minute = requests_per_minute
        self._ingest_per_minute = ingest_per_minute
        self._windows: TTLCache[tuple[str, str], _Window] = TTLCache(_SENDERS, WINDOW_S)

    def count_request(self, sender: str, *, ingest: bool = False) -> None:
        """Count a request from an authenticated sender. Raises Busy if the sender exceeds its limit."""
        limit, kind = (self._ingest_per_minute, "ingest") if ingest else (self._requests_per_minute, "requests")
        remedy = (
            f"This sender sent more than {limit} requests within a minute: wait Retry-After seconds, then send fewer, "
            "larger requests."
        )
        self._count(kind, sender, limit, remedy)

    def count_failed_auth(self, address: str) -> None:
        """Count a failed authentication from this address. Raises Busy if there were too many failures.

        Requests with a valid token are not counted, since all clients behind a proxy have the same address.
        """
        remedy = (
            f"More than {FAILED_PER_MINUTE} requests from this address failed to authenticate within a minute: set "
            "TULA_TOKEN to a token from `tula token create`, and wait Retry-After seconds."
        )
        self._count("failed", address, FAILED_PER_MINUTE, remedy)

    def count_open(self, address: str) -> None:
        """Count a request to a route that requires no token. Raises Busy if the address has sent too many requests."""
        remedy = f"This address sent more than {OPEN_PER_MINUTE} requests within a minute: wait Retry-After seconds."
        self._count("open", address, OPEN_PER_MINUTE, remedy)

    def _count(self, kind: str, sender: str, limit: int, remedy: str) -> None:
        now = time.monotonic()
        window = self._windows.get((kind, sender))
        if window is None or window.ends <= now:
            window = self._windows[kind, sender] = _Window(now + WINDOW_S)
        window.count += 1
        if window.count > limit:
            raise Busy(remedy, retry_after_s=max(1.0, window.ends - now), limited=True)
