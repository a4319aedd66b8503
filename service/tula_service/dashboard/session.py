"""A browser's session: a random id in a cookie that no script can read, and errors as pages."""

from __future__ import annotations

import json
from typing import Any, Final
from urllib.parse import parse_qs, quote

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tula_service.dashboard.format import render
from tula_service.errors import Busy, Unauthenticated
from tula_service.usecases.access import SESSION_S, end_session, open_session

COOKIE: Final = "tula_session"
_SAFE: Final = frozenset({"GET", "HEAD"})
_MAX_TOKEN_LENGTH: Final = 512

router = APIRouter(include_in_schema=False)


@router.get("/login", response_class=HTMLResponse)
def get_login(next: str = "/") -> Response:
    """The form that asks for a token."""
    return HTMLResponse(render("login.html", next=_local_path(next), error=None))


@router.post("/login", response_class=HTMLResponse)
async def post_login(request: Request) -> Response:
    """Check the token and open a session. Reads the form by hand: it is one field of plain text."""
    form = parse_qs((await request.body())[:4096].decode("utf-8", "replace"))
    secret, target = form.get("token", [""])[0].strip(), _local_path(form.get("next", ["/"])[0])
    if not _is_same_origin("POST", request.headers, unknown=True):  # else a page could sign its reader in as another
        return HTMLResponse(render("login.html", next="/", error="Sign in on this page."), 401)
    try:
        session = await run_in_threadpool(_signed_in, request, secret)
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
    if (secret := _cookie(request.headers)) is not None:
        end_session(services.store, secret)
        services.access.forget()
    response = RedirectResponse("/login", 303)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return response


def _signed_in(request: Request, secret: str) -> str:
    """The secret of a new session of this token. Raises Unauthenticated, and Busy after too many wrong tokens."""
    services = request.app.state.services
    try:
        if not _plausible(secret):
            raise Unauthenticated("Paste the whole token, as `tula token create` printed it.")
        principal = services.access.authenticate(secret)
    except Unauthenticated:
        services.limiter.refuse_wrong(request.client.host if request.client else "unknown")
        raise
    if principal.scope == "agent":
        raise Unauthenticated("An agent's token opens no pages: use a read, user or admin token.")
    return open_session(services.store, principal)


class BrowserSession:
    """Pure ASGI inside `RequestMiddleware`; forwards requests with an Authorization header unchanged."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Turn the cookie into an Authorization header, and problem documents into pages where a person asked."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        names = {name for name, _ in scope["headers"]}
        if b"authorization" in names and b"sec-fetch-dest" not in names and scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)  # an agent or a client, not a browser
            return
        headers = Headers(scope=scope)
        secret = None if b"authorization" in names else _cookie(headers)
        if secret is not None and _is_same_origin(scope["method"], headers):
            # In place: `RequestMiddleware` reads what routes write into the scope.
            scope["headers"] = [*scope["headers"], (b"authorization", f"Bearer {secret}".encode("ascii"))]
        if headers.get("sec-fetch-dest") == "empty":
            await self._app(scope, receive, _WithoutChallenge(send))
        elif "text/html" in headers.get("accept", "") and not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, _ErrorPages(scope, send))
        else:
            await self._app(scope, receive, send)


class _WithoutChallenge:
    """A `send` that keeps a script's 401 from opening the browser's own password box."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            del MutableHeaders(scope=message)["www-authenticate"]
        await self._send(message)


class _ErrorPages:
    """A `send` that replaces problem documents: 401 by the login page, all others by a page that says the same."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._status = 0
        self._kept: bytearray | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = Headers(raw=message.get("headers", [])).get("content-type", "")
            if kind.startswith("application/problem+json"):
                self._status, self._kept = message["status"], bytearray()
                return
        elif self._kept is not None and message["type"] == "http.response.body":
            self._kept += message.get("body", b"")
            if not message.get("more_body", False):
                await self._replacement(bytes(self._kept))(self._scope, _disconnect, self._send)
            return
        await self._send(message)

    def _replacement(self, body: bytes) -> Response:
        if self._status == 401:
            query = self._scope.get("query_string", b"").decode("latin-1")
            path = self._scope["path"] + (f"?{query}" if query else "")
            return RedirectResponse(f"/login?next={quote(path, safe='')}", 303)
        problem: dict[str, Any] = json.loads(body)
        return HTMLResponse(render("error.html", problem=problem), self._status)


async def _disconnect() -> Message:
    return {"type": "http.disconnect"}


def _cookie(headers: Headers) -> str | None:
    secret = cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
    return secret if _plausible(secret) else None


def _plausible(secret: str) -> bool:
    return 0 < len(secret) <= _MAX_TOKEN_LENGTH and secret.isascii() and secret.isprintable()


def _is_same_origin(method: str, headers: Headers, *, unknown: bool = False) -> bool:
    """A cookie authorises a write only if a page of this service sends it (CSRF); `unknown`: if nothing says."""
    if method in _SAFE:
        return True
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    origin = headers.get("origin", "")
    return origin.split("://", 1)[-1] == headers.get("host") if origin else unknown


def _local_path(target: str) -> str:
    """Where to go after login: a path of this service, never another host."""
    fine = target.startswith("/") and not target.startswith(("//", "/\\")) and target.isprintable()
    return target if fine and "\\" not in target else "/"
