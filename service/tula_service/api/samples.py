"""`POST /v1/runs/{run_id}/samples`: step samples of one rank."""

from __future__ import annotations

from fastapi import APIRouter

from tula_service.api.bodies import RawBody, parse, request_body
from tula_service.api.deps import Caller, Current
from tula_wire import SampleBatch, SamplesAccepted, routes

__all__ = ["router"]

router = APIRouter(tags=["samples"])


@router.post(routes.RUN_SAMPLES, status_code=202, openapi_extra=request_body(SampleBatch))
def post_samples(run_id: str, body: RawBody, caller: Caller, have: Current) -> SamplesAccepted:
    """Store samples; they are committed before the answer, and a resend is counted as duplicates."""
    accepted = have.ingest.samples(caller, run_id, parse(SampleBatch, body))
    have.metrics.samples.inc(accepted.stored)
    have.metrics.duplicates.inc(accepted.duplicates)
    return accepted
