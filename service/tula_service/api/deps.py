"""What endpoints ask for: the services of this application, and who is calling."""

from __future__ import annotations

import base64
import binascii
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, Final

from anyio import CapacityLimiter, to_thread
from fastapi import Depends, Request

from tula_service.api.metric_set import Metrics
from tula_service.api.security.limiter import Limiter
from tula_service.api.security.scopes import is_ingest, required_scopes
from tula_service.errors import Busy, Forbidden, InvalidInput, Unauthenticated
from tula_service.settings import Settings
from tula_service.store import Store
from tula_service.usecases.access import Access, Principal
from tula_service.usecases.ingest import Ingest

__all__ = ["Caller", "Current", "Services", "authenticate", "error_answers", "known_query", "services"]

_SAFE: Final = frozenset({"GET", "HEAD"})
_OF_PROXIES: Final = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip")
_LONGEST_NAME: Final = 64
_LOCAL_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})


@dataclass(frozen=True)
class Services:
    """Everything that a request may need, built once in `create_app`.

    `intake` are the threads kept for what agents send.
    """

    settings: Settings
    store: Store
    access: Access
    limiter: Limiter
    metrics: Metrics
    ingest: Ingest
    intake: CapacityLimiter


async def services(request: Request) -> Services:
    """The application's services; async, since a plain function would cost a hop to a thread."""
    found: Services = request.app.state.services
    return found


async def authenticate(request: Request) -> Principal:
    """Who is calling; every route but the probes stands behind this.

    Takes `Authorization: Bearer TOKEN`, and for reading also `Basic` with the token as password, which is what a
    browser or a scraper sends. Raises Unauthenticated, Forbidden, or Busy.
    """
    have: Services = request.app.state.services
    route = getattr(request.scope.get("route"), "path", "")
    ingest = is_ingest(request.method, route)
    threads = have.intake if ingest else None
    secret = _secret(request)
    if secret is None:
        principal = have.access.tokenless_now()
        if principal is None:
            principal = await to_thread.run_sync(have.access.tokenless, limiter=threads)
        if principal is None:
            raise Unauthenticated("A token is needed: send `Authorization: Bearer TOKEN` (see `tula token create`).")
        _refuse_strangers(request)
    else:
        principal = have.access.cached(secret)
        if principal is None:
            address = request.client.host if request.client else "unknown"
            # Of a token that was right when it was last asked for nothing is guessed.
            with nullcontext() if have.access.has_validated(secret) else have.limiter.guess(address):
                principal = await to_thread.run_sync(have.access.authenticate, secret, limiter=threads)
    request.scope["tula.principal"] = principal
    if principal.scope not in required_scopes(request.method, route):
        raise Forbidden(f"A token of scope {principal.scope!r} may not do this: ask for one with a wider scope.")
    try:
        have.limiter.admit(principal, ingest=ingest)
    except Busy:
        have.metrics.limited.inc()
        raise
    return principal


async def known_query(request: Request) -> None:
    """Refuse a query parameter that the route does not have, as a body's unknown field is: it may be a misspelling."""
    dependant = request.scope["route"].dependant
    known = [param.alias for param in dependant.query_params]
    for name in request.query_params:
        if name not in known:
            # The name is a stranger's text: it is shortened, and repeated as data.
            raise InvalidInput(
                f"There is no parameter {name[:_LONGEST_NAME]!r}: use {', '.join(known)}.", field=name[:_LONGEST_NAME]
            )


def _secret(request: Request) -> str | None:
    header = request.headers.get("authorization")
    if header is None:
        return None
    scheme, _, rest = header.partition(" ")
    if scheme.lower() == "bearer" and rest.strip():
        return rest.strip()
    if scheme.lower() == "basic" and request.method in _SAFE:
        try:
            decoded = base64.b64decode(rest.strip(), validate=True).decode("utf-8")
        except (binascii.Error, UnicodeDecodeError):
            decoded = ""
        _, _, password = decoded.partition(":")
        if password:
            return password
    raise Unauthenticated("The Authorization header cannot be read: send `Authorization: Bearer TOKEN`.")


def _refuse_strangers(request: Request) -> None:
    """Without a token only this machine's own user may pass: no proxied request, no page of another site."""
    headers = request.headers
    host = headers.get("host", "")
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    origin = headers.get("origin")
    foreign = (
        name not in _LOCAL_HOSTS
        or any(header in headers for header in _OF_PROXIES)
        or request.scope.get("http_version") == "1.0"  # a proxy that adds no header: nginx, unless told otherwise
        or headers.get("sec-fetch-site", "none") in ("cross-site", "same-site")
        or (origin is not None and origin.split("://", 1)[-1] != host)
    )
    if foreign:
        raise Unauthenticated("Without a token only this machine is served: create one with `tula token create`.")


Current = Annotated[Services, Depends(services)]
"""The application's services, as an endpoint's parameter."""

Caller = Annotated[Principal, Depends(authenticate)]
"""Who is calling, as an endpoint's parameter; resolved once a request."""


def error_answers() -> dict[int | str, dict[str, Any]]:
    """The error answers of every route, for the OpenAPI document."""
    content = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {
        "4XX": {"description": "A problem document that says what to do.", "content": content},
        "5XX": {"description": "A problem document; nothing was stored.", "content": content},
    }
