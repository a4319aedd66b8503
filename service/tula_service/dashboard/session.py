"""Handles login and logout, and renders errors as pages. A session has a random id, stored in an HttpOnly cookie."""

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
    """Return the login page with the form for a token."""
    return HTMLResponse(render("login.html", next=_local_path(next), error=None))


@router.post("/login", response_class=HTMLResponse)
async def post_login(request: Request) -> Response:
    """Check the token and open a session. The form has only two fields, so it is parsed here without a library."""
    form = parse_qs((await request.body())[:4096].decode("utf-8", "replace"))
    secret, target = form.get("token", [""])[0].strip(), _local_path(form.get("next", ["/"])[0])
    if not is_same_origin(
        request, unknown=True
    ):  # otherwise, another site could sign in its visitors with its own token
        return HTMLResponse(
            render("login.html", next="/", error="The request came from another site: sign in on this page."), 401
        )
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
    """End the session on the service, and delete its cookie."""
    services: Services = request.app.state.services
    if (secret := session_cookie(request)) is not None:
        await to_thread.run_sync(end_session, services.store, secret, limiter=services.auth_threads)
        services.access.forget(secret)
    response = RedirectResponse("/login", 303)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return response


async def _signed_in(request: Request, secret: str) -> str:
    """Return the secret of a new session for this token. Raises Unauthenticated, or Busy if a limit is exceeded."""
    services: Services = request.app.state.services
    try:
        if not is_plausible(secret):
            raise Unauthenticated("This is not a token: paste the whole token that `tula token create` printed.")
        principal = await to_thread.run_sync(services.access.authenticate, secret, limiter=services.auth_threads)
    except Unauthenticated:
        services.limits.count_failed_auth(client_address(request))
        raise
    if principal.scope == "agent":
        raise Unauthenticated("An agent token cannot sign in: use a read, user or admin token.")
    services.limits.count_request(principal.sender)
    return await to_thread.run_sync(open_session, services.store, principal, limiter=services.auth_threads)


def error_page(scope: Scope, problem: Problem, headers: Mapping[str, str]) -> Response | None:
    """Return a problem as a web page, or None if the client is not a browser.

    If the problem is a missing or invalid token, redirect to the login page.
    """
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
    """Return `target` if it is a path on this service, else "/", so that a login never redirects to another site."""
    fine = target.startswith("/") and not target.startswith("//") and "\\" not in target and target.isprintable()
    return target if fine else "/"
