"""Applies to every request: request id, admission, deadline and size of the body, headers, metrics and log line."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tula_service.api.errors import problem_response
from tula_service.api.instruments import Metrics
from tula_service.settings import Settings
from tula_wire import ProblemType, routes

_LOG = logging.getLogger("tula.access")
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PROBES: Final = frozenset({routes.HEALTH, routes.READY})
_INGEST: Final = frozenset({routes.RUN_SAMPLES, routes.RUN_TELEMETRY})
_INGEST_SUFFIXES: Final = tuple(route.rpartition("}")[2] for route in _INGEST)
_ORDINARY_BODY_BYTES: Final = 256 * 1024
"""Limit of bodies other than measurements: people write those, in a few hundred bytes, and they are parsed on the event
loop, which a large one would block."""
BODY_TIMEOUT_S: Final = 20.0
"""Longest time that a client may take to send a body."""
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
"""Scripts come from this service only and never evaluate text: on the pages Vega interprets its expressions. Vega's
tooltips and drawings set their own styles, hence 'unsafe-inline' for styles."""


class RequestMiddleware:
    """Pure ASGI, because every request passes through it."""

    def __init__(
        self, app: ASGIApp, *, settings: Settings, metrics: Metrics, body_timeout_s: float = BODY_TIMEOUT_S
    ) -> None:
        self._app = app
        self._max_in_flight = settings.max_in_flight
        self._max_ordinary = settings.max_ordinary_in_flight
        self._body_timeout_s = body_timeout_s
        self._max_body_bytes = settings.max_body_bytes
        self._metrics = metrics
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle HTTP requests; forward everything else (lifespan) unchanged."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope["tula.request_id"] = request_id
        ingest = scope["method"] == "POST" and scope["path"].endswith(_INGEST_SUFFIXES)
        if self._in_flight >= (self._max_in_flight if ingest else self._max_ordinary) and scope["path"] not in _PROBES:
            self._metrics.refused.inc()
            await _overloaded(scope)(scope, receive, send)
            return
        self._in_flight += 1
        self._metrics.in_flight.inc()
        started = time.perf_counter()
        status = 500

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                _add_headers(message, request_id)
            await send(message)

        max_bytes = self._max_body_bytes if ingest else min(self._max_body_bytes, _ORDINARY_BODY_BYTES)
        body = _BoundedBody(receive, self._body_timeout_s, max_bytes)
        try:
            await self._app(scope, body, send_with_headers)
        finally:
            body.close()
            self._in_flight -= 1
            self._metrics.in_flight.dec()
            self._record(scope, status, time.perf_counter() - started, request_id)

    def _record(self, scope: Scope, status: int, took_s: float, request_id: str) -> None:
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


class _BoundedBody:
    """A `receive` that raises HTTPException 408 or 413 when a body takes more than `seconds` or `max_bytes` in all.

    One timer per request cancels the pending receive: `asyncio.wait_for` would start a task for every message.
    """

    def __init__(self, receive: Receive, seconds: float, max_bytes: int) -> None:
        self._receive = receive
        self._seconds = seconds
        self._bytes_left = max_bytes
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: asyncio.Task[Any] | None = None
        self._expired = False
        self._complete = False

    async def __call__(self) -> Message:
        if self._complete:
            return await self._receive()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._expire)
        if self._has_expired():
            raise HTTPException(408, headers={"Connection": "close"})
        self._waiting = task = asyncio.current_task()
        try:
            message = await self._receive()
        except asyncio.CancelledError:
            if not self._has_expired():
                raise
            if task is not None and hasattr(task, "uncancel"):  # Python 3.11 counts cancellations; 3.10 does not
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
        """Stop the timer: the body is complete, or no longer needed."""
        if self._timer is not None:
            self._timer.cancel()

    def _has_expired(self) -> bool:  # a method: mypy would take the attribute for unchanged after an await
        return self._expired

    def _expire(self) -> None:
        self._expired = True
        if self._waiting is not None:
            self._waiting.cancel()


def _overloaded(scope: Scope) -> Response:
    return problem_response(
        scope,
        503,
        ProblemType.UNAVAILABLE,
        "Unavailable",
        "The service is at its limit of requests: send this one again after Retry-After seconds.",
        headers={"Retry-After": "1"},
    )


def _add_headers(start: Message, request_id: str) -> None:
    headers: list[tuple[bytes, bytes]] = start.setdefault("headers", [])
    headers.append((b"x-request-id", request_id.encode("ascii")))
    headers.extend(_SECURITY_HEADERS)
    known = {name: value for name, value in headers if name in (b"content-type", b"cache-control")}
    if known.get(b"content-type", b"").startswith(b"text/html"):
        headers.extend(_PAGE_HEADERS)
    if b"cache-control" not in known:
        headers.append((b"cache-control", b"no-store"))


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            if _REQUEST_ID.fullmatch(text):
                return str(text)
            break
    return f"{random.getrandbits(64):016x}"  # an id, not a secret: the fast generator is enough
