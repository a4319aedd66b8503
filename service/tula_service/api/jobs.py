"""Serves the routes under `/v1/jobs`, which register, list, read, change and delete jobs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Response

from tula_service.api.auth import CurrentUser
from tula_service.api.bodies import JsonRoute
from tula_service.api.queries import Cursor, reject_unknown_query
from tula_service.usecases import jobs
from tula_wire import Job, JobCreated, JobPage, JobPatch, JobSpec, JobState, routes

router = APIRouter(route_class=JsonRoute, tags=["jobs"], dependencies=[Depends(reject_unknown_query)])


@router.post(routes.JOBS, status_code=201)
def create_job(
    spec: JobSpec,
    user: CurrentUser,
    idempotency_key: Annotated[
        str | None, Header(description="If the key and the body are sent again, the existing job is returned.")
    ] = None,
) -> JobCreated:
    """Register a job, or return the existing job with the same specification.

    The response also contains the current recommendation and the planned profiling runs.
    """
    return jobs.register(*user, spec, idempotency_key=idempotency_key)


@router.get(routes.JOBS)
def list_jobs(
    user: CurrentUser,
    name: Annotated[str | None, Query(max_length=200, description="Only jobs with exactly this name.")] = None,
    search: Annotated[str | None, Query(max_length=200, description="Part of the name of a job or a model.")] = None,
    state: Annotated[JobState | None, Query(description="Only jobs in this state.")] = None,
    archived: Annotated[bool, Query(description="Include archived jobs.")] = False,
    cursor: Cursor = None,
    limit: Annotated[int, Query(ge=1, le=500, description="Maximum number of jobs on a page.")] = 50,
) -> JobPage:
    """List jobs, newest first."""
    return jobs.list_jobs(
        *user, name=name, search=search, state=state, include_archived=archived, cursor=cursor, limit=limit
    )


@router.get(routes.JOB)
def get_job(job_id: str, user: CurrentUser) -> Job:
    """Return a job with its specification and plan."""
    return jobs.get(*user, job_id)


@router.patch(routes.JOB)
def update_job(job_id: str, patch: JobPatch, user: CurrentUser) -> Job:
    """Change a job's objective, limits or prices, or archive it, and update its plan and recommendation."""
    return jobs.change(*user, job_id, patch)


@router.delete(routes.JOB, status_code=204)
def delete_job(job_id: str, user: CurrentUser) -> Response:
    """Delete a job and all its data. This cannot be undone."""
    jobs.delete_job(*user, job_id)
    return Response(status_code=204)
