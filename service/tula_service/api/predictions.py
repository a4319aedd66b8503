"""`GET /v1/jobs/{job_id}/predictions`: what-if, for one configuration or a grid."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from tula_service.analysis.what_if import WhatIf
from tula_service.api.deps import reject_unknown_query
from tula_service.dashboard.session import CurrentUser
from tula_service.usecases import predictions
from tula_wire import Predictions, routes
from tula_wire.bounds import MAX_DURATION_S, MAX_USD_PER_HOUR

router = APIRouter(tags=["recommendation"], dependencies=[Depends(reject_unknown_query)])

Count = Annotated[int, Query(ge=1, le=2**31 - 1)]


@router.get(routes.JOB_PREDICTIONS)
def get_predictions(
    job_id: str,
    user: CurrentUser,
    num_nodes: Annotated[list[Count], Query(max_length=64, description="Numbers of nodes.")] = [],  # noqa: B006 - FastAPI copies defaults
    global_batch_size: Annotated[list[Count], Query(max_length=64, description="Examples per step.")] = [],  # noqa: B006
    local_batch_size: Annotated[list[Count], Query(max_length=64, description="Examples per rank.")] = [],  # noqa: B006
    instance_type: Annotated[list[str], Query(max_length=16, description="Instance types of the job.")] = [],  # noqa: B006
    usd_per_node_hour: Annotated[
        float | None,
        Query(gt=0, le=MAX_USD_PER_HOUR, allow_inf_nan=False, description="US dollars per node-hour, not the job's."),
    ] = None,
    deadline_s: Annotated[
        float | None,
        Query(gt=0, le=MAX_DURATION_S, allow_inf_nan=False, description="Seconds that the whole training may take."),
    ] = None,
) -> Predictions:
    """Every combination of the values given (each may be repeated); what is left out takes all the job may use."""
    question = WhatIf(
        num_nodes=num_nodes,
        global_batch_size=global_batch_size,
        local_batch_size=local_batch_size,
        instance_type=instance_type,
        usd_per_node_hour=usd_per_node_hour,
        deadline_s=deadline_s,
    )
    return predictions.predict(*user, job_id, question)
