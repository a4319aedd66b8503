"""Serves the routes `/recommendation`, `/predictions` and `/schedule` of a job."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response

from tula_service.analysis.questions import WhatIf
from tula_service.api.auth import Caller, CurrentUser
from tula_service.api.queries import reject_unknown_query
from tula_service.api.services import AppServices
from tula_service.usecases import recommendations
from tula_wire import BatchSchedule, Objective, Predictions, Recommendation, routes

router = APIRouter(tags=["recommendation"], dependencies=[Depends(reject_unknown_query)])


@router.get(routes.JOB_RECOMMENDATION, response_model=Recommendation)
def get_recommendation(
    job_id: str,
    caller: Caller,
    services: AppServices,
    objective: Annotated[Objective | None, Query(description="Replaces the job's objective.")] = None,
) -> Response:
    """Return the current recommendation for the job's objective, or for another objective if the query names one."""
    missed: list[float] = []
    # The store caches the rendered JSON, which is sent unchanged.
    body = recommendations.get(
        services.store, caller, job_id, objective, on_miss=lambda: missed.append(time.perf_counter())
    )
    services.metrics.fits.labels(cached="false" if missed else "true").inc()
    if missed:
        services.metrics.fit_s.observe(time.perf_counter() - missed[0])
    return Response(body, media_type="application/json")


@router.get(routes.JOB_PREDICTIONS, response_model=Predictions)
def get_predictions(job_id: str, user: CurrentUser, question: Annotated[WhatIf, Query()]) -> Response:
    """Return predictions for every combination of the given values.

    A parameter may be repeated to give several values; if a parameter is omitted, the values of the job's candidates
    are used. Omitted options have their recommended values.
    """
    return Response(recommendations.predict(*user, job_id, question), media_type="application/json")


@router.get(routes.JOB_SCHEDULE, response_model=BatchSchedule)
def get_schedule(
    job_id: str,
    user: CurrentUser,
    objective: Annotated[Objective | None, Query(description="Replaces the job's objective.")] = None,
    beta2: Annotated[float, Query(gt=0, lt=1, description="Adam's beta2 at the base batch size.")] = 0.999,
) -> Response:
    """Return a batch schedule based on the gradient noise measured in a training run, with the predicted savings."""
    return Response(recommendations.schedule(*user, job_id, objective, beta2), media_type="application/json")
