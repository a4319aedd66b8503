"""Authenticates, limits and authorises callers: every request passes `admit`, and every guarded route `authorise`."""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple

from anyio import to_thread
from fastapi import Depends, Request
from starlette.routing import compile_path

from tula_service.api.services import AppServices, Services
from tula_service.errors import Forbidden, Unauthenticated
from tula_service.settings import Settings
from tula_service.store import Store
from tula_service.usecases.access import PUBLIC, Principal
from tula_wire import routes

COOKIE: Final = "tula_session"
PROBES: Final = frozenset({("GET", routes.HEALTH), ("GET", routes.READY)})
UNAUTHENTICATED_ROUTES: Final = PROBES | {
    ("GET", "/login"), ("POST", "/login"), ("POST", "/logout"), ("GET", "/static/{name}")
}  # fmt: skip
"""Probes, which reveal only yes or no, and the files and forms that a browser needs for the login."""
INGEST_ROUTES: Final = frozenset({("POST", routes.RUN_SAMPLES), ("POST", routes.RUN_TELEMETRY)})
AGENT_ROUTES: Final = INGEST_ROUTES | {
    ("GET", routes.RUN), ("PATCH", routes.RUN), ("GET", routes.RUN_PROGRESS), ("GET", routes.JOB_SCALING)
}  # fmt: skip
PUBLIC_ROUTES: Final = frozenset({("GET", "/accuracy"), ("GET", "/accuracy/charts/{name}")})
"""Routes of a read-only service that anyone may see."""
_ABOUT_TOKENS: Final = frozenset({routes.TOKENS, "/admin"})

_INGEST_PATTERNS: Final = [(method, compile_path(route)[0]) for method, route in INGEST_ROUTES]
_AGENT_PATTERNS: Final = [(method, compile_path(route)[0]) for method, route in AGENT_ROUTES]

_MAX_TOKEN_LENGTH: Final = 512
_SAFE: Final = frozenset({"GET", "HEAD"})
_PROXY_HEADERS: Final = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip")
_LOCAL_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})


def client_address(request: Request) -> str:
    """Return the address by which requests without a token are counted."""
    return f"address {request.client.host if request.client else 'unknown'}"


def is_ingest(method: str, path: str) -> bool:
    """Return True for samples and telemetry, whose bodies may be larger and whose requests may be more frequent."""
    return any(method == allowed and pattern.match(path) for allowed, pattern in _INGEST_PATTERNS)


def is_for_agents(method: str, path: str) -> bool:
    """Return True for requests from agents, for which capacity and threads are reserved."""
    return any(method == allowed and pattern.match(path) for allowed, pattern in _AGENT_PATTERNS)


def is_open(method: str, path: str) -> bool:
    """Return True for the routes that need no token (`UNAUTHENTICATED_ROUTES`)."""
    name = "/static/{name}" if path.startswith("/static/") else path
    return ("GET" if method == "HEAD" else method, name) in UNAUTHENTICATED_ROUTES


async def admit(request: Request) -> Principal:
    """Return the caller and count the request, before its body is read and before it takes up capacity or a thread.

    Accepts `Authorization: Bearer TOKEN` and a browser's session. Without a token, the caller is the user of this
    machine or, on the public routes of a read-only service, anyone. Raises Unauthenticated, and Busy beyond a limit.
    """
    services: Services = request.app.state.services
    try:
        principal = await _identify(request, services)
    except Unauthenticated:
        services.limits.count_failed_auth(client_address(request))
        raise
    request.scope["tula.principal"] = principal
    sender = client_address(request) if principal == PUBLIC else principal.sender
    services.limits.count_request(sender, ingest=is_ingest(request.method, request.scope["path"]))
    return principal


async def _identify(request: Request, services: Services) -> Principal:
    secret = _secret(request)
    is_public = _is_public(request, services.settings)
    if is_public and secret is None:
        return PUBLIC
    access = services.access
    principal = access.cached(secret)
    try:
        if principal is None and secret is not None:
            principal = await to_thread.run_sync(access.authenticate, secret, limiter=services.auth_threads)
        elif principal is None and access.tokenless_allowed:
            principal = await to_thread.run_sync(access.tokenless, limiter=services.auth_threads)
    except Unauthenticated:
        if is_public and "authorization" not in request.headers:  # the cookie belongs to a session that has ended
            return PUBLIC
        raise
    if principal is None:
        raise Unauthenticated(
            "A token is needed: set TULA_TOKEN, or send `Authorization: Bearer TOKEN` (see `tula token create`)."
        )
    if secret is None:
        _require_local_origin(request)
    return principal


async def authorise(request: Request) -> Principal:
    """Return the caller if they may call this route; all routes except the open ones depend on this function.

    Raises Forbidden.
    """
    principal: Principal = request.scope["tula.principal"]
    if principal.scope not in _required_scopes(request.method, getattr(request.scope.get("route"), "path", "")):
        raise Forbidden(f"A token of scope {principal.scope!r} may not do this: ask for one with a wider scope.")
    services: Services = request.app.state.services
    if services.settings.read_only and request.method not in _SAFE:
        raise Forbidden("This service only reads (--read-only): send changes to one that was started without it.")
    return principal


def _is_public(request: Request, settings: Settings) -> bool:
    path = request.scope["path"]
    return settings.read_only and request.method in _SAFE and (path == "/accuracy" or path.startswith("/accuracy/"))


def _required_scopes(method: str, route: str) -> frozenset[str]:
    """Return the scopes that may use the route: user, admin, and read for a GET, unless the route is listed above."""
    key = ("GET" if method == "HEAD" else method, route)
    scopes = {"user", "admin"}
    if key[0] == "GET" and route not in _ABOUT_TOKENS:
        scopes.add("read")
    if key in AGENT_ROUTES:
        scopes.add("agent")
    if key in PUBLIC_ROUTES:
        scopes.add(PUBLIC.scope)
    return frozenset(scopes)


def _secret(request: Request) -> str | None:
    header = request.headers.get("authorization")
    if header is None:
        return session_cookie(request) if is_same_origin(request) else None
    scheme, _, rest = header.partition(" ")
    if scheme.lower() == "bearer" and rest.strip():
        return rest.strip()
    raise Unauthenticated("The Authorization header cannot be read: send `Authorization: Bearer TOKEN`.")


def session_cookie(request: Request) -> str | None:
    """Return the session in a browser's cookie, or None if it contains no plausible session."""
    secret = request.cookies.get(COOKIE, "")
    return secret if is_plausible(secret) else None


def is_plausible(secret: str) -> bool:
    """Return True for text that may be a secret: printable and not too long."""
    return 0 < len(secret) <= _MAX_TOKEN_LENGTH and secret.isascii() and secret.isprintable()


def is_same_origin(request: Request, *, unknown: bool = False) -> bool:
    """Return True for a read or a write from a page of this service (CSRF); `unknown` if no header shows the origin."""
    if request.method in _SAFE:
        return True
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    origin = request.headers.get("origin", "")
    return origin.split("://", 1)[-1] == request.headers.get("host") if origin else unknown


def _require_local_origin(request: Request) -> None:
    """Refuse a request without a token unless it is local, without a proxy, and not from a page of another site."""
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


class User(NamedTuple):
    """The caller that `admit` has recognised, passed first to every use case: `jobs.get(*user, job_id)`."""

    store: Store
    principal: Principal


async def _user(request: Request, services: AppServices) -> User:
    """Return the caller; async, because FastAPI runs a plain function in a thread."""
    return User(store=services.store, principal=request.scope["tula.principal"])


Caller = Annotated[Principal, Depends(authorise)]
"""The calling principal, as an endpoint's parameter."""

CurrentUser = Annotated[User, Depends(_user)]
"""The user, as an endpoint's parameter."""
