"""`GET /v1/jobs/{job_id}/events`: server-sent events (WHATWG HTML, section 9.2), resumed by `Last-Event-ID`."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from typing import Annotated, Final

from fastapi import APIRouter, Header, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from tula_service.api.deps import Caller, Current
from tula_service.errors import Busy, InvalidInput, NotFound, Unauthenticated
from tula_service.store import Store
from tula_service.usecases import events
from tula_service.usecases.access import Principal
from tula_wire import routes

__all__ = ["router", "stream"]

POLL_S: Final = 1.0
HEARTBEAT_S: Final = 15.0
LONGEST_S: Final = 3600.0
_RETRY_MS: Final = 2000

router = APIRouter(tags=["events"])


@router.get(
    routes.JOB_EVENTS,
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def get_events(
    job_id: str,
    request: Request,
    caller: Caller,
    have: Current,
    last_event_id: Annotated[str | None, Header(description="Go on after this event.")] = None,
    after: Annotated[int | None, Query(ge=0, le=2**53, description="The same, where no header can be set.")] = None,
) -> StreamingResponse:
    """State changes, samples, recommendations, thresholds, drift and advice as they happen; all from now on.

    With `Last-Event-ID` (or `after`) also what happened since; 0 is from the beginning.
    """
    if not hasattr(request.app.state, "streams"):
        request.app.state.streams = set()
    open_streams: set[object] = request.app.state.streams
    newest = await run_in_threadpool(events.last_id, have.store, caller, job_id)
    start = _start(last_event_id, after, newest)
    if len(open_streams) >= have.settings.most_streams:
        raise Busy("Too many event streams are open: close one or try again later.", retry_after_s=10.0)

    async def body() -> AsyncIterator[bytes]:
        ticket = object()
        open_streams.add(ticket)
        try:
            async for piece in stream(have.store, caller, job_id, start):
                yield piece
        finally:
            open_streams.discard(ticket)

    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(body(), media_type="text/event-stream", headers=headers)


async def stream(
    store: Store,
    caller: Principal,
    job_id: str,
    after: int,
    *,
    poll_s: float = POLL_S,
    longest_s: float = LONGEST_S,
) -> AsyncIterator[bytes]:
    """The bytes of the stream; ends with the caller's token and with the job, and by itself after `longest_s`."""
    yield f"retry: {_RETRY_MS}\n\n".encode()
    started = spoken = time.monotonic()
    while time.monotonic() - started < longest_s and not _is_stopping():
        try:
            found = await run_in_threadpool(events.read_on, store, caller, job_id, after)
        except (Unauthenticated, NotFound):  # whoever reconnects is told so
            return
        for identity, kind, body in found:
            after = identity
            yield f"id: {identity}\nevent: {kind}\ndata: {body}\n\n".encode()
        if found:
            spoken = time.monotonic()
            continue
        if time.monotonic() - spoken >= HEARTBEAT_S:
            spoken = time.monotonic()
            yield b": still here\n\n"
        await asyncio.sleep(poll_s)


def _is_stopping() -> bool:
    """True once uvicorn was told to stop: it would wait for open streams, and nothing else tells them."""
    handler = signal.getsignal(signal.SIGTERM)
    return bool(getattr(getattr(handler, "__self__", None), "should_exit", False))


def _start(header: str | None, after: int | None, newest: int) -> int:
    if header is not None:
        if not header.isascii() or not header.isdigit() or len(header) > 18:
            raise InvalidInput("Last-Event-ID must be the id of an event: leave it out to start from now.")
        return int(header)
    return newest if after is None else after
