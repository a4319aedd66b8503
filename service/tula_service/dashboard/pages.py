"""Serves the pages: jobs, new job, job, what-if table, comparison of runs, run, accuracy, tokens and projects."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Collection, Mapping
from statistics import fmean, median
from typing import Annotated, Any, NamedTuple, get_args
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from pydantic import BeforeValidator, Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, JSONResponse

from tula_service.analysis.questions import WhatIf
from tula_service.analysis.scaling import Outcome, lost_regularisation
from tula_service.api.auth import CurrentUser, User
from tula_service.dashboard.charts.candidates import named_candidates
from tula_service.dashboard.charts.runs import RUN_CHARTS, Over, QualityRun, drawn_columns, is_setting
from tula_service.dashboard.format import render
from tula_service.domain import JobOrder
from tula_service.errors import InvalidInput
from tula_service.perfmodel.objectives import OBJECTIVES
from tula_service.usecases import events, jobs, ledger, recommendations, runs
from tula_service.usecases.access import PUBLIC, visible_projects, visible_tokens
from tula_service.usecases.telemetry import SeriesQuery, compare, list_columns, newest_values
from tula_wire import (
    JOBS_COUNTED,
    Candidate,
    EventKind,
    HostFacts,
    JobSpec,
    JobState,
    Objective,
    Predictions,
    Recommendation,
    read,
)
from tula_wire.format import option

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)

PAGE = 50
MAX_SORTED = 200
ORDERS: Mapping[JobOrder, str] = {
    "newest": "newest first",
    "name": "name",
    "time": "least time",
    "cost": "least cost",
    "error": "largest prediction error",
}
MAX_CANDIDATES = 60
MAX_EVENTS = 12
MAX_WHAT_IF = 12
MAX_LOGGED = 60
MAX_FOLLOWED = 20
MAX_TRAININGS = 20
KINDS: tuple[EventKind, ...] = ("job", "run", "recommendation", "scaling", "drift", "advice")
"""All kinds of event except `samples`, since a run may have thousands of these."""
MAX_COMPARED = 200
_MOST_POINTS, _LEAST_POINTS, _POINTS_OF_ALL = 400, 30, 6_000


def _several(given: Any) -> Any:
    """Split form fields such as `2, 4`, and return the separate values."""
    return [value for text in given for value in re.split(r"[\s,;]+", text) if value]


Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Counts = Annotated[list[Count], BeforeValidator(_several), Query(max_length=64)]
Names = Annotated[list[Annotated[str, Field(max_length=200)]], Query(max_length=64)]
Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Amount = Annotated[Positive | None, BeforeValidator(lambda given: given.strip() or None)]
"""A positive number from a form field; an empty field means None."""
Cursor = Annotated[str | None, Query(max_length=40)]


@router.get("/")
def jobs_page(
    user: CurrentUser,
    search: Annotated[str, Query(max_length=200)] = "",
    state: str = "",
    order: str = "newest",
    archived: bool = False,
    cursor: Cursor = None,
) -> HTMLResponse:
    """Return the page that lists jobs; its URL contains the search, filter and order, so that a view can be shared."""
    known_state: Any = state if state in get_args(JobState) else None
    sorted_by: Any = order if order in get_args(JobOrder) else "newest"
    page = jobs.list_jobs(
        *user,
        search=search or None,
        state=known_state,
        include_archived=archived,
        order=sorted_by,
        cursor=cursor,
        limit=PAGE if sorted_by == "newest" else MAX_SORTED,
    )
    kept = {"search": search, "state": known_state or ""} | ({"archived": "true"} if archived else {})
    kept = {name: value for name, value in kept.items() if value}
    following = f"/?{urlencode({**kept, 'cursor': page.next_cursor})}" if page.next_cursor else None
    newest = f"/?{urlencode(kept)}" if cursor is not None else None
    return _page(
        user,
        "jobs.html",
        page=page,
        counted=JOBS_COUNTED,
        search=search,
        state_wanted=known_state or "",
        archived=archived,
        order=sorted_by,
        orders=ORDERS,
        states=get_args(JobState),
        following=following,
        newest=newest,
    )


@router.get("/jobs/new")
def new_job_page(user: CurrentUser) -> HTMLResponse:
    """Return the page with the form for a job.toml."""
    return _page(user, "new_job.html", objectives=get_args(Objective))


@router.post("/jobs/new")
async def new_job(request: Request, user: CurrentUser) -> JSONResponse:
    """Register the job that the body, a job.toml, describes, and return its id.

    The page's script sends the request and displays any errors. Raises InvalidInput or pydantic.ValidationError.
    """
    sent = await request.body()
    made = await run_in_threadpool(lambda: jobs.register(*user, _specification(sent)))
    return JSONResponse({"id": made.job.id}, 201)


def _specification(sent: bytes) -> JobSpec:
    try:
        document = tomllib.loads(sent.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidInput(
            f"The specification is not valid TOML: {error}. Correct this error.", field="specification"
        ) from error
    return JobSpec.model_validate(document)


@router.get("/jobs/{job_id}")
def job_page(
    job_id: str, user: CurrentUser, objective: Objective | None = None, trainings: Cursor = None
) -> HTMLResponse:
    """Return the page of a job, with its newest training runs or those before the cursor `trainings`."""
    job = jobs.get(*user, job_id)
    recommendation = read(Recommendation, recommendations.get(*user, job_id, objective))
    ranked = _ranked(recommendation)
    listed = events.recent(*user, job_id, kinds=KINDS, limit=MAX_EVENTS)
    trained = runs.list_runs(*user, job_id, kind="train", cursor=trainings, limit=MAX_TRAININGS)
    return _page(
        user,
        "job.html",
        job=job,
        recommendation=recommendation,
        candidates=ranked[:MAX_CANDIDATES],
        by_cost=_by_cost(recommendation),
        left_out=max(0, len(ranked) - MAX_CANDIDATES),
        landmarks=named_candidates(recommendation),
        frontier=set(recommendation.frontier),
        objectives=get_args(Objective),
        trainings=trained.runs,
        older=trained.next_cursor,
        newest=trainings is None,
        ledger=ledger.entries(*user, job_id, followed=True, limit=MAX_FOLLOWED).entries,
        events=listed,
    )


@router.get("/jobs/{job_id}/what-if")
def what_if(
    job_id: str,
    user: CurrentUser,
    nodes: Counts = [],  # noqa: B006 - FastAPI copies defaults
    global_batch: Counts = [],  # noqa: B006
    usd_per_node_hour: Amount = None,
    deadline_hours: Amount = None,
    objective: Objective | None = None,
    instance_type: Names = [],  # noqa: B006
    option: Names = [],  # noqa: B006
    micro_steps: Counts = [],  # noqa: B006
    spot: bool | None = None,
) -> HTMLResponse:
    """Return a table of candidates sorted by time, allowed ones first, each compared with the recommendation."""
    question = WhatIf(
        num_nodes=nodes,
        global_batch_size=global_batch,
        instance_type=instance_type,
        option=option,
        usd_per_node_hour=usd_per_node_hour,
        deadline_s=None if deadline_hours is None else deadline_hours * 3600,
    )
    candidates = read(Predictions, recommendations.predict(*user, job_id, question)).candidates
    asked = [
        candidate
        for candidate in candidates
        if (not micro_steps or candidate.configuration.grad_accum_steps in micro_steps)
        and spot in (None, candidate.spot)
    ]
    ranked = sorted(asked, key=lambda candidate: (candidate.excluded_by is not None, candidate.total_time_s.value))
    best = read(Recommendation, recommendations.get(*user, job_id, objective)).chosen
    left_out = max(0, len(ranked) - MAX_WHAT_IF)
    return HTMLResponse(render("what_if.html", candidates=ranked[:MAX_WHAT_IF], left_out=left_out, best=best))


@router.get("/jobs/{job_id}/quality")
def quality_page(
    job_id: str,
    user: CurrentUser,
    column: Annotated[str | None, Query(max_length=64)] = None,
    logarithmic: bool = False,
    trend: Annotated[int, Query(ge=0, le=1000)] = 150,
    over: Over = "epoch",
    run: Annotated[list[str], Query(max_length=MAX_COMPARED)] = [],  # noqa: B006 - FastAPI copies defaults
    cursor: Cursor = None,
) -> HTMLResponse:
    """Return the page that compares training runs by any reported column.

    Its table contains all runs; its chart shows all runs or only those in `run`.
    """
    job = jobs.get(*user, job_id)
    comparison = compare_runs(user, job_id, column, trend=trend, cursor=cursor)
    view = {"column": comparison.column, "logarithmic": logarithmic, "trend": trend, "over": over, "cursor": cursor}
    asked = [(name, value) for name, value in view.items() if value is not None]
    return _page(
        user,
        "quality.html",
        job=job,
        compared=_compared(comparison.runs, comparison.column),
        columns=comparison.columns,
        view=view,
        chosen=run,
        chart_query=urlencode([*asked, *(("run", run_id) for run_id in run)]),
        older=comparison.next_cursor,
        advice=_lost_regularisation(user, job_id, comparison),
    )


@router.get("/accuracy")
def accuracy_page(user: CurrentUser) -> HTMLResponse:
    """Return the page that compares predicted with measured step times over all jobs."""
    outcomes = [outcome for outcome in ledger.outcomes(*user) if outcome.entry.error is not None]
    groups: dict[tuple[str, str], list[ledger.Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.network, outcome.device), []).append(outcome)
    rows = [_accuracy(*names, group) for names, group in sorted(groups.items())]
    newest = [] if user.principal == PUBLIC else outcomes[:MAX_FOLLOWED]
    return _page(user, "accuracy.html", rows=rows, overall=_accuracy("", "", outcomes), newest=newest)


@router.get("/runs/{run_id}")
def run_page(run_id: str, user: CurrentUser) -> HTMLResponse:
    """Return the page of a run, which is updated live while the run lasts."""
    run = runs.get(*user, run_id)
    job = jobs.get(*user, run.job_id)
    listed = events.recent(*user, job.id, kinds=KINDS, run_id=run_id, limit=MAX_EVENTS)
    drawn = {column for name in RUN_CHARTS for column in drawn_columns(name)}
    sent = list_columns(*user, run_id)
    logged = [name for name in sent if name not in drawn and not is_setting(name)]
    # A profiling run may not report loss, accuracy or scaling, so charts that would be empty are left out.
    own = [
        n for n in RUN_CHARTS if run.kind == "train" or n in ("step_time", "memory") or {*drawn_columns(n)} & {*sent}
    ]
    names = {name: drawn_columns(name)[0] for name in (*own, *logged[:MAX_LOGGED])}
    return _page(
        user,
        "run.html",
        run=run,
        job=job,
        seen=_seen(run.machine),
        names=names,
        settings=newest_values(*user, run_id, filter(is_setting, sent)),
        left_out=max(0, len(logged) - MAX_LOGGED),
        events=listed,
        output=runs.output(*user, run_id),
        verdict=runs.verdict(*user, run_id),
    )


def _seen(machine: HostFacts | None) -> list[str]:
    """Return the settings observed in a training script, such as its precision, in the words used for options."""
    if machine is None:
        return []
    switches = {"compile": machine.compiled, "checkpointing": machine.checkpointing}
    words = [option(name, "on" if on else "off") for name, on in switches.items() if on is not None]
    if machine.precision is not None:
        words.insert(0, option("precision", machine.precision))
    if machine.sharded is not None:
        words.append("sharded" if machine.sharded else "not sharded")
    if machine.loader_workers is not None:
        words.append(option("num_workers", str(machine.loader_workers)))
    return words


@router.get("/admin")
def admin_page(user: CurrentUser) -> HTMLResponse:
    """Return the page of tokens and projects."""
    projects = visible_projects(*user)
    return _page(
        user,
        "admin.html",
        tokens=visible_tokens(*user),
        projects=projects,
        project_names={project.id: project.name for project in projects},
    )


class Comparison(NamedTuple):
    """Training runs compared by one column; `columns` lists all columns, and `next_cursor` leads to older runs."""

    column: str
    columns: list[str]
    runs: list[QualityRun]
    next_cursor: str | None


def compare_runs(
    user: User, job_id: str, column: str | None, *, trend: int, cursor: str | None, only: Collection[str] = ()
) -> Comparison:
    """Return the training runs that reported `column`, among the newest 200 or the 200 before `cursor`.

    If `column` is None, `compare` chooses the column. `only` contains the ids of the runs to compare; if it is empty,
    all runs are compared. The more runs there are, the fewer points are returned for each.
    """
    page = runs.list_runs(*user, job_id, kind="train", cursor=cursor, limit=MAX_COMPARED)
    listed = [run for run in page.runs if not only or run.id in only]
    points = min(_MOST_POINTS, max(_LEAST_POINTS, _POINTS_OF_ALL // max(1, len(listed))))
    query = SeriesQuery("", "", max_points=points, trend_points=min(trend, points))
    drawn, columns, series = compare(*user, job_id, listed, column, query)
    drawn_runs = [QualityRun(run, series[run.id]) for run in listed if run.id in series]
    return Comparison(drawn, columns, drawn_runs, page.next_cursor)


def _lost_regularisation(user: User, job_id: str, comparison: Comparison) -> str | None:
    """Return a warning if finished training runs show that a larger batch reduced regularisation, else None."""
    names = ("loss", "validation_accuracy")
    if not {*names} <= {*comparison.columns}:
        return None
    loss, accuracy = (
        {row.run.id: row for row in compare_runs(user, job_id, name, trend=0, cursor=None).runs} for name in names
    )
    ended = [run for run in loss if run in accuracy and loss[run].run.state == "succeeded"]
    scale = (
        100.0 if all(_end(accuracy[run]) <= 1.0 for run in ended) else 1.0
    )  # accuracy may be a fraction or a percentage
    return lost_regularisation(
        [
            Outcome(loss[run].run.configuration.global_batch_size, _end(loss[run]), scale * _end(accuracy[run]))
            for run in ended
        ]
    )


def _end(run: QualityRun) -> float:
    """Return the mean of the last tenth of the values of a run's column."""
    values = [value for value in run.series.values if value is not None]
    return fmean(values[-max(1, len(values) // 10) :]) if values else math.nan


def _by_cost(recommendation: Recommendation) -> bool:
    return any(name == recommendation.objective and objective.by_cost for name, objective in OBJECTIVES.items())


def _ranked(recommendation: Recommendation) -> list[Candidate]:
    """Return the candidates in the order of the table on the job page.

    The chosen candidate and the runner-up come first, then the allowed candidates, then the excluded candidates. Each
    group is sorted by time (or by cost).
    """
    by_cost = _by_cost(recommendation)

    def place(candidate: Candidate) -> tuple[int, bool, float]:
        estimate = candidate.cost_usd if by_cost and candidate.cost_usd is not None else candidate.total_time_s
        first = 0 if candidate == recommendation.chosen else 1 if candidate == recommendation.runner_up else 2
        return first, candidate.excluded_by is not None, estimate.value

    return sorted(recommendation.candidates, key=place)


def _accuracy(network: str, device: str, outcomes: list[ledger.Outcome]) -> dict[str, Any]:
    """Return a row of the accuracy page: errors of step times, and the share of measurements inside intervals."""
    errors = sorted(outcome.entry.error for outcome in outcomes if outcome.entry.error is not None)
    sizes = sorted(map(abs, errors))
    held = [outcome.entry.within_interval for outcome in outcomes if outcome.entry.within_interval is not None]
    return {
        "network": network,
        "device": device,
        "runs": len(outcomes),
        "jobs": len({outcome.entry.job_id for outcome in outcomes}),
        "median": median(sizes) if sizes else None,
        "most": sizes[math.ceil(0.9 * len(sizes)) - 1] if sizes else None,
        "bias": median(errors) if errors else None,
        "held": sum(held) / len(held) if held else None,
    }


def _compared(runs: list[QualityRun], column: str) -> list[dict[str, Any]]:
    """Return a table row for each run, sorted by its last value: ascending for a loss, otherwise descending."""
    rows: list[dict[str, Any]] = []
    for entry in runs:
        values = [value for value in entry.series.values if value is not None]
        if values:
            rows.append({"run": entry.run, "last": values[-1], "least": min(values), "most": max(values)})
    return sorted(rows, key=lambda row: row["last"], reverse="loss" not in column)


def _page(user: User, name: str, **context: Any) -> HTMLResponse:
    return HTMLResponse(render(name, user=user, **context))
