"""Serves `/v1/jobs/{job_id}/scaling`: gradient-scaling values, which users set and agents poll with an ETag."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Depends, Header, Query, Response

from tula_service.api.auth import Caller, CurrentUser
from tula_service.api.bodies import JsonRoute
from tula_service.api.queries import reject_unknown_query
from tula_service.api.services import AppServices
from tula_service.usecases import scaling
from tula_wire import ScalingPatch, ScalingPolicy, ScalingThresholds, routes

router = APIRouter(route_class=JsonRoute, tags=["scaling"], dependencies=[Depends(reject_unknown_query)])


@router.get(
    routes.JOB_SCALING,
    response_model=ScalingThresholds,
    responses={304: {"description": "The values have not changed since this ETag."}},
)
async def get_scaling(
    job_id: str,
    caller: Caller,
    services: AppServices,
    policy: Annotated[ScalingPolicy, Query(description="Policy of the training script.")] = "gain",
    if_none_match: Annotated[str | None, Header(description="ETag of the values that the caller has.")] = None,
) -> Response:
    """Return the gradient-scaling values and their ETag; with `If-None-Match`, return 304 if they have not changed."""
    read = partial(scaling.current, services.store, caller, job_id, policy)
    numbers = await to_thread.run_sync(read, limiter=services.ingest_threads)
    tag = f'"{numbers.version}-{numbers.policy}"'
    headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
    etags = {part.strip().removeprefix("W/") for part in (if_none_match or "").split(",")}
    if tag in etags or "*" in etags:
        return Response(status_code=304, headers=headers)
    return Response(numbers.model_dump_json(), headers=headers, media_type="application/json")


@router.patch(routes.JOB_SCALING)
def update_scaling(
    job_id: str,
    patch: ScalingPatch,
    user: CurrentUser,
    policy: Annotated[ScalingPolicy, Query(description="Policy whose values to set.")] = "gain",
) -> ScalingThresholds:
    """Set gradient-scaling values of a policy.

    Training runs read these values at their start and, under `ags` and `static`, after each epoch.
    """
    return scaling.change(*user, job_id, patch, policy)
