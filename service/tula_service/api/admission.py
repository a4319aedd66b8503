"""Admits requests: the sender is known before a body is read, and a request takes room once its body has arrived."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import nullcontext
from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tula_service.api.bodies import ORDINARY_BYTES, check_ordinary, too_large
from tula_service.api.deps import OPEN, Services, identify, is_ingest, is_of_agents
from tula_service.api.errors import problem_of
from tula_service.errors import Busy, ServiceError, Unauthenticated

_WITH_BODY: Final = frozenset({"POST", "PATCH", "PUT"})
_OPEN_FORMS: Final = frozenset({"/login", "/logout"})
"""Paths of forms that are read without authentication."""
BODY_TIMEOUT_S: Final = 20.0
"""Longest time that a client may take to send a body."""
ARRIVING_BYTES: Final = 64 * 2**20
"""Most bytes of one sender's incomplete bodies: eight of the largest chunks, or one small one of each of 200 agents."""
LIMITED_S: Final = 1.0
"""How long the answer 429 waits: a sender that asks again at once would take the event loop with refusals."""


class Admission:
    """Pure ASGI inside `RequestMiddleware`.

    A body on its way takes no room of others: it holds memory, which counts against its sender alone. After
    that, requests of agents and all others are counted separately. A sender beyond its limits waits for that answer,
    and takes no room meanwhile.
    """

    def __init__(self, app: ASGIApp, *, services: Services) -> None:
        self._app = app
        self._services = services
        self._agents = asyncio.Semaphore(services.settings.max_in_flight)
        self._others = asyncio.Semaphore(services.settings.max_ordinary_in_flight)
        self._arriving: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request with its whole body, or answer why not."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limited: list[Message] = []

        async def send_unless_limited(message: Message) -> None:
            if limited or message.get("status") == 429:
                limited.append(message)
            else:
                await send(message)

        await self._answer(scope, receive, send_unless_limited)
        if limited:
            await asyncio.sleep(LIMITED_S)
        for message in limited:
            await send(message)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        metrics = self._services.metrics
        try:
            if scope["method"] in _WITH_BODY:
                receive = await self._arrived(scope, receive)
        except (HTTPException, ServiceError) as refusal:
            response = problem_of(scope, refusal)
            if not isinstance(refusal, Unauthenticated):  # which a client that is still sending has to read
                response.headers["Connection"] = "close"
            await response(scope, receive, send)
            return
        room = self._agents if is_of_agents(scope["method"], scope["path"]) else self._others
        is_probe = (scope["method"], scope["path"]) in OPEN
        if room.locked() and not is_probe:
            metrics.refused.inc()
            await problem_of(scope, _busy("The service is at its limit of requests"))(scope, receive, send)
            return
        async with nullcontext() if is_probe else room:
            with metrics.in_flight.track_inprogress():
                await self._app(scope, receive, send)

    async def _arrived(self, scope: Scope, receive: Receive) -> Receive:
        """A `receive` of the whole body. Raises HTTPException 408, TooLarge, Busy, and what `identify` raises."""
        if scope["path"] in _OPEN_FORMS:  # counted against the address
            sender = f"address {scope['client'][0]}" if scope.get("client") else "address"
        else:
            sender = (await identify(Request(scope))).sender
        limit, ordinary = self._services.settings.max_body_bytes, not is_ingest(scope["method"], scope["path"])
        if ordinary:
            limit = min(limit, ORDINARY_BYTES)
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise too_large(limit, "as sent")
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await self._read(receive, sender, limit)
        except TimeoutError:
            raise HTTPException(408) from None
        if ordinary:
            check_ordinary(body)
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def whole() -> Message:
            return messages.pop() if messages else await receive()

        return whole

    async def _read(self, receive: Receive, sender: str, limit: int) -> bytes:
        """The body; an incomplete one counts at least as a share of `ARRIVING_BYTES`, which bounds their number too."""
        body = bytearray()
        counted, least = 0, ARRIVING_BYTES // self._services.settings.max_in_flight
        try:
            while True:
                more = max(least, len(body)) - counted
                counted += more
                self._arriving[sender] += more
                if len(body) > limit:
                    raise too_large(limit, "as sent")
                if self._arriving[sender] > ARRIVING_BYTES:
                    raise _busy("Too many bodies of this sender are on their way", limited=True)
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise HTTPException(408)
                body += message.get("body", b"")
                if not message.get("more_body", False) and len(body) <= limit:
                    return bytes(body)
        finally:
            self._arriving[sender] -= counted
            if not self._arriving[sender]:
                del self._arriving[sender]


def _busy(what: str, *, limited: bool = False) -> Busy:
    return Busy(f"{what}: send this one again after Retry-After seconds.", retry_after_s=1.0, limited=limited)
