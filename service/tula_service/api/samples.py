"""`/v1/runs/{run_id}/samples` and `/v1/jobs/{job_id}/samples`: step samples of one rank in, those of a job out."""

from __future__ import annotations

from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Query

from tula_service.api.bodies import RawBody, parse, request_body
from tula_service.api.deps import Caller, Current
from tula_service.usecases.samples import SampleFilter, list_samples
from tula_wire import SampleBatch, SamplePage, SamplesAccepted, routes

__all__ = ["router"]

router = APIRouter(tags=["samples"])


@router.post(routes.RUN_SAMPLES, status_code=202, openapi_extra=request_body(SampleBatch))
async def post_samples(run_id: str, body: RawBody, caller: Caller, have: Current) -> SamplesAccepted:
    """Store samples; they are committed before the answer, and a resend is counted as duplicates."""

    def store() -> SamplesAccepted:
        return have.ingest.samples(caller, run_id, parse(SampleBatch, body))

    accepted = await to_thread.run_sync(store, limiter=have.intake)
    have.metrics.samples.inc(accepted.stored)
    have.metrics.duplicates.inc(accepted.duplicates)
    return accepted


@router.get(routes.JOB_SAMPLES)
def get_samples(
    job_id: str,
    caller: Caller,
    have: Current,
    run_id: Annotated[str | None, Query(max_length=200, pattern=r"^[!-~]*$", description="Of this run only.")] = None,
    rank: Annotated[int | None, Query(ge=0, le=2**20)] = None,
    warmup: Annotated[bool | None, Query(description="Only what the fit discards, or only what it uses.")] = None,
    first_step: Annotated[int | None, Query(ge=0, le=2**53)] = None,
    last_step: Annotated[int | None, Query(ge=0, le=2**53)] = None,
    cursor: Annotated[str | None, Query(json_schema_extra={"pattern": r"^[0-9]{1,18}-[0-9]{1,18}$"})] = None,
    limit: Annotated[int, Query(ge=1, le=5000)] = 500,
) -> SamplePage:
    """Samples of a job as they were stored, process after process."""
    wanted = SampleFilter(run_id, rank, warmup, first_step, last_step)
    return list_samples(have.store, caller, job_id, wanted, cursor=cursor, limit=limit)
