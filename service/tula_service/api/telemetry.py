"""Serves `/v1/runs/{run_id}/telemetry`, which stores chunks of telemetry and returns downsampled columns."""

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
    """Store a chunk of telemetry and commit it before responding."""
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
        str | None,
        Query(
            pattern=r"^[a-z][a-z0-9_]{0,63}$", description="Metric to read; if omitted, only the names are returned."
        ),
    ] = None,
    rank: Annotated[int, Query(ge=0, le=2**20, description="Global rank of the process.")] = 0,
    max_points: Annotated[int, Query(ge=2, le=20_000, description="Maximum number of points to return.")] = 2000,
    first_step: Annotated[int | None, Query(ge=0, le=2**53, description="First step to read.")] = None,
    last_step: Annotated[int | None, Query(ge=0, le=2**53, description="Last step to read.")] = None,
) -> TelemetrySeries:
    """Return a column of one rank, downsampled to at most `max_points` points that include peaks and dips.

    If `column` is omitted, return no points; `available` always lists the names of the run's columns.
    """
    if column is None:
        available = list_columns(*user, run_id)
        nothing: dict[str, Any] = {"column": "", "steps": [], "values": [], "total_points": 0, "downsampled": False}
        return TelemetrySeries(run_id=run_id, rank=rank, available=available, **nothing)
    query = SeriesQuery(run_id, column, rank, max_points, first_step, last_step, trend_points=0)
    return read_with_trend(*user, query)[0]
