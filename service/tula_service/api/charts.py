"""`GET .../charts/{name}`: charts as Vega-Lite, or drawn as PNG or SVG."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from anyio import to_thread
from fastapi import APIRouter, Depends, Query, Response
from fastapi.responses import JSONResponse

from tula_service.api.deps import AppServices, Services, reject_unknown_query
from tula_service.dashboard.charts import render
from tula_service.dashboard.charts.accuracy import accuracy, accuracy_of_all, calibration
from tula_service.dashboard.charts.candidates import CANDIDATE_CHARTS, Quantity, tradeoff
from tula_service.dashboard.charts.runs import RUN_CHARTS, Over, drawn_columns, quality_chart, rank_memory, run_chart
from tula_service.dashboard.charts.vega import Spec
from tula_service.dashboard.pages import MAX_COMPARED, compare_runs
from tula_service.dashboard.session import CurrentUser, User
from tula_service.errors import Busy, NotFound
from tula_service.usecases import jobs, ledger, recommendations, runs, scaling
from tula_service.usecases.telemetry import SeriesQuery, columns_of, memory_of, read_with_trend
from tula_wire import Objective, Recommendation, read, routes

router = APIRouter(tags=["charts"], dependencies=[Depends(reject_unknown_query)])

Format = Annotated[Literal["json", "png", "svg"], Query(description="json is the Vega-Lite specification.")]
FirstStep = Annotated[int | None, Query(ge=0, le=2**53, description="First step to draw.")]
LastStep = Annotated[int | None, Query(ge=0, le=2**53, description="Last step to draw.")]
_ANSWER: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {"application/json": {}, "image/png": {}, "image/svg+xml": {}}}
}
MAX_TRAININGS = 200
_MOST_DRAWINGS: Final = 6
"""Images that are drawn or wait for that, one of each token: two are drawn at a time, each for seconds."""


@router.get(routes.JOB_CHART, response_class=Response, responses=_ANSWER)
async def get_job_chart(
    job_id: str,
    name: str,
    user: CurrentUser,
    services: AppServices,
    quantity: Annotated[Quantity, Query(description="What `tradeoff` draws.")] = "time",
    objective: Annotated[Objective | None, Query(description="Instead of the job's.")] = None,
    column: Annotated[str | None, Query(max_length=64, description="Metric that `quality` draws.")] = None,
    logarithmic: Annotated[bool, Query(description="Logarithmic axis of `quality`.")] = False,
    over: Annotated[Over, Query(description="What `quality` draws over.")] = "epoch",
    trend: Annotated[int, Query(ge=0, le=1000, description="Medians in a long line of `quality`; 0: none.")] = 150,
    run: Annotated[list[str], Query(max_length=MAX_COMPARED, description="Only these runs in `quality`.")] = [],  # noqa: B006 - FastAPI copies defaults
    cursor: Annotated[str | None, Query(max_length=40, description="`quality` of the runs before it.")] = None,
    format: Format = "json",
) -> Response:
    """A chart of a job: frontier, tradeoff, memory, step_breakdown, accuracy or quality."""

    def make() -> Spec:
        job = jobs.get(*user, job_id)
        if name == "quality":
            found = compare_runs(user, job_id, column, trend=trend, cursor=cursor, only=run)
            return quality_chart(job, found.runs, logarithmic=logarithmic, over=over)
        if name == "accuracy":
            trainings = runs.list_runs(*user, job_id, kind="train", limit=MAX_TRAININGS).runs
            return accuracy(job, ledger.entries(*user, job_id), trainings)
        _check_known("job", name, (*CANDIDATE_CHARTS, "accuracy", "quality"))
        recommendation = read(Recommendation, recommendations.get(*user, job_id, objective))
        if name == "tradeoff":
            return tradeoff(job, recommendation, quantity)
        return CANDIDATE_CHARTS[name](job, recommendation)

    return await _answer(services, user.principal.sender, make, format)


@router.get("/accuracy/charts/{name}", include_in_schema=False)
async def get_chart(name: str, user: CurrentUser, services: AppServices, format: Format = "json") -> Response:
    """A chart of the accuracy page: accuracy (predicted against measured) or calibration (of intervals)."""

    def make() -> Spec:
        _check_known("service", name, ("accuracy", "calibration"))
        found = ledger.outcomes(*user)
        if name == "calibration":
            return calibration([each.entry for each in found])
        return accuracy_of_all([(f"{each.network} on {each.device}", each.entry) for each in found])

    return await _answer(services, user.principal.sender, make, format)


@router.get(routes.RUN_CHART, response_class=Response, responses=_ANSWER)
async def get_run_chart(
    run_id: str,
    name: str,
    user: CurrentUser,
    services: AppServices,
    rank: Annotated[int, Query(ge=0, le=2**20, description="Global rank.")] = 0,
    max_points: Annotated[int, Query(ge=2, le=20_000, description="Most points of a line.")] = 1200,
    first_step: FirstStep = None,
    last_step: LastStep = None,
    trend: Annotated[int, Query(ge=0, le=1000, description="Medians in the line over a long series; 0: none.")] = 150,
    logarithmic: Annotated[bool, Query(description="Logarithmic axis of values.")] = False,
    format: Format = "json",
) -> Response:
    """A chart of a run: step_time, memory, gradient, scale, loss, accuracy, or any column that the run has reported.

    `first_step` and `last_step` zoom in.
    """
    where = SeriesQuery(run_id, "", rank, max_points, first_step, last_step, trend)
    return await _answer(services, user.principal.sender, lambda: _run_chart(user, name, where, logarithmic), format)


def _run_chart(user: User, name: str, where: SeriesQuery, logarithmic: bool) -> Spec:
    run = runs.get(*user, where.run_id)
    reported = columns_of(*user, run.id)
    _check_known("run", name, (*RUN_CHARTS, *reported))
    found, trends = {}, {}
    for column in drawn_columns(name):
        if column in reported:
            found[column], smooth = read_with_trend(*user, replace(where, column=column))
            if smooth is not None:
                trends[column] = smooth
    if name == "memory" and not found and (readings := memory_of(*user, run.id)):
        return rank_memory(run, readings)
    limits = scaling.current(*user, run.job_id) if name == "gradient" else None
    return run_chart(name, run, found, limits, trends, logarithmic=logarithmic)


async def _answer(services: Services, sender: str, make: Callable[[], Spec], format: Format) -> Response:
    """The chart; an image waits for its turn without a thread. Raises Busy if too many images wait."""
    if format == "json":
        return await to_thread.run_sync(lambda: JSONResponse(make()))
    waiting = services.drawings
    if sender in waiting or len(waiting) >= _MOST_DRAWINGS:
        text = "Too many charts are being drawn, one at a time of each token: ask again in a few seconds."
        raise Busy(text, retry_after_s=5.0, limited=sender in waiting)
    waiting.add(sender)
    try:
        spec = await to_thread.run_sync(make)
        draw, media_type = (render.png, "image/png") if format == "png" else (render.svg, "image/svg+xml")
        return Response(await to_thread.run_sync(draw, spec, limiter=services.drawers), media_type=media_type)
    finally:
        waiting.remove(sender)


def _check_known(kind: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise NotFound(f"A {kind} has no chart {name!r}: choose one of {', '.join(known)}.", field="name")
