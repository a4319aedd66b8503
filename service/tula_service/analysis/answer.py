"""Computes the answer to "which configuration?" from one fit of a job's evidence, its prices and its candidates.

The same `Answer` is used for planning, recommendations, what-if predictions, expected step times and advice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import tula_wire as wire
from tula_service.analysis import job_data
from tula_service.analysis.evidence import Evidence, gather_evidence
from tula_service.analysis.hardware import look_up_figures
from tula_service.analysis.job_data import JobData
from tula_service.analysis.scaling import StatisticalEfficiency
from tula_service.analysis.transfer import build_priors, earlier_evidence
from tula_service.perfmodel.choice import Choice, choose, price_candidates, recommend
from tula_service.perfmodel.objectives import OBJECTIVES
from tula_service.perfmodel.points import ObservationError
from tula_service.perfmodel.pricing import Estimate
from tula_service.perfmodel.step_time_model import StepTimeModel, fit_step_time
from tula_wire import Configuration
from tula_wire.enums import Objective

MODEL_VERSION = "step-time-15"
"""The version of the equations and priors, in every cache key and ledger entry; increment it when either changes."""


@dataclass(frozen=True)
class Infeasible:
    """The answer if every candidate is excluded by memory or by the specification; `reason` includes the remedy."""

    data: JobData
    objective: Objective
    reason: str


@dataclass(frozen=True)
class Answer:
    """The fit of one version of a job's data, and the choice that results from the fit.

    `spec` is the job's specification, without prices that cannot be applied (`job_data.payable`). `doubtful` candidates
    may be profiled but are not recommended, since they may not fit into memory. `efficiency` is None until a run
    reports its gradient noise scale.
    """

    data: JobData
    objective: Objective
    spec: wire.JobSpec
    evidence: Evidence
    model: StepTimeModel
    choice: Choice
    efficiency: StatisticalEfficiency | None = None
    doubtful: frozenset[Configuration] = frozenset()

    @property
    def estimates(self) -> tuple[Estimate, ...]:
        """Return the estimates of all candidates, first for on-demand and then for spot capacity."""
        return self.choice.estimates

    @cached_property
    def base_batch_size(self) -> int:
        """Return the global batch size, in examples, for which the learning rate is assumed to be tuned."""
        return job_data.base_batch_size(self.data, self.evidence.candidates)

    def estimate(self, configurations: Sequence[Configuration]) -> tuple[Estimate, ...]:
        """Return estimates for the given configurations, first for on-demand and then for spot capacity.

        The estimates assume that no batch needs additional steps to reach the same quality.
        """
        goal = replace(self.choice.goal, steps_factor={})
        return price_candidates(configurations, self.model, goal, memory=self.evidence.memory.models)

    def what_if(self, configurations: Sequence[Configuration]) -> Answer:
        """Return the answer from the same fit when the choice is restricted to these configurations."""
        choice = choose(self.choice.goal, self.estimate(configurations))
        return replace(self, choice=choice, efficiency=None, doubtful=frozenset())


Analysis: TypeAlias = Answer | Infeasible


def analyse(data: JobData, objective: Objective | None = None) -> Analysis:
    """Return the answer computed from one fit of a job's evidence; by default, the job's objective is used."""
    asked: Objective = objective or data.objective
    try:
        return _answer(data, asked)
    except ObservationError as error:
        return Infeasible(data, asked, str(error))


def _answer(data: JobData, objective: Objective) -> Answer:
    evidence = gather_evidence(data)
    figures = look_up_figures(data)
    earlier = earlier_evidence(data, figures)
    prior = build_priors(earlier, figures, data.spec, evidence.candidates, observed=evidence.observed)
    model = fit_step_time(
        evidence.observed,
        form=data.spec.step_time_model,
        prior=prior,
        candidates=evidence.candidates,
        interval_scale=earlier.interval_scale,
    )
    spec = job_data.payable(data.spec, evidence.memory.models)
    base = job_data.base_batch_size(data, evidence.candidates)
    goal = job_data.build_goal(data, spec, objective, base_batch_size=base, power_w=figures.power_w)
    efficiency = None
    if (noise_scale := data.gradient_noise_scale) is not None:
        efficiency = StatisticalEfficiency(noise_scale, base)
        if OBJECTIVES[objective].needs_efficiency:
            goal = replace(
                goal, steps_factor={c: 1.0 / efficiency.of(c.global_batch_size) for c in evidence.candidates}
            )
    choice = recommend(
        evidence.candidates,
        model,
        goal,
        memory=evidence.memory.models,
        unavailable=evidence.failed,
        doubtful=evidence.doubtful,
    )
    return Answer(
        data=data,
        objective=objective,
        spec=spec,
        evidence=evidence,
        model=model,
        choice=choice,
        efficiency=efficiency,
        doubtful=evidence.doubtful & choice.ineligible,
    )
