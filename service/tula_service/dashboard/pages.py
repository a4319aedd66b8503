"""The pages: jobs, a job, a run, training quality, and tokens and projects for an administrator."""

from __future__ import annotations

from typing import Annotated, Any, get_args
from urllib.parse import urlencode

from fastapi import APIRouter, Query
from starlette.responses import HTMLResponse

from tula_service.dashboard import charts
from tula_service.dashboard.chart_routes import quality_runs
from tula_service.dashboard.charts.quality import method_name
from tula_service.dashboard.here import Here, Visitor
from tula_service.dashboard.templating import render
from tula_service.usecases import ledger, recommend, register, runs
from tula_service.usecases.access import visible_tokens
from tula_service.usecases.projects import visible_projects
from tula_wire import JobState, Objective, Recommendation, read

__all__ = ["router"]

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)

PAGE = 50
MOST_CANDIDATES = 60


@router.get("/")
def jobs_page(
    here: Here,
    search: Annotated[str, Query(max_length=200)] = "",
    state: str = "",
    archived: bool = False,
    cursor: Annotated[str | None, Query(max_length=40)] = None,
) -> HTMLResponse:
    """Jobs, newest first, searched and filtered by their address so that a view can be shared."""
    wanted: Any = state if state in get_args(JobState) else None
    page = register.list_jobs(
        here.store,
        here.principal,
        search=search or None,
        state=wanted,
        include_archived=archived,
        cursor=cursor,
        limit=PAGE,
    )
    kept = {"search": search, "state": state} | ({"archived": "true"} if archived else {})
    following = f"/?{urlencode({**kept, 'cursor': page.next_cursor})}" if page.next_cursor else None
    return _page(
        here,
        "jobs.html",
        page=page,
        search=search,
        state_wanted=wanted or "",
        archived=archived,
        states=get_args(JobState),
        following=following,
        is_first=cursor is None,
    )


@router.get("/jobs/{job_id}")
def job_page(job_id: str, here: Here, objective: Objective | None = None) -> HTMLResponse:
    """Everything about one job."""
    job = register.get(here.store, here.principal, job_id)
    recommendation = read(Recommendation, recommend.get(here.store, here.principal, job_id, objective))
    ranked = sorted(recommendation.candidates, key=lambda each: (each.excluded_by is not None, each.total_time_s.value))
    return _page(
        here,
        "job.html",
        job=job,
        recommendation=recommendation,
        candidates=ranked[:MOST_CANDIDATES],
        left_out=max(0, len(ranked) - MOST_CANDIDATES),
        frontier=set(recommendation.frontier),
        objectives=get_args(Objective),
        trainings=runs.list_runs(here.store, here.principal, job_id, kind="train", limit=20).runs,
        ledger=ledger.entries(here.store, here.principal, job_id, limit=20).entries,
    )


@router.get("/jobs/{job_id}/quality")
def quality_page(job_id: str, here: Here) -> HTMLResponse:
    """Methods of large-batch training side by side."""
    job = register.get(here.store, here.principal, job_id)
    compared: list[dict[str, Any]] = []
    found = quality_runs(here, job_id)
    for each in found:
        values = [value for value in each.series.values if value is not None]
        if values:
            best = min(values) if each.series.column == "loss" else max(values)
            compared.append({"run": each.run, "method": method_name(each.run), "last": values[-1], "best": best})
    column = found[0].series.column if found else "accuracy"
    compared.sort(key=lambda row: row["last"], reverse=column != "loss")
    return _page(here, "quality.html", job=job, compared=compared, column=column)


@router.get("/runs/{run_id}")
def run_page(run_id: str, here: Here) -> HTMLResponse:
    """One run, live while it lasts."""
    run = runs.get(here.store, here.principal, run_id)
    job = register.get(here.store, here.principal, run.job_id)
    return _page(here, "run.html", run=run, job=job, names=charts.RUN_CHARTS)


@router.get("/admin")
def admin_page(here: Here) -> HTMLResponse:
    """Tokens and projects."""
    projects = visible_projects(here.store, here.principal)
    return _page(
        here,
        "admin.html",
        tokens=visible_tokens(here.store, here.principal),
        projects=projects,
        project_names={project.id: project.name for project in projects},
    )


def _page(here: Visitor, name: str, **context: Any) -> HTMLResponse:
    return HTMLResponse(render(name, visitor=here, **context))
