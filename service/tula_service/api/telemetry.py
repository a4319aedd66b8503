"""`/v1/runs/{run_id}/telemetry`: stores columnar chunks, and reads one column downsampled."""

from __future__ import annotations

from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Depends, Query

from tula_service.api.auth import Caller, CurrentUser
from tula_service.api.bodies import JsonRoute
from tula_service.api.queries import Lease, reject_unknown_query
from tula_service.api.services import AppServices
from tula_service.usecases.telemetry import SeriesQuery, list_columns, read_with_trend
from tula_wire import TelemetryAccepted, TelemetryChunk, TelemetrySeries, routes

router = APIRouter(route_class=JsonRoute, tags=["telemetry"])


@router.post(routes.RUN_TELEMETRY, status_code=202)
async def send_telemetry(
    run_id: str, chunk: TelemetryChunk, caller: Caller, services: AppServices, lease: Lease = None
) -> TelemetryAccepted:
    """Store a chunk, which is committed before the answer."""
    store, threads = services.telemetry.store, services.ingest_threads
    accepted = await to_thread.run_sync(store, caller, run_id, chunk, lease, limiter=threads)
    services.metrics.step_values.inc(accepted.stored)
    services.metrics.duplicates.inc(accepted.duplicate)
    return accepted


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
    """Return one column of one rank, downsampled to `max_points` such that every peak and dip is kept.

    Without `column`, there are no points, and `available` has the names of all columns of the run.
    """
    if column is None:
        available = list_columns(*user, run_id)
        nothing: dict[str, Any] = {"column": "", "steps": [], "values": [], "total_points": 0, "downsampled": False}
        return TelemetrySeries(run_id=run_id, rank=rank, available=available, **nothing)
    query = SeriesQuery(run_id, column, rank, max_points, first_step, last_step, trend_points=0)
    return read_with_trend(*user, query)[0]
