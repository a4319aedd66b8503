"""What planning knows when it decides: candidates, what was measured, what is on its way, and what is left to spend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tula_service.domain import Collective, Configuration, Search
from tula_service.perfmodel.predict.observations import FloatArray, ObservationError, StepTimeObservations
from tula_service.perfmodel.predict.priors import Priors, StepTimePrior
from tula_service.perfmodel.predict.residual import HYPOTHESES, Hypothesis
from tula_service.perfmodel.predict.step_time import StepTimeModel, fit_step_time

__all__ = ["Plan", "PlanBudget", "PlannedRun", "Situation", "situation"]


@dataclass(frozen=True)
class PlanBudget:
    """How much may be spent on profiling in all; None means without limit. GPU-seconds count ranks times seconds.

    `by_default`: nobody asked for just so many runs.
    """

    max_runs: int | None = 6
    max_gpu_seconds: float | None = None
    spent_gpu_seconds: float = 0.0
    steps_per_run: int = 30
    by_default: bool = False

    def __post_init__(self) -> None:
        """Raise ObservationError on limits that are negative."""
        for name in ("max_runs", "max_gpu_seconds", "spent_gpu_seconds", "steps_per_run"):
            value = getattr(self, name)
            if value is not None and (not math.isfinite(value) or value < 0):
                raise ObservationError(f"{name} is {value!r}; give a finite number of at least 0 or leave it out.")


@dataclass(frozen=True)
class PlannedRun:
    """One configuration to profile and, in a sentence, what it is for."""

    configuration: Configuration
    purpose: str


@dataclass(frozen=True)
class Plan:
    """Runs that may go in parallel. `stop_reason` is set when there are none because profiling is over.

    No runs and no reason: wait for the runs that are still pending.
    """

    runs: tuple[PlannedRun, ...]
    stop_reason: str | None


@dataclass(frozen=True)
class Situation:
    """Rows are positions in `candidates`; `model` is None before the first measurement."""

    candidates: tuple[Configuration, ...]
    observations: StepTimeObservations | None
    prior: Priors
    collective: Collective
    model: StepTimeModel | None
    measured: frozenset[Configuration]
    pending: frozenset[Configuration]
    open_rows: tuple[int, ...]
    affordable: frozenset[int]
    runs_left: int

    @property
    def done(self) -> int:
        """Runs that were measured or are on their way."""
        return len(self.measured) + len(self.pending)

    @property
    def types(self) -> tuple[str, ...]:
        """The instance types among the candidates, sorted."""
        return tuple(sorted({c.instance_type for c in self.candidates}))

    @property
    def step_gpu_seconds(self) -> FloatArray | None:
        """GPU-seconds of one step of each candidate as predicted, shape (n,); None before the first measurement."""
        if self.model is None:
            return None
        ranks = np.array([c.world_size for c in self.candidates], dtype=np.float64)
        return np.asarray(self.model.predict(self.candidates).mean_s * ranks)

    def fit(self, hypotheses: Sequence[Hypothesis] = HYPOTHESES) -> StepTimeModel:
        """The model of what was measured, under these beliefs about how far a job strays from the form."""
        return fit_step_time(
            self.observations,
            prior=self.prior,
            collective=self.collective,
            candidates=self.candidates,
            hypotheses=hypotheses,
        )


def situation(
    search: Search,
    candidates: tuple[Configuration, ...],
    observations: StepTimeObservations | None,
    budget: PlanBudget,
    prior: StepTimePrior | Priors | None,
    collective: Collective,
    pending: frozenset[Configuration],
) -> Situation:
    """Fit what was measured, and see which candidates are open and which of them the budget pays for."""
    now = Situation(
        candidates=candidates,
        observations=observations,
        prior=Priors.of(prior),
        collective=collective,
        model=None,
        measured=frozenset(),
        pending=pending,
        open_rows=(),
        affordable=frozenset(),
        runs_left=0,
    )
    model = None if observations is None or not len(observations) else now.fit()
    measured: frozenset[Configuration] = frozenset()
    if model is not None:
        seen = model.predict(candidates).measured
        measured = frozenset(c for c, known in zip(candidates, seen, strict=True) if known)
    open_rows = tuple(row for row, c in enumerate(candidates) if c not in measured and c not in pending)
    # The paper's two searches are what they are; a cap on runs belongs to the adaptive one.
    limit = budget.max_runs if search is Search.ADAPTIVE and budget.max_runs is not None else len(candidates) + 1
    return replace(
        now,
        model=model,
        measured=measured,
        open_rows=open_rows,
        affordable=_affordable(candidates, open_rows, model, budget),
        runs_left=limit - len(measured) - len(pending),
    )


def _affordable(
    candidates: Sequence[Configuration], open_rows: Sequence[int], model: StepTimeModel | None, budget: PlanBudget
) -> frozenset[int]:
    """The open rows whose run the rest of the GPU-seconds pays for."""
    if budget.max_gpu_seconds is None or not open_rows:
        return frozenset(open_rows)
    purse = budget.max_gpu_seconds - budget.spent_gpu_seconds
    if purse <= 0 or model is None:
        return frozenset() if purse <= 0 else frozenset(open_rows)
    expected = model.predict(candidates).mean_s * budget.steps_per_run
    return frozenset(row for row in open_rows if expected[row] * candidates[row].world_size <= purse)
