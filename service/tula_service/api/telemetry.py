"""`/v1/runs/{run_id}/telemetry`: stores columnar chunks, and reads one column downsampled."""

from __future__ import annotations

from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Depends, Query, Request, Response

from tula_service.api.bodies import MSGPACK, Body, parse, read_body, request_body, unpack
from tula_service.api.deps import AppServices, Caller, reject_unknown_query
from tula_service.dashboard.session import CurrentUser
from tula_service.domain import NewChunk
from tula_service.usecases.telemetry import SeriesQuery, chunk_from_packed, chunk_from_wire, columns_of, read_with_trend
from tula_wire import TelemetryAccepted, TelemetryChunk, TelemetrySeries, routes

router = APIRouter(tags=["telemetry"])

_SMALL_BYTES = 128 * 1024
"""Uncompressed packed bodies up to this size are read on the event loop: that is faster than waking a thread."""


@router.post(
    routes.RUN_TELEMETRY,
    status_code=202,
    response_model=TelemetryAccepted,
    openapi_extra=request_body(TelemetryChunk),
)
async def send_telemetry(run_id: str, request: Request, caller: Caller, services: AppServices) -> Response:
    """Store a chunk; committed before the answer.

    As JSON, or MessagePack (`application/msgpack`) of the same members, where `steps` and columns are packed arrays.
    """
    body = await read_body(request)
    if body.content_type == MSGPACK and body.encoding == "identity" and len(body.sent) <= _SMALL_BYTES:
        chunk = _chunk(body)
    else:
        chunk = await to_thread.run_sync(_chunk, body, limiter=services.intake)
    accepted = await services.telemetry.store(caller, run_id, chunk)
    services.metrics.step_values.inc(accepted.stored)
    if accepted.duplicate:
        services.metrics.duplicates.inc()
    return Response(accepted.model_dump_json(), 202, media_type="application/json")


def _chunk(body: Body) -> NewChunk:
    if body.content_type == MSGPACK:
        return chunk_from_packed(unpack(body))
    return chunk_from_wire(parse(TelemetryChunk, body))


@router.get(routes.RUN_TELEMETRY, dependencies=[Depends(reject_unknown_query)])
def get_telemetry(
    run_id: str,
    user: CurrentUser,
    column: Annotated[
        str | None, Query(pattern=r"^[a-z][a-z0-9_]{0,63}$", description="Name of the metric; without, only names.")
    ] = None,
    rank: Annotated[int, Query(ge=0, le=2**20, description="Global rank.")] = 0,
    max_points: Annotated[int, Query(ge=2, le=20_000, description="Most points of the answer.")] = 2000,
    first_step: Annotated[int | None, Query(ge=0, le=2**53, description="First step to read.")] = None,
    last_step: Annotated[int | None, Query(ge=0, le=2**53, description="Last step to read.")] = None,
) -> TelemetrySeries:
    """One column of one rank, downsampled to `max_points` so that every peak and dip stays.

    Without `column`, no points, and in `available` the names of all columns of the run.
    """
    if column is None:
        available = columns_of(*user, run_id)
        nothing: dict[str, Any] = {"column": "", "steps": [], "values": [], "total_points": 0, "downsampled": False}
        return TelemetrySeries(run_id=run_id, rank=rank, available=available, **nothing)
    query = SeriesQuery(run_id, column, rank, max_points, first_step, last_step, trend_points=0)
    return read_with_trend(*user, query)[0]
