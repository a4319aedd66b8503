"""What happens to every request outside of its route: identity, admission, deadline, headers, count and log line."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tula_service.api.metric_set import Metrics
from tula_service.api.problems import problem_response
from tula_service.settings import Settings
from tula_wire import ProblemType, routes

__all__ = ["Edge"]

_LOG = logging.getLogger("tula.access")
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PROBES: Final = frozenset({routes.HEALTH, routes.READY})
_INGEST: Final = frozenset({routes.RUN_SAMPLES, routes.RUN_TELEMETRY})
_SENT_BY_AGENTS: Final = tuple(route.rpartition("}")[2] for route in _INGEST)
_ORDINARY_BODY_BYTES: Final = 256 * 1024
"""What is not measured is written by people: a specification has a few hundred bytes. Such bodies are read on the event
loop, which a large one would hold up."""
_SECURITY_HEADERS: Final = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
_PAGE_HEADERS: Final = [
    (
        b"content-security-policy",
        b"default-src 'self'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
        b"img-src 'self' data: blob:; connect-src 'self'; object-src 'none'; base-uri 'none'; "
        b"frame-ancestors 'none'; form-action 'self'",
    ),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
]
"""Scripts come from this service only and evaluate no text: the pages have Vega interpret its expressions. Vega's
tooltips and drawings style themselves, hence 'unsafe-inline' for styles."""


class Edge:
    """Pure ASGI, since it stands before every request."""

    def __init__(self, app: ASGIApp, *, settings: Settings, metrics: Metrics) -> None:
        self._app = app
        self._most = settings.max_in_flight
        self._most_ordinary = settings.most_ordinary
        self._body_timeout_s = settings.body_timeout_s
        self._body_bytes = settings.max_body_bytes
        self._metrics = metrics
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass HTTP requests on; everything else (lifespan) as it is."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope["tula.request_id"] = request_id
        by_agent = scope["method"] == "POST" and scope["path"].endswith(_SENT_BY_AGENTS)
        if self._in_flight >= (self._most if by_agent else self._most_ordinary) and scope["path"] not in _PROBES:
            self._metrics.refused.inc()
            response = problem_response(
                503,
                ProblemType.UNAVAILABLE,
                "Unavailable",
                "The service is at its limit of requests: send this one again after Retry-After seconds.",
                request_id=request_id,
                headers={"Retry-After": "1"},
            )
            await response(scope, receive, send)
            return
        self._in_flight += 1
        self._metrics.in_flight.inc()
        started = time.perf_counter()
        status = 500

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers: list[tuple[bytes, bytes]] = message.setdefault("headers", [])
                headers.append((b"x-request-id", request_id.encode("ascii")))
                headers.extend(_SECURITY_HEADERS)
                known = {name: value for name, value in headers if name in (b"content-type", b"cache-control")}
                if known.get(b"content-type", b"").startswith(b"text/html"):
                    headers.extend(_PAGE_HEADERS)
                if b"cache-control" not in known:
                    headers.append((b"cache-control", b"no-store"))
            await send(message)

        most_bytes = self._body_bytes if by_agent else min(self._body_bytes, _ORDINARY_BODY_BYTES)
        body = _Body(receive, self._body_timeout_s, most_bytes)
        try:
            await self._app(scope, body, sending)
        finally:
            body.close()
            self._in_flight -= 1
            self._metrics.in_flight.dec()
            self._note(scope, status, time.perf_counter() - started, request_id)

    def _note(self, scope: Scope, status: int, took_s: float, request_id: str) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        self._metrics.request(scope["method"], route, status, took_s)
        level = logging.DEBUG if (route in _INGEST or route in _PROBES) and status < 500 else logging.INFO
        if _LOG.isEnabledFor(level):
            principal = scope.get("tula.principal")
            _LOG.log(
                level,
                "request",
                extra={
                    "request_id": request_id,
                    "method": scope["method"],
                    "route": route,
                    "status": status,
                    "took_ms": round(took_s * 1e3, 2),
                    "token": getattr(principal, "token_id", None),
                },
            )


class _Body:
    """A `receive` that gives a body so many seconds and bytes in all, then answers 408 or 413.

    One timer a request that ends whichever wait it finds: `asyncio.wait_for` would start a task for every piece.
    """

    def __init__(self, receive: Receive, seconds: float, most_bytes: int) -> None:
        self._receive = receive
        self._seconds = seconds
        self._bytes_left = most_bytes
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: asyncio.Task[Any] | None = None
        self._late = False
        self._complete = False

    async def __call__(self) -> Message:
        if self._complete:
            return await self._receive()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._expire)
        if self._is_late():
            raise HTTPException(408, headers={"Connection": "close"})
        self._waiting = task = asyncio.current_task()
        try:
            message = await self._receive()
        except asyncio.CancelledError:
            if not self._is_late():
                raise
            if task is not None and hasattr(task, "uncancel"):  # Python 3.11 counts what 3.10 did not
                task.uncancel()
            raise HTTPException(408, headers={"Connection": "close"}) from None
        finally:
            self._waiting = None
        if not message.get("more_body", False):
            self._complete = True
            self.close()
        self._bytes_left -= len(message.get("body", b""))
        if self._bytes_left < 0:
            raise HTTPException(413, headers={"Connection": "close"})
        return message

    def close(self) -> None:
        """The body is there, or nobody wants it any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _is_late(self) -> bool:
        return self._late

    def _expire(self) -> None:
        self._late = True
        if self._waiting is not None:
            self._waiting.cancel()


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            if _REQUEST_ID.fullmatch(text):
                return str(text)
            break
    return f"{random.getrandbits(64):016x}"  # tells requests apart and opens nothing: no entropy of the system's
