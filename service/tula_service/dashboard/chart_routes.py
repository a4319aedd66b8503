"""Serves the routes `.../charts/{name}`, which return Vega-Lite specifications for browsers and clients to draw."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from fastapi.responses import JSONResponse

from tula_service.api.auth import CurrentUser, User
from tula_service.api.queries import reject_unknown_query
from tula_service.dashboard.charts.accuracy import accuracy, accuracy_of_all, calibration
from tula_service.dashboard.charts.candidates import CANDIDATE_CHARTS, Quantity, tradeoff
from tula_service.dashboard.charts.runs import RUN_CHARTS, Over, drawn_columns, quality_chart, rank_memory, run_chart
from tula_service.dashboard.charts.vega import Spec
from tula_service.dashboard.pages import MAX_COMPARED, compare_runs
from tula_service.errors import NotFound
from tula_service.usecases import jobs, ledger, recommendations, runs
from tula_service.usecases.telemetry import SeriesQuery, list_columns, read_memory, read_with_trend
from tula_wire import Objective, Recommendation, read, routes

router = APIRouter(tags=["charts"], dependencies=[Depends(reject_unknown_query)])

FirstStep = Annotated[int | None, Query(ge=0, le=2**53, description="First step to draw.")]
LastStep = Annotated[int | None, Query(ge=0, le=2**53, description="Last step to draw.")]
MAX_TRAININGS = 200


@router.get(routes.JOB_CHART)
def get_job_chart(
    job_id: str,
    name: str,
    user: CurrentUser,
    quantity: Annotated[Quantity, Query(description="Quantity in the chart `tradeoff`.")] = "time",
    objective: Annotated[Objective | None, Query(description="Replaces the job's objective.")] = None,
    column: Annotated[str | None, Query(max_length=64, description="Metric in the chart `quality`.")] = None,
    logarithmic: Annotated[bool, Query(description="Use a logarithmic axis in `quality`.")] = False,
    over: Annotated[Over, Query(description="Horizontal axis of `quality`.")] = "epoch",
    trend: Annotated[
        int,
        Query(ge=0, le=1000, description="Number of medians that replace a long series in `quality`; 0 disables this."),
    ] = 150,
    run: Annotated[
        list[str], Query(max_length=MAX_COMPARED, description="Runs to show in `quality`; default: all.")
    ] = [],  # noqa: B006 - FastAPI copies defaults
    cursor: Annotated[
        str | None, Query(max_length=40, description="Cursor from which `quality` shows older runs.")
    ] = None,
) -> JSONResponse:
    """Return a chart of a job.

    `name` is frontier, tradeoff, memory, step_breakdown, options, accuracy or quality.
    """
    job = jobs.get(*user, job_id)
    if name == "quality":
        compared = compare_runs(user, job_id, column, trend=trend, cursor=cursor, only=run)
        return JSONResponse(quality_chart(job, compared.runs, logarithmic=logarithmic, over=over))
    if name == "accuracy":
        trainings = runs.list_runs(*user, job_id, kind="train", limit=MAX_TRAININGS).runs
        return JSONResponse(accuracy(job, ledger.entries(*user, job_id), trainings))
    _check_known("job", name, (*CANDIDATE_CHARTS, "accuracy", "quality"))
    recommendation = read(Recommendation, recommendations.get(*user, job_id, objective))
    if name == "tradeoff":
        return JSONResponse(tradeoff(job, recommendation, quantity))
    return JSONResponse(CANDIDATE_CHARTS[name](job, recommendation))


@router.get("/accuracy/charts/{name}", include_in_schema=False)
def get_chart(name: str, user: CurrentUser) -> JSONResponse:
    """Return a chart for the accuracy page; `name` is accuracy (measured against predicted times) or calibration."""
    _check_known("service", name, ("accuracy", "calibration"))
    outcomes = ledger.outcomes(*user)
    if name == "calibration":
        return JSONResponse(calibration([outcome.entry for outcome in outcomes]))
    return JSONResponse(
        accuracy_of_all([(f"{outcome.network} on {outcome.device}", outcome.entry) for outcome in outcomes])
    )


@router.get(routes.RUN_CHART)
def get_run_chart(
    run_id: str,
    name: str,
    user: CurrentUser,
    rank: Annotated[int, Query(ge=0, le=2**20, description="Global rank.")] = 0,
    max_points: Annotated[int, Query(ge=2, le=20_000, description="Maximum number of points per line.")] = 1200,
    first_step: FirstStep = None,
    last_step: LastStep = None,
    trend: Annotated[
        int, Query(ge=0, le=1000, description="Number of medians in the trend line of a long series; 0 draws no line.")
    ] = 150,
    logarithmic: Annotated[bool, Query(description="Use a logarithmic axis for the values.")] = False,
) -> JSONResponse:
    """Return a chart of a run.

    `name` is step_time, memory, gradient, scale, loss, accuracy, or the name of any column that the run reported.
    `first_step` and `last_step` select a range of steps.
    """
    where = SeriesQuery(run_id, "", rank, max_points, first_step, last_step, trend)
    return JSONResponse(_run_chart(user, name, where, logarithmic))


def _run_chart(user: User, name: str, where: SeriesQuery, logarithmic: bool) -> Spec:
    run = runs.get(*user, where.run_id)
    reported = list_columns(*user, run.id)
    _check_known("run", name, (*RUN_CHARTS, *reported))
    series, trends = {}, {}
    for column in drawn_columns(name):
        if column in reported:
            series[column], smooth = read_with_trend(*user, replace(where, column=column))
            if smooth is not None:
                trends[column] = smooth
    if name == "memory" and not series and (readings := read_memory(*user, run.id)):
        return rank_memory(run, readings)
    return run_chart(name, run, series, trends, logarithmic=logarithmic)


def _check_known(kind: str, name: str, names: tuple[str, ...]) -> None:
    if name not in names:
        raise NotFound(f"There is no {kind} chart named {name!r}: use one of {', '.join(names)}.", field="name")
