"""Applies to every request: request id, admission, deadline and size of the body, headers, metrics and log line."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections import Counter
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tula_service.api.errors import http_problem, problem_response
from tula_service.api.instruments import Metrics
from tula_service.api.scopes import is_of_agents
from tula_service.settings import Settings
from tula_wire import ProblemType, routes

_LOG = logging.getLogger("tula.access")
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PROBES: Final = frozenset({routes.HEALTH, routes.READY})
_INGEST: Final = frozenset({routes.RUN_SAMPLES, routes.RUN_TELEMETRY})
_ORDINARY_BODY_BYTES: Final = 256 * 1024
_ORDINARY_MEMBERS: Final = 2_000
"""Limits of bodies other than measurements: people write those, in a few hundred bytes, and they are parsed on the
event loop, which a large one would block, and one of many wrong members for longer."""
_MARKS: Final = (b":", b",", b"[", b"{")
_WITH_BODY: Final = frozenset({"POST", "PATCH", "PUT"})
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


class _Lane:
    """Requests of one kind that are held at once; neither kind takes the other's room.

    An ordinary request counts from when its body has arrived. Until then it holds only memory, up to the limit of a
    body, and counts against its sender, who has not shown a token yet: a flood of slow bodies stays small.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._arriving: Counter[str] = Counter()
        self.in_flight = 0

    @property
    def is_full(self) -> bool:
        """True if one more request would be too many."""
        return self.in_flight >= self._limit

    async def wait_for(self, body: _BoundedBody, sender: str) -> HTTPException | None:
        """Read the body of a request; the reason if it is refused."""
        if self._arriving[sender] >= max(1, self._limit // 4):
            return HTTPException(503, headers={"Retry-After": "1", "Connection": "close"})
        self._arriving[sender] += 1
        try:
            await body.arrive()
        except HTTPException as refusal:
            return refusal
        finally:
            self._arriving[sender] -= 1
            if not self._arriving[sender]:
                del self._arriving[sender]
        return None


class RequestMiddleware:
    """Pure ASGI, because every request passes through it."""

    def __init__(
        self, app: ASGIApp, *, settings: Settings, metrics: Metrics, body_timeout_s: float = BODY_TIMEOUT_S
    ) -> None:
        self._app = app
        self._agents = _Lane(settings.max_in_flight)
        self._ordinary = _Lane(settings.max_ordinary_in_flight)
        self._body_timeout_s = body_timeout_s
        self._max_body_bytes = settings.max_body_bytes
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle HTTP requests; forward everything else (lifespan) unchanged."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope["tula.request_id"] = request_id
        agents = is_of_agents(scope["method"], scope["path"])
        if agents:
            lane, body = self._agents, _BoundedBody(receive, self._body_timeout_s, self._max_body_bytes)
        else:
            most = min(self._max_body_bytes, _ORDINARY_BODY_BYTES)
            lane, body = self._ordinary, _BoundedBody(receive, self._body_timeout_s, most, _ORDINARY_MEMBERS)
        started = time.perf_counter()
        status = 500

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                _add_headers(message, request_id)
            await send(message)

        try:
            if not agents and scope["method"] in _WITH_BODY:
                refusal = await lane.wait_for(body, _sender(scope))
                if refusal is not None:
                    await http_problem(scope, refusal)(scope, receive, send_with_headers)
                    return
            if lane.is_full and scope["path"] not in _PROBES:
                self._metrics.refused.inc()
                await _overloaded(scope)(scope, receive, send)
                return
            await self._forward(scope, body, send_with_headers, lane)
        finally:
            body.close()
            self._record(scope, status, time.perf_counter() - started, request_id)

    async def _forward(self, scope: Scope, receive: Receive, send: Send, lane: _Lane) -> None:
        lane.in_flight += 1
        self._metrics.in_flight.inc()
        try:
            await self._app(scope, receive, send)
        finally:
            lane.in_flight -= 1
            self._metrics.in_flight.dec()

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
    """A `receive` that raises HTTPException 408 or 413 when a body takes more than `seconds`, `max_bytes` or, if it is
    JSON, `max_members` in all.

    One timer per request cancels the pending receive: `asyncio.wait_for` would start a task for every message.
    """

    def __init__(self, receive: Receive, seconds: float, max_bytes: int, max_members: int | None = None) -> None:
        self._receive = receive
        self._members_left = max_members
        self._arrived: Message | None = None
        self._seconds = seconds
        self._bytes_left = max_bytes
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: asyncio.Task[Any] | None = None
        self._expired = False
        self._complete = False

    async def arrive(self) -> None:
        """Read all of the body, which the next call returns in one piece."""
        pieces: list[bytes] = []
        message = await self()
        while message.get("more_body", False):
            pieces.append(message.get("body", b""))
            message = await self()
        if message["type"] == "http.request":
            message = {**message, "body": b"".join([*pieces, message.get("body", b"")])}
        self._arrived = message

    async def __call__(self) -> Message:
        if self._arrived is not None:
            message, self._arrived = self._arrived, None
            return message
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
            if task is not None:
                task.uncancel()
            raise HTTPException(408, headers={"Connection": "close"}) from None
        finally:
            self._waiting = None
        if not message.get("more_body", False):
            self._complete = True
            self.close()
        self._count(message.get("body", b""))
        return message

    def _count(self, piece: bytes) -> None:
        self._bytes_left -= len(piece)
        if self._members_left is not None:
            self._members_left -= max(piece.count(mark) for mark in _MARKS)
        if self._bytes_left < 0 or (self._members_left or 0) < 0:
            raise HTTPException(413, headers={"Connection": "close"})

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


def _sender(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else ""


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
    if known.get(b"content-type", b"").startswith((b"text/html", b"image/svg")):
        headers.extend(_PAGE_HEADERS)
    if b"cache-control" not in known:
        headers.append((b"cache-control", b"no-store"))


def _request_id(scope: Scope) -> str:
    text = Headers(scope=scope).get("x-request-id", "")
    # Else an id, not a secret: the fast generator is enough.
    return text if _REQUEST_ID.fullmatch(text) else f"{random.getrandbits(64):016x}"
