"""Serves `/v1/jobs/{job_id}/runs` and `/v1/runs/{run_id}`, which claim, register, list, read and update runs."""

from __future__ import annotations

from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Depends, Query

from tula_service.api.auth import Caller, CurrentUser
from tula_service.api.bodies import JsonRoute
from tula_service.api.queries import Cursor, Lease, reject_unknown_query
from tula_service.api.services import AppServices
from tula_service.usecases import runs
from tula_wire import ClaimRequest, Progress, Run, RunClaimed, RunCreate, RunKind, RunList, RunPatch, Verdict, routes

router = APIRouter(route_class=JsonRoute, tags=["runs"], dependencies=[Depends(reject_unknown_query)])


@router.post(routes.JOB_CLAIM)
def claim_run(job_id: str, request: ClaimRequest, user: CurrentUser) -> RunClaimed:
    """Lease the next profiling run. If the lease is not renewed, the run returns to the plan."""
    return runs.claim(*user, job_id, request)


@router.post(routes.JOB_RUNS, status_code=201)
def create_run(job_id: str, request: RunCreate, user: CurrentUser) -> Run:
    """Register a run outside the plan: a training run, or a profiling run of a chosen configuration."""
    return runs.create(*user, job_id, request)


@router.get(routes.JOB_RUNS)
def list_runs(
    job_id: str,
    user: CurrentUser,
    kind: Annotated[RunKind | None, Query(description="Only runs of this kind.")] = None,
    cursor: Cursor = None,
    limit: Annotated[int, Query(ge=1, le=500, description="Maximum number of runs on a page.")] = 100,
) -> RunList:
    """List a job's runs, newest first."""
    return runs.list_runs(*user, job_id, kind=kind, cursor=cursor, limit=limit)


@router.get(routes.RUN)
async def get_run(run_id: str, caller: Caller, services: AppServices) -> Run:
    """Return a run."""
    return await to_thread.run_sync(runs.get, services.store, caller, run_id, limiter=services.ingest_threads)


@router.get(routes.RUN_PROGRESS)
async def get_progress(run_id: str, caller: Caller, services: AppServices) -> Progress:
    """Return the progress of a training run, including its remaining time and the money spent."""
    return await to_thread.run_sync(runs.progress, services.store, caller, run_id, limiter=services.ingest_threads)


@router.get(routes.RUN_VERDICT)
def get_verdict(run_id: str, user: CurrentUser) -> Verdict:
    """Return a diagnosis of what limits a run's speed, with evidence and a suggested next step."""
    return runs.verdict(*user, run_id)


@router.patch(routes.RUN)
async def update_run(run_id: str, patch: RunPatch, caller: Caller, services: AppServices, lease: Lease = None) -> Run:
    """Change a run's state, or renew its lease by sending `running` again; a final state may be reported twice."""
    # Lease renewals share threads with measurements. The end of a run may start a fit, which must not use these
    # threads.
    threads = services.ingest_threads if patch.state == "running" else None
    return await to_thread.run_sync(runs.patch, services.store, caller, run_id, patch, lease, limiter=threads)
