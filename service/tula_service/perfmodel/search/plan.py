"""The next configurations to profile, each with its purpose, or the reason why profiling is over."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tula_service.domain import Collective, Configuration, Objective, Search
from tula_service.perfmodel.choose.recommend import Goal, recommend
from tula_service.perfmodel.predict.memory import MemoryModel
from tula_service.perfmodel.predict.observations import ObservationError, StepTimeObservations
from tula_service.perfmodel.predict.priors import Priors, StepTimePrior, generic_prior
from tula_service.perfmodel.predict.step_time import StepTimeModel, fit_step_time, unmeasured_model
from tula_service.perfmodel.search.design import corner_design, greedy_design, uncertainty
from tula_service.perfmodel.search.promise import hopes, log_value

__all__ = ["Plan", "PlanBudget", "PlannedRun", "plan"]

_INITIAL_RUNS = 4
_INITIAL_RUNS_TOWARDS_A_GOAL = 3
_PRECISE_ENOUGH = 0.03
_WORTH_A_RUN = 0.005
_CHANCE_WORTH_A_RUN = 0.02
_DEARER, _LEAST_WEIGHT = 0.5, 1e-3


@dataclass(frozen=True)
class PlanBudget:
    """How much may be spent on profiling in all; None means without limit. GPU-seconds count ranks times seconds."""

    max_runs: int | None = 6
    max_gpu_seconds: float | None = None
    spent_gpu_seconds: float = 0.0
    steps_per_run: int = 30

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
class _Situation:
    candidates: tuple[Configuration, ...]
    open_rows: tuple[int, ...]
    measured: frozenset[Configuration]
    pending: frozenset[Configuration]
    runs_left: int
    model: StepTimeModel | None
    affordable: frozenset[int]

    @property
    def done(self) -> int:
        """Runs that were measured or are on their way."""
        return len(self.measured) + len(self.pending)


def plan(
    search: Search,
    candidates: Sequence[Configuration],
    observations: StepTimeObservations | None = None,
    *,
    goal: Goal | None = None,
    budget: PlanBudget | None = None,
    prior: StepTimePrior | Priors | None = None,
    collective: Collective = Collective.RING,
    memory: dict[str, MemoryModel] | None = None,
    pending: Collection[Configuration] = (),
    unavailable: Collection[Configuration] = (),
) -> Plan:
    """What to profile next, deterministically.

    `full`: every candidate. `partial`: smallest and largest batch on smallest and largest cluster. `adaptive`: first a
    design that holds the largest cluster: without a goal four runs that tell most about all candidates, with one three
    that tell most about those worth choosing. Then, with a goal, the would-be choice and whatever might still beat it,
    until none is likely to; without, whatever is least certain. `pending` runs are on their way;
    `unavailable` ones failed or ran out of memory and are neither planned nor chosen. Raises ObservationError without
    candidates.
    """
    budget = budget or PlanBudget()
    left = tuple(c for c in dict.fromkeys(candidates) if c not in set(unavailable))
    if not left:
        raise ObservationError("candidates: none is left to profile; widen the node range or the batch range.")
    now = _situation(search, left, observations, budget, prior, collective, frozenset(pending))
    if not now.open_rows:
        return Plan((), None if now.pending else "Every candidate has been profiled.")
    if now.runs_left <= 0:
        return Plan((), None if now.pending else f"The budget of {budget.max_runs} runs is spent.")
    if not now.affordable:
        spent = f"The rest of the budget of {budget.max_gpu_seconds:g} GPU-seconds pays for no further run."
        return Plan((), None if now.pending else spent)
    if search is Search.FULL:
        runs = [PlannedRun(left[row], "Full search: every candidate is profiled.") for row in now.open_rows]
        return Plan(tuple(runs[: now.runs_left]), None)
    if search is Search.PARTIAL:
        return _partial(now)
    return _adaptive(now, goal, prior, collective, memory)


def _situation(
    search: Search,
    candidates: tuple[Configuration, ...],
    observations: StepTimeObservations | None,
    budget: PlanBudget,
    prior: StepTimePrior | Priors | None,
    collective: Collective,
    pending: frozenset[Configuration],
) -> _Situation:
    model = None
    measured: frozenset[Configuration] = frozenset()
    if observations is not None and len(observations):
        model = fit_step_time(observations, prior=prior, collective=collective, candidates=candidates)
        seen = model.predict(candidates).measured
        measured = frozenset(c for c, known in zip(candidates, seen, strict=True) if known)
    open_rows = tuple(row for row, c in enumerate(candidates) if c not in measured and c not in pending)
    # The paper's two searches are what they are; a cap on runs belongs to the adaptive one.
    limit = budget.max_runs if search is Search.ADAPTIVE and budget.max_runs is not None else len(candidates) + 1
    affordable = frozenset(open_rows)
    if budget.max_gpu_seconds is not None:
        purse = budget.max_gpu_seconds - budget.spent_gpu_seconds
        affordable = frozenset() if purse <= 0 else affordable
        if model is not None and affordable:
            expected = model.predict(candidates).mean_s * budget.steps_per_run
            affordable = frozenset(row for row in open_rows if expected[row] * candidates[row].world_size <= purse)
    done = len(measured) + len(pending)
    return _Situation(candidates, open_rows, measured, pending, limit - done, model, affordable)


def _partial(now: _Situation) -> Plan:
    names = dict.fromkeys(corner_design(now.candidates), "a corner of the space: extreme batch and cluster size")
    rows = [row for row in names if row in now.open_rows and row in now.affordable]
    if not rows:
        return Plan((), None if now.pending else "Partial search: every corner has been profiled.")
    return Plan(tuple(PlannedRun(now.candidates[row], f"Partial search: {names[row]}.") for row in rows), None)


def _adaptive(
    now: _Situation,
    goal: Goal | None,
    prior: StepTimePrior | Priors | None,
    collective: Collective,
    memory: dict[str, MemoryModel] | None,
) -> Plan:
    types = len({c.instance_type for c in now.candidates})
    first = _INITIAL_RUNS if _wanted(goal) is None else _INITIAL_RUNS_TOWARDS_A_GOAL
    initial = min(first + 2 * (types - 1), now.runs_left + now.done)
    if now.done < initial or now.model is None:
        if now.pending and now.model is None and now.done >= initial:
            return Plan((), None)
        return Plan(_informative(now, initial - now.done, prior, collective, _wanted(goal)), None)
    if now.pending:
        return Plan((), None)
    if goal is None:
        worst = float(np.median(now.model.predict(now.candidates).log_sd))
        if worst <= _PRECISE_ENOUGH:
            return Plan((), f"Every prediction is known to about {100 * worst:.1f} %.")
        return Plan(_informative(now, 1, prior, collective, None), None)
    return _towards_choice(now, now.model, goal, memory)


def _wanted(goal: Goal | None) -> Goal | None:
    """The goal, if single candidates are better or worse for it: a knee is a matter of the whole curve."""
    return None if goal is None or goal.objective is Objective.KNEE else goal


def _informative(
    now: _Situation, wanted: int, prior: StepTimePrior | Priors | None, collective: Collective, goal: Goal | None
) -> tuple[PlannedRun, ...]:
    """The most informative open candidates; the largest cluster of a type comes before anything else of it.

    Towards a goal, that cluster runs its would-be best batch, and what matters is the variance of candidates that may
    be chosen: one that is expected to be twice as dear as the best counts a quarter of it.
    """
    given, generic = Priors.of(prior), generic_prior(collective)
    # The prior's own uncertainty, not the fit's: a design fixed before measuring does as well as one re-planned after
    # every run, and every run of it may go in parallel.
    model = unmeasured_model(replace(given, anywhere=given.anywhere or generic), now.candidates)
    value = None if goal is None else log_value(model, now.candidates, goal)
    taken = {*now.measured, *now.pending}
    groups = []
    for name in sorted({c.instance_type for c in now.candidates}):
        largest = max(c.world_size for c in now.candidates if c.instance_type == name)
        group = [row for row, c in enumerate(now.candidates) if (c.instance_type, c.world_size) == (name, largest)]
        if not any(now.candidates[row] in taken for row in group):
            possible = [row for row in group if row in now.affordable]
            groups.append(possible if value is None else sorted(possible, key=lambda row: value[row])[:1])
    rows = greedy_design(
        uncertainty(model, now.candidates),
        generic.scales.noise**2,
        wanted,
        allowed=now.affordable,
        known=[row for row, c in enumerate(now.candidates) if c in taken],
        first=groups,
        weights=None if value is None else np.exp((value.min() - value) / _DEARER) + _LEAST_WEIGHT,
    )
    return tuple(PlannedRun(now.candidates[row], _purpose(now.candidates[row], now.candidates)) for row in rows)


def _purpose(chosen: Configuration, candidates: Sequence[Configuration]) -> str:
    same = [c for c in candidates if c.instance_type == chosen.instance_type]
    sizes, batches = [c.world_size for c in same], [c.local_batch_size for c in same]
    cluster = (
        "largest" if chosen.world_size == max(sizes) else "smallest" if chosen.world_size == min(sizes) else "middle"
    )
    batch = (
        "largest"
        if chosen.local_batch_size == max(batches)
        else "smallest"
        if chosen.local_batch_size == min(batches)
        else "middle"
    )
    why = "nothing extrapolates beyond it" if cluster == "largest" else "it tells most about the rest"
    return f"Design: {cluster} cluster with {batch} batch; {why}."


def _towards_choice(
    now: _Situation,
    model: StepTimeModel,
    goal: Goal,
    memory: dict[str, MemoryModel] | None,
) -> Plan:
    result = recommend(now.candidates, model, goal, memory=memory)
    choice = result.choice
    rows = {c: row for row, c in enumerate(now.candidates)}
    chosen = choice.chosen
    if chosen is not None and not chosen.measured and rows[chosen.configuration] in now.affordable:
        why = "Verification: it would be recommended, so it is measured itself."
        return Plan((PlannedRun(chosen.configuration, why),), None)
    affordable = [(hope, c) for hope, c in hopes(choice, result.estimates, goal) if rows[c] in now.affordable]
    if affordable:
        # Among equals the smaller cluster: its run costs less.
        hope, best = max(affordable, key=lambda pair: (round(pair[0], 3), -pair[1].world_size, pair[1]))
        if not choice.within_limits_is_likely and hope > _CHANCE_WORTH_A_RUN:
            why = f"Contender: it might keep the limits, with a chance of {100 * hope:.1f} %."
            return Plan((PlannedRun(best, why),), None)
        if choice.within_limits_is_likely and hope > _WORTH_A_RUN:
            why = f"Contender: it might beat the choice; expected gain {100 * hope:.1f} %."
            return Plan((PlannedRun(best, why),), None)
    if chosen is None:
        return Plan((), f"No further run helps: {choice.reason}")
    if not chosen.measured:
        return Plan((), "The rest of the budget pays for no run of the choice: it stays a prediction.")
    if goal.objective is Objective.KNEE and choice.knee is None:
        return Plan((), f"The choice is stable: it has been measured. {choice.knee_finding.reason.capitalize()}")
    return Plan((), "The choice is stable: it has been measured, and no further run is likely to better it.")
