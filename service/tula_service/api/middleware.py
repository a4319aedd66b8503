"""Middleware that adds request ids and headers, records metrics and log lines, and limits concurrent requests."""

from __future__ import annotations

import asyncio
import collections
import logging
import random
import re
import time
from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tula_service.api.auth import PROBES, admit, client_address, is_for_agents, is_ingest, is_open
from tula_service.api.bodies import ORDINARY_BYTES
from tula_service.api.errors import build_problem
from tula_service.api.services import Services
from tula_service.errors import Busy, ServiceError, TooLarge, Unauthenticated
from tula_wire import MAX_BODY_BYTES, routes

_LOG = logging.getLogger("tula.access")
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_QUIET: Final = frozenset({routes.HEALTH, routes.READY, routes.RUN_SAMPLES, routes.RUN_TELEMETRY})
_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
)
_CONTENT_POLICY: Final = (
    b"default-src 'self'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    b"connect-src 'self'; object-src 'none'; base-uri 'none'; frame-ancestors 'none'; form-action 'self'"
)
"""The content security policy of pages: scripts come only from this service and cannot evaluate text.

Vega works under this policy, because it interprets its expressions on the pages. Vega's tooltips and drawings set
inline styles, which require 'unsafe-inline' for styles.
"""
_WITH_BODY: Final = frozenset({"POST", "PATCH", "PUT"})
BODY_TIMEOUT_S: Final = 20.0
"""Longest time that a client may take to send a body."""
ARRIVING_BYTES: Final = 64 * 2**20
"""Maximum total size of the incomplete bodies of one sender.

This is enough for 64 bodies of the largest size, or for small bodies from 256 agents.
"""
LIMITED_S: Final = 1.0
"""Seconds before a 429 response is sent, since clients that retry immediately would keep the event loop busy."""


class RequestMiddleware:
    """ASGI middleware that handles every request; it does not use Starlette's base class, which is slower.

    The sender is authenticated before the body is read. While a body is arriving, the request is not counted as in
    progress; the body's memory counts only toward its sender's limit. Once the body has arrived, the request is counted
    as in progress, and requests from agents are counted separately from all others. A request that requires no token
    counts only toward the rate limit of its client's address. A sender that exceeds its limits receives the 429
    response after a delay, during which its request is not counted as in progress.
    """

    def __init__(self, app: ASGIApp, *, services: Services) -> None:
        self._app = app
        self._services = services
        self._agents = asyncio.Semaphore(services.settings.max_in_flight)
        self._others = asyncio.Semaphore(services.settings.max_ordinary_in_flight)
        self._arriving: collections.Counter[str] = collections.Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an HTTP request; forward other ASGI events (lifespan) unchanged."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        # The request id is not a secret, so a fast generator suffices.
        request_id = given if _REQUEST_ID.fullmatch(given) else f"{random.getrandbits(64):016x}"
        scope["tula.request_id"] = request_id
        started = time.perf_counter()
        status = 500
        limited: list[Message] = []

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = message.setdefault("headers", [])
                sent = dict(headers)
                headers += [(b"x-request-id", request_id.encode()), *_HEADERS]
                if sent.get(b"content-type", b"").startswith((b"text/html", b"image/svg")):
                    headers.append((b"content-security-policy", _CONTENT_POLICY))
                if b"cache-control" not in sent:
                    headers.append((b"cache-control", b"no-store"))
            if status == 429:
                limited.append(message)
            else:
                await send(message)

        try:
            await self._admit(scope, receive, send_with_headers)
            if limited:
                await asyncio.sleep(LIMITED_S)
            for message in limited:
                await send(message)
        finally:
            self._record(scope, status, time.perf_counter() - started)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request with its whole body, or send a problem document that explains why it is refused."""
        if (scope["method"], scope["path"]) in PROBES:
            await self._app(scope, receive, send)
            return
        try:
            sender = await self._sender(Request(scope))
            if scope["method"] in _WITH_BODY:
                receive = await self._arrived(scope, receive, sender)
        except (HTTPException, ServiceError) as refusal:
            response = build_problem(scope, refusal)
            # After a 401, the connection stays open, so that a client that is still sending can read the response.
            if scope["method"] in _WITH_BODY and not isinstance(refusal, Unauthenticated):
                response.headers["Connection"] = "close"
            await response(scope, receive, send)
            return
        if is_open(scope["method"], scope["path"]):  # already limited by address, and uses no ordinary thread
            await self._app(scope, receive, send)
            return
        room = self._agents if is_for_agents(scope["method"], scope["path"]) else self._others
        if room.locked():
            self._services.metrics.refused.inc()
            await build_problem(scope, _busy("The service has reached its limit of concurrent requests"))(
                scope, receive, send
            )
            return
        async with room:
            with self._services.metrics.in_flight.track_inprogress():
                await self._app(scope, receive, send)

    async def _sender(self, request: Request) -> str:
        """Count the request toward its sender's limits and return the sender. Raises Unauthenticated or Busy."""
        try:
            if not is_open(request.method, request.scope["path"]):
                return (await admit(request)).sender
            self._services.limits.count_open(client_address(request))
        except Busy:
            self._services.metrics.limited.inc()
            raise
        return client_address(request)

    async def _arrived(self, scope: Scope, receive: Receive, sender: str) -> Receive:
        """Read the body and return a `receive` function for it. Raises HTTPException 408, TooLarge or Busy."""
        limit = MAX_BODY_BYTES if is_ingest(scope["method"], scope["path"]) else ORDINARY_BYTES
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await self._read(receive, sender, limit)
        except TimeoutError:
            raise HTTPException(408) from None
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def whole() -> Message:
            return messages.pop() if messages else await receive()

        return whole

    async def _read(self, receive: Receive, sender: str, limit: int) -> bytes:
        """Return the body.

        Each body counts as at least a minimum size, which limits how many bodies are read concurrently.
        """
        body = bytearray()
        counted, least = 0, ARRIVING_BYTES // self._services.settings.max_in_flight
        try:
            while True:
                more = max(least, len(body)) - counted
                counted += more
                self._arriving[sender] += more
                if len(body) > limit:
                    raise _too_large(limit)
                if self._arriving[sender] > ARRIVING_BYTES:
                    raise _busy("This sender has too many requests in progress", limited=True)
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise HTTPException(408)
                body += message.get("body", b"")
                if not message.get("more_body", False) and len(body) <= limit:
                    return bytes(body)
        finally:
            self._arriving[sender] -= counted
            if not self._arriving[sender]:
                del self._arriving[sender]

    def _record(self, scope: Scope, status: int, took_s: float) -> None:
        # The label is the route's pattern and not the path, so that there are few different labels.
        route = getattr(scope.get("route"), "path", "unmatched")
        self._services.metrics.requests.labels(scope["method"], route, str(status)).inc()
        if status != 429:  # a 429 response also waits for LIMITED_S
            self._services.metrics.request_s.labels(route).observe(took_s)
        level = logging.DEBUG if route in _QUIET and status < 500 else logging.INFO
        if _LOG.isEnabledFor(level):
            details = {
                "request_id": scope["tula.request_id"],
                "method": scope["method"],
                "route": route,
                "status": status,
                "took_ms": round(took_s * 1e3, 2),
                "token": getattr(scope.get("tula.principal"), "token_id", None),
            }
            _LOG.log(level, "request", extra=details)


def _busy(what: str, *, limited: bool = False) -> Busy:
    return Busy(f"{what}: send this request again after Retry-After seconds.", retry_after_s=1.0, limited=limited)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"The body is larger than {limit} bytes: send smaller batches.")
