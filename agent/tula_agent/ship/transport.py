"""One HTTP exchange with the service and its verdict: delivered, refused, or to be retried."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Literal

import httpx

from tula_agent.ship.spool import SpooledRequest
from tula_wire.retry import retry_after_s

Verdict = Literal["delivered", "refused", "retry"]
_RETRIED = {408, 425, 429}
MAX_RETRY_AFTER_S = 300.0


@dataclass(frozen=True)
class Reply:
    """Outcome of a request. `retry_after_s`: the pause that the service asks for, `body`: its parsed answer."""

    verdict: Verdict
    status: int = 0
    body: dict[str, Any] | None = None
    retry_after_s: float | None = None
    detail: str = ""
    etag: str | None = None


class Transport:
    """An HTTP client with a time-out on everything; belongs to one process and one thread.

    `trust_env` stays on: clusters reach the outside through proxies. Redirects are not followed with a token in hand.
    """

    def __init__(self, url: str, token: str | None, timeout_s: float) -> None:
        headers = {"user-agent": "tula-agent", "content-type": "application/json"}
        if token:
            headers["authorization"] = f"Bearer {token}"
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1)
        timeout = httpx.Timeout(timeout_s, connect=min(2.0, timeout_s))
        self._client = httpx.Client(base_url=url, headers=headers, timeout=timeout, limits=limits)

    def send(self, request: SpooledRequest) -> Reply:
        """Deliver one request. Failures of service and network are replies, never exceptions."""
        return self._exchange(request.method, request.path, request.body)

    def get(self, path: str, etag: str | None = None) -> Reply:
        """Read `path`; an unchanged resource answers 304 without a body."""
        return self._exchange("GET", path, None, {"if-none-match": etag} if etag else None)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _exchange(self, method: str, path: str, body: bytes | None, headers: dict[str, str] | None = None) -> Reply:
        try:
            response = self._client.request(method, path, content=body, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            return Reply("retry", detail=f"{type(error).__name__}: {error}")
        status = response.status_code
        asked_s = retry_after_s(response.headers.get("retry-after"), datetime.now(timezone.utc))
        parsed = _object(response.content)
        if status == 304 or status == 204:
            return Reply("delivered", status)
        if 200 <= status < 300:
            if parsed is None:  # a captive portal or a proxy's page
                return Reply("retry", status, detail="the answer is not a JSON object")
            return Reply("delivered", status, parsed, etag=response.headers.get("etag"))
        detail = str((parsed or {}).get("detail", ""))[:500]
        verdict: Verdict = "refused" if 400 <= status < 500 and status not in _RETRIED else "retry"
        return Reply(verdict, status, parsed, None if asked_s is None else min(asked_s, MAX_RETRY_AFTER_S), detail)


def _object(content: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
