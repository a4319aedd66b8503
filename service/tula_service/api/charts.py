"""`GET .../charts/{name}`: charts as Vega-Lite, or drawn as PNG or SVG."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Response

from tula_service.api.deps import AppServices, Caller
from tula_service.dashboard import charts
from tula_service.dashboard.chart_data import quality_runs, series_of
from tula_service.errors import NotFound
from tula_service.usecases import jobs, ledger, recommendations, runs, scaling
from tula_service.usecases.telemetry import SeriesQuery, memory_of
from tula_wire import Objective, Recommendation, ScalingThresholds, read, routes

router = APIRouter(tags=["charts"])

Format = Annotated[Literal["json", "png", "svg"], Query(description="json is the Vega-Lite specification.")]
Step = Annotated[int | None, Query(ge=0, le=2**53)]
_ANSWER: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {"application/json": {}, "image/png": {}, "image/svg+xml": {}}}
}
MAX_TRAININGS = 200


@router.get(routes.JOB_CHART, response_class=Response, responses=_ANSWER)
def get_job_chart(
    job_id: str,
    name: str,
    caller: Caller,
    services: AppServices,
    quantity: Annotated[Literal["time", "cost"], Query(description="What `tradeoff` draws.")] = "time",
    objective: Objective | None = None,
    format: Format = "json",
) -> Response:
    """A chart of a job: tradeoff, cost_surface, memory, step_breakdown, accuracy or quality."""
    job = jobs.get(services.store, caller, job_id)
    if name == "quality":
        return _answer(charts.quality_chart(job, quality_runs(services.store, caller, job_id)), format)
    if name not in charts.JOB_CHARTS:
        raise NotFound(_unknown("job", name, (*charts.JOB_CHARTS, "quality")), field="name")
    recommendation = read(Recommendation, recommendations.get(services.store, caller, job_id, objective))
    entries = ledger.entries(services.store, caller, job_id)
    trainings = []
    if name == "accuracy":
        trainings = runs.list_runs(services.store, caller, job_id, kind="train", limit=MAX_TRAININGS).runs
    spec = charts.job_chart(name, job, recommendation, entries, quantity=quantity, trainings=trainings)
    return _answer(spec, format)


@router.get(routes.RUN_CHART, response_class=Response, responses=_ANSWER)
def get_run_chart(
    run_id: str,
    name: str,
    caller: Caller,
    services: AppServices,
    rank: Annotated[int, Query(ge=0, le=2**20)] = 0,
    max_points: Annotated[int, Query(ge=2, le=20_000)] = 1200,
    first_step: Step = None,
    last_step: Step = None,
    format: Format = "json",
) -> Response:
    """A chart of a run: step_time, memory, gradient, scale, loss or accuracy; `first_step` and `last_step` zoom in."""
    run = runs.get(services.store, caller, run_id)
    if name not in charts.RUN_CHARTS:
        raise NotFound(_unknown("run", name, charts.RUN_CHARTS), field="name")
    found, trends = {}, {}
    for column in charts.columns_of(name):
        query = SeriesQuery(run_id, column, rank, max_points, first_step, last_step)
        series, trend = series_of(services.store, caller, query)
        if series is not None:
            found[column] = series
        if trend is not None:
            trends[column] = trend
    if name == "memory" and not found and (readings := memory_of(services.store, caller, run_id)):
        return _answer(charts.rank_memory(run, readings), format)
    limits = None
    if name == "gradient":
        body = scaling.current(services.store, caller, run.job_id).body
        limits = None if body is None else read(ScalingThresholds, body)
    return _answer(charts.run_chart(name, run, found, limits, trends), format)


def _answer(spec: charts.Spec, format: Format) -> Response:
    if format == "png":
        return Response(charts.png(spec), media_type="image/png")
    if format == "svg":
        return Response(charts.svg(spec), media_type="image/svg+xml")
    return Response(json.dumps(spec, allow_nan=False, separators=(",", ":")), media_type="application/json")


def _unknown(kind: str, name: str, known: tuple[str, ...]) -> str:
    return f"A {kind} has no chart {name!r}: choose one of {', '.join(known)}."
