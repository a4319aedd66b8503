"""Reads JSON request bodies of limited size, and validates them with pydantic-core in a thread."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final

from anyio import to_thread
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from tula_service.api.auth import authorise, is_for_agents
from tula_service.api.services import Services
from tula_service.errors import UnsupportedMedia

JSON: Final = "application/json"
ORDINARY_BYTES: Final = 256 * 1024
"""Largest body of a request other than samples and telemetry; typical bodies have a few hundred bytes."""


class JsonRoute(APIRoute):
    """A route that parses request bodies in a thread; FastAPI itself would parse them on the event loop."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler, which receives the parsed model instead of JSON."""
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler
        model: Any = self.body_field.field_info.annotation

        async def parsed(request: Request) -> Response:
            await authorise(request)
            return await handler(_Parsed(request, await _read(request, model)))

        return parsed


class _Parsed(Request):
    """A request whose `json()` method returns the parsed model, which FastAPI's own validation leaves unchanged."""

    def __init__(self, request: Request, model: BaseModel) -> None:
        super().__init__(request.scope, request.receive)
        self._body, self._json = b"{}", model


async def _read(request: Request, model: type[BaseModel]) -> BaseModel:
    """Return the body parsed as `model`. Raises pydantic.ValidationError or UnsupportedMedia."""
    kind = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if (kind, encoding) != (JSON, "identity"):
        raise UnsupportedMedia(f"The body is {kind!r} with encoding {encoding!r}: send uncompressed {JSON}.")
    services: Services = request.app.state.services
    threads = services.ingest_threads if is_for_agents(request.method, request.scope["path"]) else None
    return await to_thread.run_sync(model.model_validate_json, await request.body(), limiter=threads)
