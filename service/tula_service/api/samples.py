"""Serves `/v1/runs/{run_id}/samples`, which stores samples, and `/v1/jobs/{job_id}/samples`, which lists samples."""

from __future__ import annotations

from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Depends, Query

from tula_service.api.auth import Caller, CurrentUser
from tula_service.api.bodies import JsonRoute
from tula_service.api.queries import Lease, reject_unknown_query
from tula_service.api.services import AppServices
from tula_service.usecases import samples
from tula_service.usecases.samples import SampleQuery
from tula_wire import SampleBatch, SamplePage, SamplesAccepted, routes

router = APIRouter(route_class=JsonRoute, tags=["samples"])


@router.post(routes.RUN_SAMPLES, status_code=202)
async def send_samples(
    run_id: str, batch: SampleBatch, caller: Caller, services: AppServices, lease: Lease = None
) -> SamplesAccepted:
    """Store step samples and commit them before responding. Rows that were already stored are counted as duplicates."""
    store, threads = services.samples.store, services.ingest_threads
    accepted = await to_thread.run_sync(store, caller, run_id, batch, lease, limiter=threads)
    services.metrics.samples.inc(accepted.stored)
    services.metrics.duplicates.inc(accepted.duplicates)
    return accepted


@router.get(routes.JOB_SAMPLES, dependencies=[Depends(reject_unknown_query)])
def list_samples(job_id: str, user: CurrentUser, query: Annotated[SampleQuery, Query()]) -> SamplePage:
    """List a job's samples, ordered by process and then by sequence number."""
    return samples.list_samples(*user, job_id, query)
