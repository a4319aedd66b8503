"""Serves the route `/v1/jobs/{job_id}/events`, a stream of server-sent events (WHATWG HTML, section 9.2).

A client can resume the stream with the header `Last-Event-ID`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated, Final

from anyio import move_on_after, to_thread
from fastapi import APIRouter, Depends, Header, Query
from fastapi.sse import EventSourceResponse, ServerSentEvent

from tula_service.api.auth import Caller
from tula_service.api.services import AppServices
from tula_service.errors import Busy, InvalidInput, NotFound, Unauthenticated
from tula_service.usecases import events
from tula_wire import routes

POLL_S: Final = 1.0
LONGEST_S: Final = 3600.0
_RETRY_MS: Final = 2000
_SHARES: Final = 4
"""One token may use at most 1/_SHARES of a worker's streams."""

router = APIRouter(tags=["events"])


async def _opened(
    job_id: str,
    caller: Caller,
    services: AppServices,
    last_event_id: Annotated[str | None, Header(description="Id of the event after which the stream resumes.")] = None,
    after: Annotated[
        int | None, Query(ge=0, le=2**53, description="Like Last-Event-ID, for clients that cannot set headers.")
    ] = None,
) -> AsyncIterator[int]:
    """Yield the id of the event after which the stream starts; count the stream as open until the response ends.

    Raises NotFound, InvalidInput or Busy.
    """
    start = await to_thread.run_sync(events.last_id, services.store, caller, job_id)
    if last_event_id is not None:
        if not last_event_id.isascii() or not last_event_id.isdigit() or len(last_event_id) > 18:
            raise InvalidInput("Last-Event-ID must be the id of an event: omit it to receive only new events.")
        start = int(last_event_id)
    elif after is not None:
        start = after
    sender, most = caller.sender, services.settings.max_streams
    own = services.streams.count(sender) >= max(1, most // _SHARES)
    if own or len(services.streams) >= most:
        text = "Too many event streams are open: close one, or try again later."
        raise Busy(text, retry_after_s=10.0, limited=own)
    services.streams.append(sender)
    try:
        yield start
    finally:
        services.streams.remove(sender)


@router.get(routes.JOB_EVENTS, response_class=EventSourceResponse)
async def stream_events(
    job_id: str,
    caller: Caller,
    services: AppServices,
    start: Annotated[int, Depends(_opened)],
    follow: Annotated[bool, Query(description="If false, the stream ends after the last stored event.")] = True,
) -> AsyncIterator[ServerSentEvent]:
    """Stream new events about state changes, samples, recommendations, thresholds, drift and advice.

    If `Last-Event-ID` (or `after`) is set, the stream starts after the event with this id, or with the first event
    if the id is 0. The `data` of each message is an `Event`.
    """
    # The stream ends when the token expires, the job is deleted or the service stops, and at the latest after an hour.
    yield ServerSentEvent(retry=_RETRY_MS)
    started = time.monotonic()
    while time.monotonic() - started < LONGEST_S and not services.stopping.is_set():
        try:
            read = await to_thread.run_sync(events.read_on, services.store, caller, job_id, start)
        except (Unauthenticated, NotFound):  # a client that reconnects receives this error
            return
        for event in read:
            start = event.id
            yield ServerSentEvent(data=event, event=event.kind, id=str(event.id))
        if not read:
            if not follow:
                return
            with move_on_after(POLL_S):
                await services.stopping.wait()
