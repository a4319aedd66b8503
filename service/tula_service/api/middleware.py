"""Applies to every request: request id, headers, metrics and log line."""

from __future__ import annotations

import logging
import random
import re
import time
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tula_service.api.instruments import Metrics
from tula_wire import routes

_LOG = logging.getLogger("tula.access")
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PROBES: Final = frozenset({routes.HEALTH, routes.READY})
_INGEST: Final = frozenset({routes.RUN_SAMPLES, routes.RUN_TELEMETRY})
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

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle HTTP requests; forward everything else (lifespan) unchanged."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope["tula.request_id"] = request_id
        started = time.perf_counter()
        status = 500

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                _add_headers(message, request_id)
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        finally:
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
