"""`GET .../charts/{name}`: charts as Vega-Lite, or drawn as PNG or SVG."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Response

from tula_service.dashboard import charts
from tula_service.dashboard.here import Here, Visitor
from tula_service.errors import NotFound
from tula_service.usecases import jobs, ledger, recommendations, runs, scaling
from tula_service.usecases.telemetry import SeriesQuery, memory_of, read_with_trend
from tula_wire import Objective, Recommendation, ScalingThresholds, TelemetrySeries, read, routes

__all__ = ["quality_runs", "router", "series_of"]

router = APIRouter(tags=["charts"])

Format = Annotated[Literal["json", "png", "svg"], Query(description="json is the Vega-Lite specification.")]
Step = Annotated[int | None, Query(ge=0, le=2**53)]
_ANSWER: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {"application/json": {}, "image/png": {}, "image/svg+xml": {}}}
}
QUALITY_COLUMNS = ("validation_accuracy", "accuracy", "loss")
MOST_QUALITY_RUNS = 24
MOST_TRAININGS = 200


@router.get(routes.JOB_CHART, response_class=Response, responses=_ANSWER)
def get_job_chart(
    job_id: str,
    name: str,
    here: Here,
    quantity: Annotated[Literal["time", "cost"], Query(description="What `tradeoff` draws.")] = "time",
    objective: Objective | None = None,
    format: Format = "json",
) -> Response:
    """A chart of a job: tradeoff, cost_surface, memory, step_breakdown, accuracy or quality."""
    job = jobs.get(here.store, here.principal, job_id)
    if name == "quality":
        return _answer(charts.quality_chart(job, quality_runs(here, job_id)), format)
    if name not in charts.JOB_CHARTS:
        raise NotFound(_unknown("job", name, (*charts.JOB_CHARTS, "quality")), field="name")
    recommendation = read(Recommendation, recommendations.get(here.store, here.principal, job_id, objective))
    entries = ledger.entries(here.store, here.principal, job_id)
    trainings = []
    if name == "accuracy":
        trainings = runs.list_runs(here.store, here.principal, job_id, kind="train", limit=MOST_TRAININGS).runs
    spec = charts.job_chart(name, job, recommendation, entries, quantity=quantity, trainings=trainings)
    return _answer(spec, format)


@router.get(routes.RUN_CHART, response_class=Response, responses=_ANSWER)
def get_run_chart(
    run_id: str,
    name: str,
    here: Here,
    rank: Annotated[int, Query(ge=0, le=2**20)] = 0,
    max_points: Annotated[int, Query(ge=2, le=20_000)] = 1200,
    first_step: Step = None,
    last_step: Step = None,
    format: Format = "json",
) -> Response:
    """A chart of a run: step_time, memory, gradient, scale, loss or accuracy; steps narrow it to a closer look."""
    run = runs.get(here.store, here.principal, run_id)
    if name not in charts.RUN_CHARTS:
        raise NotFound(_unknown("run", name, charts.RUN_CHARTS), field="name")
    found, trends = {}, {}
    for column in charts.columns_of(name):
        series, trend = series_of(
            here, run_id, column, rank=rank, max_points=max_points, first_step=first_step, last_step=last_step
        )
        if series is not None:
            found[column] = series
        if trend is not None:
            trends[column] = trend
    if name == "memory" and not found and (readings := memory_of(here.store, here.principal, run_id)):
        return _answer(charts.rank_memory(run, readings), format)
    limits = None
    if name == "gradient":
        body = scaling.current(here.store, here.principal, run.job_id).body
        limits = None if body is None else read(ScalingThresholds, body)
    return _answer(charts.run_chart(name, run, found, limits, trends), format)


def series_of(
    here: Visitor,
    run_id: str,
    column: str,
    *,
    rank: int = 0,
    max_points: int = 1200,
    first_step: int | None = None,
    last_step: int | None = None,
) -> tuple[TelemetrySeries, TelemetrySeries | None] | tuple[None, None]:
    """A column and its trend (None for a short one), or nothing when the run never reported it."""
    try:
        query = SeriesQuery(run_id, column, rank, max_points, first_step, last_step)
        return read_with_trend(here.store, here.principal, query)
    except NotFound as missing:
        if missing.field != "column":
            raise
        return None, None


def quality_runs(here: Visitor, job_id: str) -> list[charts.QualityRun]:
    """Training runs with the first of accuracy on held-out data, accuracy, or loss that any of them reports."""
    listed = runs.list_runs(here.store, here.principal, job_id, kind="train", limit=MOST_QUALITY_RUNS).runs
    for column in QUALITY_COLUMNS:
        series = [(run, *series_of(here, run.id, column, max_points=400)) for run in listed]
        found = [charts.QualityRun(run, trend or each) for run, each, trend in series if each is not None]
        if found:
            return found
    return []


def _answer(spec: charts.Spec, format: str) -> Response:
    if format == "png":
        return Response(charts.png(spec), media_type="image/png")
    if format == "svg":
        return Response(charts.svg(spec), media_type="image/svg+xml")
    return Response(json.dumps(spec, allow_nan=False, separators=(",", ":")), media_type="application/json")


def _unknown(kind: str, name: str, known: tuple[str, ...]) -> str:
    return f"A {kind} has no chart {name!r}: choose one of {', '.join(known)}."
