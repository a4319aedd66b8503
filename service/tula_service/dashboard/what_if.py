"""What-if as a person asks it: a form's fields in, a table of predictions beside the recommendation out."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BeforeValidator, Field
from starlette.responses import HTMLResponse

from tula_service.dashboard.current_user import CurrentUser
from tula_service.dashboard.templating import render
from tula_service.usecases import predictions, recommendations
from tula_wire import Objective, Recommendation, read

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)

MAX_ROWS = 12


def _several(given: Any) -> Any:
    """What was typed into one field, `2, 4`, as the values it names."""
    return [value for each in given for value in re.split(r"[\s,;]+", each) if value]


Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Counts = Annotated[list[Count], BeforeValidator(_several), Query(max_length=64)]
Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Amount = Annotated[Positive | None, BeforeValidator(lambda given: given.strip() or None)]
"""An empty field counts as absent."""


@router.get("/jobs/{job_id}/what-if")
def what_if(
    job_id: str,
    user: CurrentUser,
    nodes: Counts = [],  # noqa: B006 - FastAPI copies defaults
    global_batch: Counts = [],  # noqa: B006
    usd_per_node_hour: Amount = None,
    deadline_hours: Amount = None,
    objective: Objective | None = None,
) -> HTMLResponse:
    """A fragment for the job's page: what is allowed first, then the quickest, each beside the recommendation."""
    question = predictions.WhatIf(
        num_nodes=nodes,
        global_batch_size=global_batch,
        usd_per_node_hour=usd_per_node_hour,
        deadline_s=None if deadline_hours is None else deadline_hours * 3600,
    )
    found = predictions.predict(user.store, user.principal, job_id, question).candidates
    ranked = sorted(found, key=lambda each: (each.excluded_by is not None, each.total_time_s.value))
    best = read(Recommendation, recommendations.get(user.store, user.principal, job_id, objective)).chosen
    return HTMLResponse(
        render("what_if.html", candidates=ranked[:MAX_ROWS], left_out=max(0, len(ranked) - MAX_ROWS), best=best)
    )
