"""The short way of what agents send without pause: past all that is asked anew of every request, and known of this one.

Between the middleware and an endpoint FastAPI tries routes, opens a stack for each kind of thing that could have to be
closed, and resolves the declared parameters: two fifths of the work of a telemetry request. The endpoint stays declared
as any other, and works the same without this; only the walk to it is written out here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from fastapi import Request, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tula_service.api.bodies import Body, raw_body
from tula_service.api.deps import Services, authenticate
from tula_service.api.problems import answer_to
from tula_service.usecases.access import Principal

__all__ = ["DirectEndpoint", "ShortWay"]

DirectEndpoint: TypeAlias = Callable[[str, Body, Principal, Services], Awaitable[Response]]
"""A coroutine of run id, body, caller and services."""


class ShortWay:
    """Pure ASGI, inside of all other middleware: answers POST on one path itself, and passes everything else on."""

    def __init__(self, app: ASGIApp, *, path: str, endpoint: DirectEndpoint) -> None:
        self._app = app
        self._route = Route(path, endpoint, methods=["POST"])
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Authenticate, read the body, answer; what goes wrong is told as on the long way."""
        match, found = self._route.matches(scope)
        if match is not Match.FULL:
            await self._app(scope, receive, send)
            return
        scope.update(found, route=self._route)
        request = Request(scope, receive)
        try:
            response = await self._answer(request)
        except Exception as error:
            told = answer_to(request, error)
            if told is None:
                raise
            response = told
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        caller = await authenticate(request)
        body = await raw_body(request)
        return await self._endpoint(request.path_params["run_id"], body, caller, request.app.state.services)
