"""Runs the application in this process behind an ordinary httpx client, without a socket and without patching."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import httpx
from fastapi import FastAPI

T = TypeVar("T")


class InProcess(httpx.BaseTransport):
    """A transport that runs an ASGI application on a separate event loop."""

    def __init__(self, app: FastAPI, *, client: tuple[str, int] = ("127.0.0.1", 1)) -> None:
        self._loop = asyncio.new_event_loop()
        self._transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=client)
        self._lifespan = app.router.lifespan_context(app)
        self._loop.run_until_complete(self._lifespan.__aenter__())

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request and return the complete response."""

        async def answer() -> httpx.Response:
            body = request.read()
            sent = httpx.Request(request.method, request.url, headers=request.headers, content=body)
            response = await self._transport.handle_async_request(sent)
            return httpx.Response(response.status_code, headers=response.headers, content=await response.aread())

        return self._loop.run_until_complete(answer())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the application's event loop until it ends; return its result."""
        return self._loop.run_until_complete(work)

    def shut_down(self) -> None:
        """End the application; closing a client does not end it, since several clients share it."""
        self._loop.run_until_complete(self._lifespan.__aexit__(None, None, None))
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
