"""Applies to every request: request id, headers, metrics and log line."""

from __future__ import annotations

import logging
import os
import random
import re
import time
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
_ERRORS: Final = (-0.5, -0.25, -0.1, -0.05, -0.02, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)


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
        self.prediction_error = Histogram(
            "tula_prediction_error", "Measured over predicted step time, minus one.", buckets=_ERRORS, registry=own
        )

    def render(self) -> bytes:
        """The text that Prometheus reads, of all workers together."""
        registry = self._registry
        if MULTIPROCESS_VARIABLE in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)


class RequestMiddleware:
    """Pure ASGI, because every request passes through it."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

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
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            self._record(scope, status, time.perf_counter() - started)

    def _record(self, scope: Scope, status: int, took_s: float) -> None:
        # The pattern of the route, so that labels stay few.
        route = getattr(scope.get("route"), "path", "unmatched")
        self._metrics.requests.labels(scope["method"], route, str(status)).inc()
        if status != 429:  # which waits
            self._metrics.request_s.labels(route).observe(took_s)
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
