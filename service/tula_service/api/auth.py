"""Authenticates callers, limits their request rates, and authorises them.

`admit` runs for every request, and `authorise` for every route that requires authentication.
"""

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
"""The probes, which reveal only whether the service is up, and the files and forms that a browser needs to log in."""
INGEST_ROUTES: Final = frozenset({("POST", routes.RUN_SAMPLES), ("POST", routes.RUN_TELEMETRY)})
AGENT_ROUTES: Final = INGEST_ROUTES | {
    ("GET", routes.RUN), ("PATCH", routes.RUN), ("GET", routes.RUN_PROGRESS), ("GET", routes.JOB_SCALING)
}  # fmt: skip
PUBLIC_ROUTES: Final = frozenset({("GET", "/accuracy"), ("GET", "/accuracy/charts/{name}")})
"""Routes that anyone may read if the service is read-only."""
_ABOUT_TOKENS: Final = frozenset({routes.TOKENS, "/admin"})

_INGEST_PATTERNS: Final = [(method, compile_path(route)[0]) for method, route in INGEST_ROUTES]
_AGENT_PATTERNS: Final = [(method, compile_path(route)[0]) for method, route in AGENT_ROUTES]

_MAX_TOKEN_LENGTH: Final = 512
_SAFE: Final = frozenset({"GET", "HEAD"})
_PROXY_HEADERS: Final = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip")
_LOCAL_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})


def client_address(request: Request) -> str:
    """Return the client's address as a key for counting requests that have no token."""
    return f"address {request.client.host if request.client else 'unknown'}"


def is_ingest(method: str, path: str) -> bool:
    """Return True if the request sends samples or telemetry; such requests have higher limits on body size and rate."""
    return any(method == allowed and pattern.match(path) for allowed, pattern in _INGEST_PATTERNS)


def is_for_agents(method: str, path: str) -> bool:
    """Return True if agents send requests of this kind; capacity and threads are reserved for these requests."""
    return any(method == allowed and pattern.match(path) for allowed, pattern in _AGENT_PATTERNS)


def is_open(method: str, path: str) -> bool:
    """Return True for routes that require no token (`UNAUTHENTICATED_ROUTES`)."""
    name = "/static/{name}" if path.startswith("/static/") else path
    return ("GET" if method == "HEAD" else method, name) in UNAUTHENTICATED_ROUTES


async def admit(request: Request) -> Principal:
    """Identify the caller, count the request against the caller's limits, and return the caller.

    Call this function before the request's body is read. A caller sends `Authorization: Bearer TOKEN` or the cookie of
    a browser session. A caller that sends neither must be the local user, or use a public route of a read-only service.
    Raises Unauthenticated, or Busy if a limit is exceeded.
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
        if is_public and "authorization" not in request.headers:  # the cookie's session has ended
            return PUBLIC
        raise
    if principal is None:
        raise Unauthenticated(
            "This request requires a token: set TULA_TOKEN, or send `Authorization: Bearer TOKEN`. To get a token, run "
            "`tula token create`."
        )
    if secret is None:
        _require_local_origin(request)
    return principal


async def authorise(request: Request) -> Principal:
    """Return the caller if it is allowed to use this route, otherwise raise Forbidden.

    All routes outside `UNAUTHENTICATED_ROUTES` depend on this function.
    """
    principal: Principal = request.scope["tula.principal"]
    if principal.scope not in _required_scopes(request.method, getattr(request.scope.get("route"), "path", "")):
        raise Forbidden(
            f"A token with scope {principal.scope!r} does not allow this request: use a token with a wider scope."
        )
    services: Services = request.app.state.services
    if services.settings.read_only and request.method not in _SAFE:
        raise Forbidden("This service is read-only: send changes to a service that runs without --read-only.")
    return principal


def _is_public(request: Request, settings: Settings) -> bool:
    path = request.scope["path"]
    return settings.read_only and request.method in _SAFE and (path == "/accuracy" or path.startswith("/accuracy/"))


def _required_scopes(method: str, route: str) -> frozenset[str]:
    """Return the token scopes that may use the route.

    User and admin tokens may use every route, and read tokens may use every GET route; the constants above list the
    exceptions.
    """
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
    raise Unauthenticated("The Authorization header is malformed: send `Authorization: Bearer TOKEN`.")


def session_cookie(request: Request) -> str | None:
    """Return the secret in the browser's session cookie, or None if the cookie has no plausible secret."""
    secret = request.cookies.get(COOKIE, "")
    return secret if is_plausible(secret) else None


def is_plausible(secret: str) -> bool:
    """Return True if the text could be a secret: it is not empty, not too long, and printable ASCII."""
    return 0 < len(secret) <= _MAX_TOKEN_LENGTH and secret.isascii() and secret.isprintable()


def is_same_origin(request: Request, *, unknown: bool = False) -> bool:
    """Return True if the request only reads, or if a page of this service sent it (protection against CSRF).

    If the request writes and no header states its origin, return `unknown`.
    """
    if request.method in _SAFE:
        return True
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    origin = request.headers.get("origin", "")
    return origin.split("://", 1)[-1] == request.headers.get("host") if origin else unknown


def _require_local_origin(request: Request) -> None:
    """Raise Unauthenticated if the request is not local, came through a proxy, or is from another site's page.

    Only requests without a token need this check.
    """
    headers = request.headers
    host = headers.get("host", "")
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    origin = headers.get("origin")
    foreign = (
        name not in _LOCAL_HOSTS
        or any(header in headers for header in _PROXY_HEADERS)
        or request.scope.get("http_version") == "1.0"  # as sent by nginx, which adds no proxy header by default
        or headers.get("sec-fetch-site", "none") in ("cross-site", "same-site")
        or (origin is not None and origin.split("://", 1)[-1] != host)
    )
    if foreign:
        raise Unauthenticated(
            "Requests without a token must come from this machine: create a token with `tula token create`."
        )


class User(NamedTuple):
    """The first two arguments of every use case, as in `jobs.get(*user, job_id)`: the store and the caller."""

    store: Store
    principal: Principal


async def _user(request: Request, services: AppServices) -> User:
    """Return the store and the caller. The function is async because FastAPI runs plain functions in a thread."""
    return User(store=services.store, principal=request.scope["tula.principal"])


Caller = Annotated[Principal, Depends(authorise)]
"""The type of an endpoint's parameter that receives the calling principal."""

CurrentUser = Annotated[User, Depends(_user)]
"""The type of an endpoint's parameter that receives the store and the caller."""
