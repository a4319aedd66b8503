"""`GET /v1/jobs/{job_id}/events`: server-sent events (WHATWG HTML, section 9.2), resumed by `Last-Event-ID`."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Annotated, Final

from fastapi import APIRouter, Header, Query
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from tula_service.api.deps import AppServices, Caller
from tula_service.errors import Busy, InvalidInput, NotFound, Unauthenticated
from tula_service.store import Store
from tula_service.usecases import events
from tula_service.usecases.access import Principal
from tula_wire import routes

POLL_S: Final = 1.0
HEARTBEAT_S: Final = 15.0
LONGEST_S: Final = 3600.0
_RETRY_MS: Final = 2000
_SHARES: Final = 4
"""One token may open one in so many of the streams that a worker holds."""

router = APIRouter(tags=["events"])


@router.get(
    routes.JOB_EVENTS,
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def stream_events(
    job_id: str,
    caller: Caller,
    services: AppServices,
    last_event_id: Annotated[str | None, Header(description="Resume after this event.")] = None,
    after: Annotated[int | None, Query(ge=0, le=2**53, description="The same, where no header can be set.")] = None,
    follow: Annotated[bool, Query(description="False: end after the events until now.")] = True,
) -> StreamingResponse:
    """State changes, samples, recommendations, thresholds, drift and advice as they happen, from now on.

    With `Last-Event-ID` (or `after`) also the events since that one; 0 is from the beginning.
    """
    newest = await run_in_threadpool(events.last_id, services.store, caller, job_id)
    start = _start(last_event_id, after, newest)
    sender, most = caller.sender, services.settings.max_streams
    if len(services.streams) >= most or services.streams.count(sender) >= max(1, most // _SHARES):
        raise Busy("Too many event streams are open: close one or try again later.", retry_after_s=10.0)

    async def body() -> AsyncIterator[bytes]:
        services.streams.append(sender)
        try:
            async for piece in stream(services.store, caller, job_id, start, services.stopping, follow=follow):
                yield piece
        finally:
            services.streams.remove(sender)

    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(body(), media_type="text/event-stream", headers=headers)


async def stream(
    store: Store,
    caller: Principal,
    job_id: str,
    after: int,
    stopping: threading.Event,
    *,
    poll_s: float = POLL_S,
    follow: bool = True,
) -> AsyncIterator[bytes]:
    """The bytes of the stream; ends with the caller's token, the job, the service, and after an hour.

    Without `follow`, ends after the events until now.
    """
    yield f"retry: {_RETRY_MS}\n\n".encode()
    started = last_sent = time.monotonic()
    while time.monotonic() - started < LONGEST_S and not stopping.is_set():
        try:
            found = await run_in_threadpool(events.read_on, store, caller, job_id, after)
        except (Unauthenticated, NotFound):  # a reader that reconnects gets this error as its answer
            return
        for identity, kind, body in found:
            after = identity
            yield f"id: {identity}\nevent: {kind}\ndata: {body}\n\n".encode()
        if found:
            last_sent = time.monotonic()
            continue
        if not follow:
            return
        if time.monotonic() - last_sent >= HEARTBEAT_S:
            last_sent = time.monotonic()
            yield b": keep-alive\n\n"
        await asyncio.sleep(poll_s)


def _start(header: str | None, after: int | None, newest: int) -> int:
    if header is not None:
        if not header.isascii() or not header.isdigit() or len(header) > 18:
            raise InvalidInput("Last-Event-ID must be the id of an event: leave it out to start from now.")
        return int(header)
    return newest if after is None else after
