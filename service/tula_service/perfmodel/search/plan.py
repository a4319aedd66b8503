"""The next configurations to profile, each with its purpose, or the reason why profiling is over."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from tula_service.domain import Collective, Configuration, Search
from tula_service.perfmodel.choose.recommend import Goal
from tula_service.perfmodel.predict.memory import MemoryModel
from tula_service.perfmodel.predict.observations import ObservationError, StepTimeObservations
from tula_service.perfmodel.predict.priors import Priors, StepTimePrior
from tula_service.perfmodel.search.design import corner_design
from tula_service.perfmodel.search.informative import informative_runs, weighing
from tula_service.perfmodel.search.situation import Plan, PlanBudget, PlannedRun, Situation, situation
from tula_service.perfmodel.search.towards import towards_choice

__all__ = ["Plan", "PlanBudget", "PlannedRun", "plan"]

_INITIAL_RUNS = 4
_INITIAL_RUNS_TOWARDS_A_GOAL = 3
_RUNS_PER_FURTHER_TYPE = 2
_CHEAP_RUNS = 2
_PRECISE_ENOUGH = 0.03


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
    until none is likely to, a fourth designed run where it is needed, and up to two cheap ones where predictions are
    still wide (`towards_choice`); without, whatever is least certain. `pending` runs are on their way; `unavailable`
    ones failed or ran out of memory and are neither planned nor chosen. Raises ObservationError without candidates.
    """
    budget = budget or PlanBudget()
    left = tuple(c for c in dict.fromkeys(candidates) if c not in set(unavailable))
    if not left:
        raise ObservationError("candidates: none is left to profile; widen the node range or the batch range.")
    now = situation(search, left, observations, budget, prior, collective, frozenset(pending))
    if not now.open_rows:
        return Plan((), None if now.pending else "Every candidate has been profiled.")
    if now.runs_left <= 0:
        which = "the default of profiling.max_runs" if budget.by_default else "profiling.max_runs"
        spent = f"The budget of {budget.max_runs} run{'s' if budget.max_runs != 1 else ''} ({which}) is spent."
        return Plan((), None if now.pending else spent)
    if not now.affordable:
        spent = (
            f"The rest of {budget.max_gpu_seconds:g} GPU-seconds (profiling.max_gpu_seconds) pays for no further run."
        )
        return Plan((), None if now.pending else spent)
    if search is Search.FULL:
        runs = [PlannedRun(left[row], "Full search: every candidate is profiled.") for row in now.open_rows]
        return Plan(tuple(runs[: now.runs_left]), None)
    if search is Search.PARTIAL:
        return _partial(now)
    return _adaptive(now, goal, memory, failed=len(set(unavailable)))


def _partial(now: Situation) -> Plan:
    names = dict.fromkeys(corner_design(now.candidates), "a corner of the space: extreme batch and cluster size")
    rows = [row for row in names if row in now.open_rows and row in now.affordable]
    if not rows:
        return Plan((), None if now.pending else "Partial search: every corner has been profiled.")
    return Plan(tuple(PlannedRun(now.candidates[row], f"Partial search: {names[row]}.") for row in rows), None)


def _adaptive(now: Situation, goal: Goal | None, memory: dict[str, MemoryModel] | None, *, failed: int) -> Plan:
    first = _INITIAL_RUNS if weighing(goal) is None else _INITIAL_RUNS_TOWARDS_A_GOAL
    more_types = _RUNS_PER_FURTHER_TYPE * (len(now.types) - 1)
    initial = min(first + more_types, now.runs_left + now.done)
    if now.done < initial or now.model is None:
        if now.pending and now.model is None and now.done >= initial:
            return Plan((), None)
        return Plan(informative_runs(now, initial - now.done, goal), None)
    if now.pending:
        return Plan((), None)
    if goal is None:
        worst = float(np.median(now.model.predict(now.candidates).log_sd))
        if worst <= _PRECISE_ENOUGH:
            return Plan((), f"Every prediction is known to about {100 * worst:.1f} %.")
        return Plan(informative_runs(now, 1, None), None)
    design = _INITIAL_RUNS + more_types
    # One that failed would be followed by the next cheapest, and where none of a kind can run, by all of them.
    cheap = max(0, _CHEAP_RUNS - failed)
    return towards_choice(now, now.model, goal, memory, design=design, cheap=cheap)
