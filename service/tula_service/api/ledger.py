"""Serves the route `/v1/jobs/{job_id}/ledger`, which lists past recommendations and the results measured later."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from tula_service.api.auth import CurrentUser
from tula_service.api.queries import reject_unknown_query
from tula_service.usecases import ledger
from tula_wire import Ledger, routes

router = APIRouter(tags=["recommendation"], dependencies=[Depends(reject_unknown_query)])


@router.get(routes.JOB_LEDGER)
def get_ledger(
    job_id: str,
    user: CurrentUser,
    limit: Annotated[int, Query(ge=1, le=1000, description="Maximum number of entries.")] = 200,
) -> Ledger:
    """List past predictions with the values measured later, newest first. Predictions in the ledger never change."""
    return ledger.entries(*user, job_id, limit=limit)
