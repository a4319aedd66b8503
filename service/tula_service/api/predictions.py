"""`GET /v1/jobs/{job_id}/predictions`: what-if, for one configuration or a grid."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from tula_service.analysis.what_if import WhatIf
from tula_service.api.deps import reject_unknown_query
from tula_service.dashboard.session import CurrentUser
from tula_service.usecases import predictions
from tula_wire import Predictions, routes

router = APIRouter(tags=["recommendation"], dependencies=[Depends(reject_unknown_query)])


@router.get(routes.JOB_PREDICTIONS)
def get_predictions(job_id: str, user: CurrentUser, question: Annotated[WhatIf, Query()]) -> Predictions:
    """Every combination of the values given (each may be repeated); what is left out takes all the job may use."""
    return predictions.predict(*user, job_id, question)
