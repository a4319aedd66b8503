"""`/v1/runs/{run_id}/samples` stores step samples of one rank; `/v1/jobs/{job_id}/samples` lists those of a job."""

from __future__ import annotations

from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Depends, Query, Request

from tula_service.api.bodies import parse, read_body, request_body
from tula_service.api.deps import AppServices, Caller, reject_unknown_query
from tula_service.dashboard.session import CurrentUser
from tula_service.usecases import samples
from tula_service.usecases.samples import SampleQuery
from tula_wire import SampleBatch, SamplePage, SamplesAccepted, routes

router = APIRouter(tags=["samples"])


@router.post(routes.RUN_SAMPLES, status_code=202, openapi_extra=request_body(SampleBatch))
async def send_samples(run_id: str, request: Request, caller: Caller, services: AppServices) -> SamplesAccepted:
    """Store samples; they are committed before the answer, and rows stored before count as duplicates."""
    body = await read_body(request)

    def store() -> SamplesAccepted:
        return services.samples.store(caller, run_id, parse(SampleBatch, body))

    accepted = await to_thread.run_sync(store, limiter=services.intake)
    services.metrics.samples.inc(accepted.stored)
    services.metrics.duplicates.inc(accepted.duplicates)
    return accepted


@router.get(routes.JOB_SAMPLES, dependencies=[Depends(reject_unknown_query)])
def list_samples(job_id: str, user: CurrentUser, query: Annotated[SampleQuery, Query()]) -> SamplePage:
    """Samples of a job, ordered by process, then by sequence."""
    return samples.list_samples(*user, job_id, query)
