"""Who uses a page, a browser's session (a random id in a cookie that no script can read), and errors as pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, NamedTuple
from urllib.parse import parse_qs, quote

from fastapi import APIRouter, Depends, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, RedirectResponse
from starlette.types import Scope

from tula_service.dashboard.format import render
from tula_service.errors import Busy, Unauthenticated
from tula_service.store import Store
from tula_service.usecases.access import SESSION_S, Principal, end_session, open_session
from tula_wire import Problem

COOKIE: Final = "tula_session"
_SAFE: Final = frozenset({"GET", "HEAD"})
_MAX_TOKEN_LENGTH: Final = 512

router = APIRouter(include_in_schema=False)


class User(NamedTuple):
    """Whom `api.deps.authenticate` has found; what every use case takes first: `jobs.get(*user, job_id)`."""

    store: Store
    principal: Principal


async def _user(request: Request) -> User:
    """Async, because FastAPI runs a plain function in a thread."""
    return User(store=request.app.state.services.store, principal=request.scope["tula.principal"])


CurrentUser = Annotated[User, Depends(_user)]
"""The user, as an endpoint's parameter."""


@router.get("/login", response_class=HTMLResponse)
def get_login(next: str = "/") -> Response:
    """The form that asks for a token."""
    return HTMLResponse(render("login.html", next=_local_path(next), error=None))


@router.post("/login", response_class=HTMLResponse)
async def post_login(request: Request) -> Response:
    """Check the token and open a session. Reads the form by hand: it is one field of plain text."""
    form = parse_qs((await request.body())[:4096].decode("utf-8", "replace"))
    secret, target = form.get("token", [""])[0].strip(), _local_path(form.get("next", ["/"])[0])
    if not _is_same_origin(request, unknown=True):  # else a page could sign its reader in as another
        return HTMLResponse(render("login.html", next="/", error="Sign in on this page."), 401)
    try:
        session = await _signed_in(request, secret)
    except (Busy, Unauthenticated) as error:
        page = render("login.html", next=target, error=error.message)
        return HTMLResponse(page, 429 if isinstance(error, Busy) else 401)
    response = RedirectResponse(target, 303)
    secure = request.url.scheme == "https" or request.headers.get("x-forwarded-proto") == "https"
    response.set_cookie(COOKIE, session, max_age=int(SESSION_S), httponly=True, samesite="strict", secure=secure)
    return response


@router.post("/logout")
def post_logout(request: Request) -> Response:
    """End the session, in the cookie and on the service."""
    services = request.app.state.services
    if (secret := _cookie(request)) is not None:
        end_session(services.store, secret)
        services.access.forget()
    response = RedirectResponse("/login", 303)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return response


async def _signed_in(request: Request, secret: str) -> str:
    """The secret of a new session of this token. Raises Unauthenticated, and Busy after too many wrong tokens."""
    services = request.app.state.services
    try:
        if not _plausible(secret):
            raise Unauthenticated("Paste the whole token, as `tula token create` printed it.")
        principal = await run_in_threadpool(services.access.authenticate, secret)
    except Unauthenticated:
        services.limiter.refuse_wrong(request)
        raise
    if principal.scope == "agent":
        raise Unauthenticated("An agent's token opens no pages: use a read, user or admin token.")
    return await run_in_threadpool(open_session, services.store, principal)


def session_secret(request: Request) -> str | None:
    """The session in a browser's cookie; it authorises a write only if a page of this service sends it (CSRF)."""
    return _cookie(request) if _is_same_origin(request) else None


def error_page(scope: Scope, problem: Problem, headers: Mapping[str, str]) -> Response | None:
    """A problem as a page, and a missing token as the login form, for a person who navigates; None for a program."""
    sent = Headers(scope=scope)
    by_script = sent.get("sec-fetch-dest") == "empty" or scope["path"].startswith("/v1/")
    if by_script or "text/html" not in sent.get("accept", ""):
        return None
    if problem.status == 401:
        query = scope.get("query_string", b"").decode("latin-1")
        path = scope["path"] + (f"?{query}" if query else "")
        return RedirectResponse(f"/login?next={quote(path, safe='')}", 303)
    return HTMLResponse(render("error.html", problem=problem), problem.status, headers)


def _cookie(request: Request) -> str | None:
    secret = request.cookies.get(COOKIE, "")
    return secret if _plausible(secret) else None


def _plausible(secret: str) -> bool:
    return 0 < len(secret) <= _MAX_TOKEN_LENGTH and secret.isascii() and secret.isprintable()


def _is_same_origin(request: Request, *, unknown: bool = False) -> bool:
    """True for reading, and for a write that a page of this service sends; `unknown`: if nothing says."""
    if request.method in _SAFE:
        return True
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    origin = request.headers.get("origin", "")
    return origin.split("://", 1)[-1] == request.headers.get("host") if origin else unknown


def _local_path(target: str) -> str:
    """Where to go after login: a path of this service, never another host."""
    fine = target.startswith("/") and not target.startswith("//") and "\\" not in target and target.isprintable()
    return target if fine else "/"
