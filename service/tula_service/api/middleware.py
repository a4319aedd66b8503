"""What every request passes: request id, headers, metrics, log line, and whether there is room for it."""

from __future__ import annotations

import asyncio
import collections
import logging
import os
import random
import re
import time
from contextlib import nullcontext
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tula_service.api.bodies import ORDINARY_BYTES, check_ordinary, too_large
from tula_service.api.deps import OPEN, Services, identify, lane_of
from tula_service.api.errors import problem_of
from tula_service.errors import Busy, ServiceError, Unauthenticated
from tula_wire import routes

MULTIPROCESS_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
"""Set by `tula serve --workers N` before the workers start: a folder through which any worker reports for all."""

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
"""Scripts come from this service only and never evaluate text: on the pages Vega interprets its expressions. Vega's
tooltips and drawings set their own styles, hence 'unsafe-inline' for styles."""
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_WITH_BODY: Final = frozenset({"POST", "PATCH", "PUT"})
_OPEN_FORMS: Final = frozenset({"/login", "/logout"})
"""Paths of forms that are read without authentication."""
BODY_TIMEOUT_S: Final = 20.0
"""Longest time that a client may take to send a body."""
ARRIVING_BYTES: Final = 64 * 2**20
"""Most bytes of one sender's incomplete bodies: eight of the largest chunks, or one small one of each of 200 agents."""
LIMITED_S: Final = 1.0
"""How long the answer 429 waits: a sender that asks again at once would take the event loop with refusals."""


class Metrics:
    """Prometheus instruments, a set per application: two applications in one process (tests) never share a count."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        own = self._registry
        self.requests = Counter("tula_requests", "Requests answered.", ["method", "route", "status"], registry=own)
        self.request_s = Histogram("tula_request_seconds", "Time to answer.", ["route"], buckets=_SECONDS, registry=own)
        self.in_flight = Gauge("tula_requests_in_flight", "In progress.", multiprocess_mode="livesum", registry=own)
        self.refused = Counter("tula_requests_refused", "Refused because too many were in progress.", registry=own)
        self.limited = Counter("tula_requests_limited", "Refused by a token's limit.", registry=own)
        self.samples = Counter("tula_samples_stored", "Step samples stored.", registry=own)
        self.step_values = Counter("tula_step_values_stored", "Telemetry values stored.", registry=own)
        self.duplicates = Counter("tula_ingest_duplicates", "Rows or chunks that were stored before.", registry=own)
        self.fits = Counter("tula_fits", "Recommendations computed or taken from the cache.", ["cached"], registry=own)
        self.fit_s = Histogram("tula_fit_seconds", "Time of a fresh fit.", buckets=_SECONDS, registry=own)

    def render(self) -> bytes:
        """The text that Prometheus reads, of all workers together."""
        registry = self._registry
        if MULTIPROCESS_VARIABLE in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)


class RequestMiddleware:
    """Pure ASGI, because every request passes through it.

    The sender is known before a body is read, and a request takes room once its body has arrived. A body on its way
    takes no room of others: it holds memory, which counts against its sender alone. After that, requests of agents and
    all others are counted separately. A sender beyond its limits waits for that answer, and takes no room meanwhile.
    """

    def __init__(self, app: ASGIApp, *, services: Services) -> None:
        self._app = app
        self._services = services
        self._agents = asyncio.Semaphore(services.settings.max_in_flight)
        self._others = asyncio.Semaphore(services.settings.max_ordinary_in_flight)
        self._arriving: collections.Counter[str] = collections.Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle HTTP requests; forward everything else (lifespan) unchanged."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        # An id, not a secret: the fast generator is enough.
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
                known = dict(headers)
                headers += [(b"x-request-id", request_id.encode()), *_HEADERS]
                if known.get(b"content-type", b"").startswith((b"text/html", b"image/svg")):
                    headers.append((b"content-security-policy", _CONTENT_POLICY))
                if b"cache-control" not in known:
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
        """Forward the request with its whole body, or answer why not."""
        try:
            if scope["method"] in _WITH_BODY:
                receive = await self._arrived(scope, receive)
        except (HTTPException, ServiceError) as refusal:
            response = problem_of(scope, refusal)
            if not isinstance(refusal, Unauthenticated):  # which a client that is still sending has to read
                response.headers["Connection"] = "close"
            await response(scope, receive, send)
            return
        room = self._others if lane_of(scope["method"], scope["path"]) == "others" else self._agents
        is_probe = (scope["method"], scope["path"]) in OPEN
        if room.locked() and not is_probe:
            self._services.metrics.refused.inc()
            await problem_of(scope, _busy("The service is at its limit of requests"))(scope, receive, send)
            return
        async with nullcontext() if is_probe else room:
            with self._services.metrics.in_flight.track_inprogress():
                await self._app(scope, receive, send)

    async def _arrived(self, scope: Scope, receive: Receive) -> Receive:
        """A `receive` of the whole body. Raises HTTPException 408, TooLarge, Busy, and what `identify` raises."""
        if scope["path"] in _OPEN_FORMS:  # counted against the address
            sender = f"address {scope['client'][0]}" if scope.get("client") else "address"
        else:
            sender = (await identify(Request(scope))).sender
        limit, ordinary = self._services.settings.max_body_bytes, lane_of(scope["method"], scope["path"]) != "ingest"
        if ordinary:
            limit = min(limit, ORDINARY_BYTES)
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise too_large(limit, "as sent")
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await self._read(receive, sender, limit)
        except TimeoutError:
            raise HTTPException(408) from None
        if ordinary:
            check_ordinary(body)
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def whole() -> Message:
            return messages.pop() if messages else await receive()

        return whole

    async def _read(self, receive: Receive, sender: str, limit: int) -> bytes:
        """The body; an incomplete one counts at least as a share of `ARRIVING_BYTES`, which bounds their number too."""
        body = bytearray()
        counted, least = 0, ARRIVING_BYTES // self._services.settings.max_in_flight
        try:
            while True:
                more = max(least, len(body)) - counted
                counted += more
                self._arriving[sender] += more
                if len(body) > limit:
                    raise too_large(limit, "as sent")
                if self._arriving[sender] > ARRIVING_BYTES:
                    raise _busy("Too many bodies of this sender are on their way", limited=True)
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
        # The pattern of the route, so that labels stay few.
        route = getattr(scope.get("route"), "path", "unmatched")
        self._services.metrics.requests.labels(scope["method"], route, str(status)).inc()
        if status != 429:  # which waits
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
    return Busy(f"{what}: send this one again after Retry-After seconds.", retry_after_s=1.0, limited=limited)
