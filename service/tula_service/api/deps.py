"""Who is calling, whether they may, and how often: the dependencies of endpoints."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_origin

from anyio import CapacityLimiter, to_thread
from fastapi import Depends, Query, Request
from pydantic import BaseModel
from starlette.routing import compile_path

from tula_service.dashboard.session import session_secret
from tula_service.errors import Busy, Forbidden, InvalidInput, Unauthenticated
from tula_service.settings import Settings
from tula_service.store import Store
from tula_service.usecases.access import PUBLIC, Access, Principal
from tula_service.usecases.samples import SampleIngest
from tula_service.usecases.telemetry import TelemetryIngest
from tula_wire import routes

if TYPE_CHECKING:
    from tula_service.api.middleware import Metrics

OPEN: Final = frozenset({("GET", routes.HEALTH), ("GET", routes.READY)})
"""Probes alone are answered without authentication; they reveal only yes or no."""
_INGEST: Final = frozenset({("POST", routes.RUN_SAMPLES), ("POST", routes.RUN_TELEMETRY)})
AGENT_MAY: Final = _INGEST | {("GET", routes.RUN), ("PATCH", routes.RUN), ("GET", routes.JOB_SCALING)}
PUBLIC_MAY: Final = frozenset({("GET", "/accuracy"), ("GET", "/accuracy/charts/{name}")})
"""What anyone may see of a service that only reads."""
_ABOUT_TOKENS: Final = frozenset({routes.TOKENS, "/admin"})
_OF_AGENTS: Final = [(method, compile_path(route)[0], (method, route) in _INGEST) for method, route in AGENT_MAY]

WRONG_PER_MINUTE: Final = 600
_WINDOW_S: Final = 60.0
_SAFE: Final = frozenset({"GET", "HEAD"})
_PROXY_HEADERS: Final = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip")
_MAX_NAME_LENGTH: Final = 64
_LOCAL_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})


class Limiter:
    """Counts in fixed windows of a minute, in the memory of this process: each worker has its own limits.

    Only the event loop counts, hence no lock.
    """

    def __init__(self, *, requests_per_minute: int, ingest_per_minute: int) -> None:
        self._requests_per_minute = requests_per_minute
        self._ingest_per_minute = ingest_per_minute
        self._counts: Counter[tuple[str, str]] = Counter()
        self._window_ends = 0.0

    def admit(self, principal: Principal, *, ingest: bool) -> None:
        """Count a request. Raises Busy beyond the limit."""
        limit, kind = (self._ingest_per_minute, "ingest") if ingest else (self._requests_per_minute, "requests")
        remedy = f"More than {limit} requests in a minute: send fewer, larger ones, after Retry-After seconds."
        self._count(kind, principal.sender, limit, remedy)

    def refuse_wrong(self, request: Request) -> None:
        """Count a wrong, missing or malformed token of this address. Raises Busy after too many of them.

        A right one never counts: behind a proxy all tokens come from one address.
        """
        remedy = (
            f"More than {WRONG_PER_MINUTE} requests of this address in a minute had no right token: set TULA_TOKEN to "
            "one that `tula token create` printed, or wait Retry-After seconds."
        )
        self._count("wrong", request.client.host if request.client else "unknown", WRONG_PER_MINUTE, remedy)

    def _count(self, kind: str, sender: str, limit: int, remedy: str) -> None:
        now = time.monotonic()
        if now >= self._window_ends:
            self._counts.clear()
            self._window_ends = now + _WINDOW_S
        self._counts[kind, sender] += 1
        if self._counts[kind, sender] > limit:
            raise Busy(remedy, retry_after_s=max(1.0, self._window_ends - now), limited=True)


@dataclass(frozen=True)
class Services:
    """Everything that a request may need, built once in `create_app`.

    `intake` limits the threads reserved for requests of agents, `lookups` those that look up a token. `streams` holds
    the sender of each open event stream; streams end when `stopping` is set. `drawings` are the senders whose image is
    drawn or waits for that.
    """

    settings: Settings
    store: Store
    access: Access
    limiter: Limiter
    metrics: Metrics
    samples: SampleIngest
    telemetry: TelemetryIngest
    intake: CapacityLimiter
    lookups: CapacityLimiter
    drawers: CapacityLimiter
    streams: list[str] = field(default_factory=list)
    drawings: set[str] = field(default_factory=set)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)


async def _services(request: Request) -> Services:
    """Async, because FastAPI runs a plain function in a thread."""
    services: Services = request.app.state.services
    return services


async def authenticate(request: Request) -> Principal:
    """Who is calling, if they may call this route now; every route but the probes stands behind this.

    Raises Unauthenticated, Forbidden, or Busy.
    """
    services: Services = request.app.state.services
    route = getattr(request.scope.get("route"), "path", "")
    changes = request.method not in _SAFE
    is_public = services.settings.read_only and not changes and ("GET", route) in PUBLIC_MAY
    if is_public and "authorization" not in request.headers and session_secret(request) is None:
        principal = request.scope["tula.principal"] = PUBLIC
    else:
        principal = await identify(request)
    if principal.scope not in _required_scopes(request.method, route):
        raise Forbidden(f"A token of scope {principal.scope!r} may not do this: ask for one with a wider scope.")
    if services.settings.read_only and changes:
        raise Forbidden("This service only reads (--read-only): send changes to one that was started without it.")
    try:
        ingest = lane_of(request.method, request.scope["path"]) == "ingest"
        services.limiter.admit(principal, ingest=ingest)
    except Busy:
        services.metrics.limited.inc()
        raise
    return principal


async def identify(request: Request) -> Principal:
    """Who is calling; looked up once for a request, before its body is read.

    Takes `Authorization: Bearer TOKEN`, and a browser's session. Without a token, the user of this machine. Raises
    Unauthenticated, or Busy after too many requests of this address without a right token.
    """
    known: Principal | None = request.scope.get("tula.principal")
    if known is not None:
        return known
    services: Services = request.app.state.services
    access, lookups = services.access, services.lookups
    try:
        secret = _secret(request)
        principal = access.cached(secret)
        if principal is None and secret is not None:
            principal = await to_thread.run_sync(access.authenticate, secret, limiter=lookups)
        elif principal is None and access.tokenless_allowed:
            principal = await to_thread.run_sync(access.tokenless, limiter=lookups)
        if principal is None:
            raise Unauthenticated(
                "A token is needed: set TULA_TOKEN, or send `Authorization: Bearer TOKEN` (see `tula token create`)."
            )
        if secret is None:
            _refuse_foreign(request)
    except Unauthenticated:
        services.limiter.refuse_wrong(request)
        raise
    request.scope["tula.principal"] = principal
    return principal


def _required_scopes(method: str, route: str) -> frozenset[str]:
    """Scopes that may use the route: users, administrators, and readers of it, unless listed above."""
    key = ("GET" if method == "HEAD" else method, route)
    scopes = {"user", "admin"}
    if key[0] == "GET" and route not in _ABOUT_TOKENS:
        scopes.add("read")
    if key in AGENT_MAY:
        scopes.add("agent")
    if key in PUBLIC_MAY:
        scopes.add(PUBLIC.scope)
    return frozenset(scopes)


def lane_of(method: str, path: str) -> Literal["ingest", "agents", "others"]:
    """Requests of `AGENT_MAY` have room and threads that no other takes; ingest also larger bodies, and own limits."""
    for known, pattern, is_ingest in _OF_AGENTS:
        if method == known and pattern.match(path):
            return "ingest" if is_ingest else "agents"
    return "others"


async def reject_unknown_query(request: Request) -> None:
    """Refuse a query parameter that the route does not declare, which may be a misspelling, or one given twice."""
    declared: dict[str, Any] = {}
    for param in request.scope["route"].dependant.query_params:
        kind = param.field_info.annotation
        is_model = isinstance(kind, type) and issubclass(kind, BaseModel)  # each of whose fields is a parameter
        declared |= {k: v.annotation for k, v in kind.model_fields.items()} if is_model else {param.alias: kind}
    for name in request.query_params:
        field = name[:_MAX_NAME_LENGTH]  # unchecked text from outside: shortened, and quoted as data
        if name not in declared:
            remedy = f"use {', '.join(declared)}" if declared else "leave it out, this takes none"
            raise InvalidInput(f"There is no parameter {field!r}: {remedy}.", field=field)
        if get_origin(declared[name]) is not list and len(request.query_params.getlist(name)) > 1:
            raise InvalidInput(f"{field} is given more than once: give one value.", field=field)


def _secret(request: Request) -> str | None:
    header = request.headers.get("authorization")
    if header is None:
        return session_secret(request)
    scheme, _, rest = header.partition(" ")
    if scheme.lower() == "bearer" and rest.strip():
        return rest.strip()
    raise Unauthenticated("The Authorization header cannot be read: send `Authorization: Bearer TOKEN`.")


def _refuse_foreign(request: Request) -> None:
    """Without a token only local requests are served: no proxied request, and no page of another site."""
    headers = request.headers
    host = headers.get("host", "")
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    origin = headers.get("origin")
    foreign = (
        name not in _LOCAL_HOSTS
        or any(header in headers for header in _PROXY_HEADERS)
        or request.scope.get("http_version") == "1.0"  # nginx proxies with HTTP/1.0 and no header by default
        or headers.get("sec-fetch-site", "none") in ("cross-site", "same-site")
        or (origin is not None and origin.split("://", 1)[-1] != host)
    )
    if foreign:
        raise Unauthenticated("Without a token only this machine is served: create one with `tula token create`.")


AppServices = Annotated[Services, Depends(_services)]
"""The application's services, as an endpoint's parameter."""

Caller = Annotated[Principal, Depends(authenticate)]
"""Who is calling, as an endpoint's parameter; resolved once per request."""

Cursor = Annotated[
    str | None, Query(json_schema_extra={"pattern": r"^[0-9]{1,18}$"}, description="`next_cursor` of the page before.")
]
"""Where a page of a list begins, as an endpoint's parameter."""
