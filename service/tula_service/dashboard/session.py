"""Sign-in and sign-out, and errors as pages. A browser's session is a random id in a cookie that no script can read."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import parse_qs, quote

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, RedirectResponse
from starlette.types import Scope

from tula_service.api.auth import COOKIE, client_address, is_plausible, is_same_origin, session_cookie
from tula_service.api.services import Services
from tula_service.dashboard.format import render
from tula_service.errors import Busy, Unauthenticated
from tula_service.usecases.access import SESSION_S, end_session, open_session
from tula_wire import Problem

router = APIRouter(include_in_schema=False)


@router.get("/login", response_class=HTMLResponse)
async def get_login(next: str = "/") -> Response:
    """Show the form that asks for a token."""
    return HTMLResponse(render("login.html", next=_local_path(next), error=None))


@router.post("/login", response_class=HTMLResponse)
async def post_login(request: Request) -> Response:
    """Check the token and open a session. The form is read by hand, since it is one field of plain text."""
    form = parse_qs((await request.body())[:4096].decode("utf-8", "replace"))
    secret, target = form.get("token", [""])[0].strip(), _local_path(form.get("next", ["/"])[0])
    if not is_same_origin(request, unknown=True):  # else a page could sign its reader in as another
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
async def post_logout(request: Request) -> Response:
    """End the session, in the cookie and on the service."""
    services: Services = request.app.state.services
    if (secret := session_cookie(request)) is not None:
        await to_thread.run_sync(end_session, services.store, secret, limiter=services.auth_threads)
        services.access.forget(secret)
    response = RedirectResponse("/login", 303)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return response


async def _signed_in(request: Request, secret: str) -> str:
    """Return the secret of a new session for this token. Raises Unauthenticated, and Busy beyond a limit."""
    services: Services = request.app.state.services
    try:
        if not is_plausible(secret):
            raise Unauthenticated("Paste the whole token, as `tula token create` printed it.")
        principal = await to_thread.run_sync(services.access.authenticate, secret, limiter=services.auth_threads)
    except Unauthenticated:
        services.limits.count_failed_auth(client_address(request))
        raise
    if principal.scope == "agent":
        raise Unauthenticated("An agent's token opens no pages: use a read, user or admin token.")
    services.limits.count_request(principal.sender)
    return await to_thread.run_sync(open_session, services.store, principal, limiter=services.auth_threads)


def error_page(scope: Scope, problem: Problem, headers: Mapping[str, str]) -> Response | None:
    """Return a problem as a page for a browser, with the login form if the token is missing; None for a program."""
    sent = Headers(scope=scope)
    by_script = sent.get("sec-fetch-dest") == "empty" or scope["path"].startswith("/v1/")
    if by_script or "text/html" not in sent.get("accept", ""):
        return None
    if problem.status == 401:
        query = scope.get("query_string", b"").decode("latin-1")
        path = scope["path"] + (f"?{query}" if query else "")
        return RedirectResponse(f"/login?next={quote(path, safe='')}", 303)
    return HTMLResponse(render("error.html", problem=problem), problem.status, headers)


def _local_path(target: str) -> str:
    """Return the path to open after login, which is always a path of this service."""
    fine = target.startswith("/") and not target.startswith("//") and "\\" not in target and target.isprintable()
    return target if fine else "/"
