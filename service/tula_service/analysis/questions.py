"""The three questions that take a fit, each a function from plain data to plain data: another process may answer it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import tula_wire as wire
from tula_service.analysis import explanation
from tula_service.analysis.answer import Analysis, Answer, analyse
from tula_service.analysis.job_data import JobData
from tula_service.analysis.plan import PlanDecision, plan_of
from tula_service.analysis.what_if import WhatIf, configurations_of, specification_at
from tula_service.perfmodel.points import ObservationError
from tula_service.perfmodel.pricing import Estimate
from tula_wire import Configuration
from tula_wire.enums import Basis, Objective

_WITHOUT_IDENTITY: Final = {"id": "", "job_id": "", "created_at": "1970-01-01T00:00:00Z"}


@dataclass(frozen=True)
class Findings:
    """What is stored of the answer to "which configuration?" for one version of a job's data.

    `body` is the JSON of a `wire.Recommendation` without `id`, `job_id` and `created_at`. `savings` are the shares of
    time saved against the smallest and the largest batch. `run_ids` are of the runs that were fitted, and `prices` of
    the specification, by instance type. `decision` is the plan, None where none was asked for.
    """

    data_version: int
    objective: Objective
    basis: Basis
    chosen: wire.Candidate | None
    savings: tuple[float | None, float | None]
    interval_scale: float | None
    run_ids: tuple[str, ...]
    prices: Mapping[str, Mapping[str, Any]]
    body: str
    decision: PlanDecision | None = None


def findings_of(data: JobData, objective: Objective | None = None, plan: bool = False) -> Findings:
    """Fit once, choose for this objective or the job's own, with `plan` decide what to profile next, and render."""
    analysis = analyse(data, objective)
    decision = plan_of(analysis) if plan else None
    fields = _WITHOUT_IDENTITY | _fields(analysis, decision)
    recommendation = wire.Recommendation.model_validate(fields)
    answer = analysis if isinstance(analysis, Answer) else None
    return Findings(
        data_version=data.data_version,
        objective=analysis.objective,
        basis=recommendation.basis,
        chosen=recommendation.chosen,
        savings=explanation.savings(recommendation.chosen, recommendation.candidates),
        interval_scale=None if answer is None else answer.model.interval_scale,
        run_ids=() if answer is None else answer.evidence.run_ids,
        prices={cluster.instance_type: cluster.price.model_dump() for cluster in data.spec.cluster},
        body=recommendation.model_dump_json(exclude=set(_WITHOUT_IDENTITY)),
        decision=decision,
    )


def _fields(analysis: Analysis, decision: PlanDecision | None) -> dict[str, object]:
    if not isinstance(analysis, Answer):
        return explanation.infeasible_fields(analysis)
    data = analysis.data
    error = data.cross_validated_error if data.cross_validated_runs == analysis.evidence.run_ids else None
    if decision is not None and decision.cross_validated_error is not None:
        error = decision.cross_validated_error
    return explanation.recommendation_fields(analysis, error)


def predictions_of(data: JobData, job_id: str, question: WhatIf) -> str:
    """The JSON of the `wire.Predictions` of every configuration asked about.

    Raises InvalidInput for a question that no configuration answers, ObservationError where nothing can be predicted.
    """
    answer = analyse(replace(data, spec=specification_at(data.spec, question)))
    if not isinstance(answer, Answer):
        raise ObservationError(answer.reason)
    asked = answer.what_if(configurations_of(answer, question))
    return wire.Predictions(
        job_id=job_id,
        basis=asked.model.basis,
        candidates=explanation.candidates_of(asked, asked.estimates),
        model=explanation.model_report(asked),
    ).model_dump_json()


def expectation_of(data: JobData, configuration: Configuration) -> Estimate | None:
    """What is expected of a run about to start; None where no model can predict it."""
    answer = analyse(data)
    return answer.estimate([configuration])[0] if isinstance(answer, Answer) else None
