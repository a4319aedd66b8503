"""Which configurations to profile next, each with its purpose, or the reason why profiling is over."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tula_service.domain import Measure, Search
from tula_service.perfmodel.acquisition import expected_gain, log_value, most_promising
from tula_service.perfmodel.choice import Choice
from tula_service.perfmodel.columns import Column, column_of, columns_of, first_columns
from tula_service.perfmodel.optimal_design import corner_design, greedy_design, uncertainty
from tula_service.perfmodel.points import FloatArray, ObservationError
from tula_service.perfmodel.priors import Priors, generic_prior
from tula_service.perfmodel.recommend import Goal, Recommendation, recommend
from tula_service.perfmodel.step_time_model import StepTimeModel, unmeasured_model
from tula_wire.configurations import Configuration

_DESIGN_RUNS = 4
_RUNS_PER_FURTHER_TYPE = 2
_BATCHES_PER_LAUNCH = 3
_APART = 4
_WORTH_A_LAUNCH = 0.0125  # expected gain of what the goal wants small; docs/model.md says on which grids it was chosen
_DEARER, _LEAST_WEIGHT = 0.5, 1e-3


@dataclass(frozen=True)
class PlanBudget:
    """How much may be spent on profiling in all; None means without limit. GPU-seconds count ranks times seconds.

    `by_default`: `max_runs` is the default and not the user's number. `by_column`: a launch measures up to three
    batches of its column, and `max_runs` counts launches.
    """

    max_runs: int | None = 6
    max_gpu_seconds: float | None = None
    spent_gpu_seconds: float = 0.0
    steps_per_run: int = 30
    by_default: bool = False
    by_column: bool = False


@dataclass(frozen=True)
class PlannedRun:
    """One configuration to profile and its purpose in a sentence."""

    configuration: Configuration
    purpose: str


@dataclass(frozen=True)
class Plan:
    """Runs that may go in parallel. `stop_reason` is set when there are none because profiling is over.

    No runs and no reason: wait for the pending runs.
    """

    runs: tuple[PlannedRun, ...]
    stop_reason: str | None


@dataclass(frozen=True)
class _State:
    """What planning decides from. Rows are positions in `candidates`; `model` is None before the first measurement."""

    candidates: tuple[Configuration, ...]
    priors: Priors
    model: StepTimeModel | None
    measured: frozenset[Configuration]
    pending: frozenset[Configuration]
    open_rows: tuple[int, ...]
    affordable: frozenset[int]
    runs_left: int

    @property
    def num_runs(self) -> int:
        """Runs that were measured or are pending."""
        return len(self.measured) + len(self.pending)


def plan(
    search: Search,
    candidates: Sequence[Configuration],
    model: StepTimeModel | None = None,
    *,
    goal: Goal,
    recommendation: Recommendation | None = None,
    budget: PlanBudget | None = None,
    pending: Collection[Configuration] = (),
    unavailable: Collection[Configuration] = (),
) -> Plan:
    """What to profile next, deterministically.

    `full`: every candidate. `partial`: smallest and largest batch on smallest and largest cluster. `paper`: two of
    these corners, smallest batch on smallest cluster and largest on largest. `adaptive`: first the four most
    informative runs (largest cluster first), then `_refine_choice`. With `budget.by_column`, the first runs are the
    largest and the smallest cluster, where the links between nodes were probed the smallest alone, and a launch
    measures up to three batches of its cluster.

    `model` is the job's fit, or its priors before the first measurement, or None where nothing is known. Once runs were
    measured, `recommendation` is the answer that the user gets for `goal`; by default that of the same arguments.
    `pending` runs have been handed out; `unavailable` configurations failed and are neither planned nor chosen. Raises
    ObservationError without candidates.
    """
    budget = budget or PlanBudget()
    left = tuple(c for c in dict.fromkeys(candidates) if c not in set(unavailable))
    if candidates and not left:
        raise ObservationError("candidates: the run of each has failed; fix the cause and register the job again.")
    if not left:
        raise ObservationError("candidates: none is left to profile; widen the node range or the batch range.")
    state = _state_of(search, left, model, budget, frozenset(pending))
    if (stop_reason := _exhausted(state, budget)) is not None:
        return Plan((), None if state.pending else stop_reason)
    if search is Search.FULL:
        runs = [PlannedRun(left[row], "Full search: every candidate is profiled.") for row in state.open_rows]
        return Plan(tuple(runs[: state.runs_left]), None)
    if search in (Search.PARTIAL, Search.PAPER):
        return _corners(state, two=search is Search.PAPER)
    first = _first_columns(state) if budget.by_column else _next_design_runs(state, goal)
    if first is not None:
        return first
    assert state.model is not None
    if recommendation is None:
        recommendation = recommend(candidates, state.model, goal, unavailable=unavailable)
    least_gain = _WORTH_A_LAUNCH if budget.by_column else 0.0
    found = _refine_choice(state, goal, recommendation, least_gain)
    return _with_column(state, found) if budget.by_column else found


def _state_of(
    search: Search,
    candidates: tuple[Configuration, ...],
    model: StepTimeModel | None,
    budget: PlanBudget,
    pending: frozenset[Configuration],
) -> _State:
    """Which candidates are open, and which of them the budget pays for."""
    priors = Priors() if model is None else model.priors
    if model is not None and model.observations is None:
        model = None
    measured: frozenset[Configuration] = frozenset()
    if model is not None:
        rows = model.predict(candidates).measured
        measured = frozenset(c for c, known in zip(candidates, rows, strict=True) if known)
    open_rows = tuple(row for row, c in enumerate(candidates) if c not in measured and c not in pending)
    # The other searches have a fixed number of runs; a cap on runs belongs to the adaptive one.
    used = measured | pending
    limit = budget.max_runs if search is Search.ADAPTIVE and budget.max_runs is not None else len(candidates) + 1
    return _State(
        candidates=candidates,
        priors=priors,
        model=model,
        measured=measured,
        pending=pending,
        open_rows=open_rows,
        affordable=_affordable(candidates, open_rows, model, budget),
        runs_left=limit - (_launches(used) if budget.by_column else len(used)),
    )


def _launches(used: Collection[Configuration]) -> int:
    """How many launches measure these configurations, each as many batches of a column as `_batches` gives it."""
    batches = Counter(column_of(c) for c in used)
    return sum(math.ceil(count / _BATCHES_PER_LAUNCH) for count in batches.values())


def _affordable(
    candidates: Sequence[Configuration], open_rows: Sequence[int], model: StepTimeModel | None, budget: PlanBudget
) -> frozenset[int]:
    """The open rows whose run the rest of the GPU-seconds pays for; of a column, with the smaller batches before it."""
    if budget.max_gpu_seconds is None or not open_rows:
        return frozenset(open_rows)
    left = budget.max_gpu_seconds - budget.spent_gpu_seconds
    if left <= 0 or model is None:
        return frozenset() if left <= 0 else frozenset(open_rows)
    expected = model.predict(candidates).mean_s * budget.steps_per_run
    needed: dict[object, float] = {}
    affordable = []
    for row in sorted(open_rows, key=lambda row: candidates[row].local_batch_size):
        launch = column_of(candidates[row]) if budget.by_column else row
        needed[launch] = needed.get(launch, 0.0) + float(expected[row]) * candidates[row].world_size
        if needed[launch] <= left:
            affordable.append(row)
    return frozenset(affordable)


def _exhausted(state: _State, budget: PlanBudget) -> str | None:
    """Why no further run is possible, None if one is."""
    if not state.open_rows:
        return "Every candidate has been profiled."
    if state.runs_left <= 0:
        which = "the default of profiling.max_runs" if budget.by_default else "profiling.max_runs"
        one, many = ("launch", "launches") if budget.by_column else ("run", "runs")
        return f"The budget of {budget.max_runs} {one if budget.max_runs == 1 else many} ({which}) is spent."
    if not state.affordable:
        return (
            f"The rest of {budget.max_gpu_seconds:g} GPU-seconds (profiling.max_gpu_seconds) pays for no further run."
        )
    return None


def _corners(state: _State, *, two: bool) -> Plan:
    name = "The paper's search" if two else "Partial search"
    purpose = f"{name}: a corner of the space: extreme batch and cluster size."
    rows = [row for row in dict.fromkeys(corner_design(state.candidates, two=two)) if row in state.affordable]
    if not rows:
        return Plan((), None if state.pending else f"{name}: its corners have been profiled.")
    return Plan(tuple(PlannedRun(state.candidates[row], purpose) for row in rows), None)


def _first_columns(state: _State) -> Plan | None:
    """The rest of the columns that every search begins with, or the wait for those that are pending; None once done."""
    used = state.measured | state.pending
    first = first_columns(state.candidates, probed=state.priors.probed)
    begun, missing = ([one for one in first if (one in columns_of(used)) is known] for known in (True, False))
    sizes = [c.world_size for c in state.candidates]
    runs = [
        PlannedRun(c, f"Design: {_place(column.world_size, sizes)} cluster, with its other batches in one launch.")
        for column in (*begun, *missing[: state.runs_left])
        for c in _batches([*used, *_open_in(state, column)], column)
        if c not in used
    ]
    return Plan(tuple(runs), None) if runs or state.pending or state.model is None else None


def _with_column(state: _State, found: Plan) -> Plan:
    """The plan with further batches of the clusters that it asks for, which the same launches measure."""
    planned: dict[Configuration, PlannedRun] = {}
    for run in found.runs:
        column = column_of(run.configuration)
        for c in _batches(_open_in(state, column), column, run.configuration):
            planned.setdefault(c, PlannedRun(c, run.purpose))
    return Plan(tuple(planned.values()), found.stop_reason)


def _batches(among: Iterable[Configuration], column: Column, asked: Configuration | None = None) -> list[Configuration]:
    """What a launch of a column measures: `asked`, and the smallest, largest and middle batch, as many as it may."""
    batches = sorted(c for c in among if column_of(c) == column)
    wanted = [asked, *batches[:1], *batches[-1:], *batches[len(batches) // 2 :][:1]]
    return sorted([c for c in dict.fromkeys(wanted) if c is not None][:_BATCHES_PER_LAUNCH])


def _open_in(state: _State, column: Column) -> list[Configuration]:
    """The affordable open candidates of a column."""
    return [state.candidates[row] for row in state.affordable if column_of(state.candidates[row]) == column]


def _next_design_runs(state: _State, goal: Goal) -> Plan | None:
    """The runs of the design that are still to be planned, or the wait for those that are pending; None once done."""
    num_types = len({c.instance_type for c in state.candidates})
    wanted = _DESIGN_RUNS + _RUNS_PER_FURTHER_TYPE * (num_types - 1)
    missing = min(wanted - state.num_runs, state.runs_left)
    if missing > 0:
        used = state.measured | state.pending
        rows = design(state.candidates, state.priors, missing, goal=goal, allowed=state.affordable, used=used)
        chosen = [state.candidates[row] for row in rows]
        # Memory is predicted best from two batches of a type that are four apart: one follows the largest clusters.
        chosen[num_types:] = sorted(chosen[num_types:], key=lambda c: not _far_apart(c, chosen[0]))
        return Plan(tuple(PlannedRun(c, _purpose(c, state.candidates)) for c in chosen), None)
    return Plan((), None) if state.pending or state.model is None else None


def _far_apart(one: Configuration, other: Configuration) -> bool:
    """True if one local batch is at least four times the other, on the same instance type."""
    batches = sorted((one.local_batch_size, other.local_batch_size))
    return one.instance_type == other.instance_type and batches[1] >= _APART * batches[0]


def _refine_choice(state: _State, goal: Goal, recommendation: Recommendation, least_gain: float) -> Plan:
    """The next run that may change or verify the choice, or why there is none. In this order:

    1. Verification: the choice itself, if it was not measured.
    2. Contender: the candidate with the lowest confidence bound, until that is a measured one.

    2 needs an expected gain of at least `least_gain`. A knee has 1 only: it rests on the whole curve.
    """
    choice = recommendation.choice
    chosen = choice.chosen
    runnable = {state.candidates[row] for row in state.affordable}
    if chosen is not None and not chosen.measured and chosen.configuration in runnable:
        purpose = "Verification: it would be recommended, so it is measured itself."
        return Plan((PlannedRun(chosen.configuration, purpose),), None)
    if _ranks_candidates(goal) and expected_gain(recommendation, runnable) >= least_gain:
        best = most_promising(recommendation, goal.limits, runnable)
        if best is not None and not best.measured and best.configuration in runnable:
            purpose = "Contender: of all candidates it has the lowest confidence bound, so it might beat the choice."
            return Plan((PlannedRun(best.configuration, purpose),), None)
    return Plan((), _stop_reason(choice))


def _stop_reason(choice: Choice) -> str:
    if choice.chosen is None:
        return f"No further run helps: {choice.reason}"
    if not choice.chosen.measured:
        return "The rest of the budget pays for no run of the choice: it stays a prediction."
    if choice.objective.measure is Measure.CURVE and choice.knee is None:
        return f"The choice is stable: it has been measured. {choice.knee_finding.reason.capitalize()}"
    return "The choice is stable: it has been measured, and no further run is likely to better it."


def _ranks_candidates(goal: Goal) -> bool:
    """True if single candidates are better or worse for the goal; a knee is a property of the whole curve."""
    return goal.objective.measure is not Measure.CURVE


def design(
    candidates: Sequence[Configuration],
    priors: Priors,
    wanted: int,
    *,
    goal: Goal | None = None,
    allowed: Collection[int] | None = None,
    used: Collection[Configuration] = (),
) -> list[int]:
    """Row numbers of the most informative candidates; the largest cluster of a type comes before anything else of it.

    With a goal that ranks candidates, that cluster runs its would-be best batch, and what matters is the variance of
    candidates that may be chosen: one that is expected to be twice as dear as the best counts a quarter of it.
    `allowed` are the rows to choose from (all); `used` configurations have been measured or will be.
    """
    generic = generic_prior()
    # The prior's own uncertainty, not the fit's: a design fixed before measuring does as well as one re-planned after
    # every run, and all of its runs may go in parallel.
    model = unmeasured_model(replace(priors, anywhere=priors.anywhere or generic), candidates)
    value = log_value(model, candidates, goal) if goal is not None and _ranks_candidates(goal) else None
    allowed = range(len(candidates)) if allowed is None else allowed
    return greedy_design(
        uncertainty(model, candidates),
        generic.scales.noise**2,
        wanted,
        allowed=allowed,
        known=[row for row, c in enumerate(candidates) if c in used],
        first=_largest_clusters(candidates, allowed, used, value),
        weights=None if value is None else np.exp((value.min() - value) / _DEARER) + _LEAST_WEIGHT,
    )


def _largest_clusters(
    candidates: Sequence[Configuration],
    allowed: Collection[int],
    used: Collection[Configuration],
    value: FloatArray | None,
) -> list[list[int]]:
    """For each type whose largest cluster has no run yet: what may be run on it, or what would be chosen there."""
    groups = []
    for name in sorted({c.instance_type for c in candidates}):
        largest = max(c.world_size for c in candidates if c.instance_type == name)
        group = [row for row, c in enumerate(candidates) if (c.instance_type, c.world_size) == (name, largest)]
        if not any(candidates[row] in used for row in group):
            possible = [row for row in group if row in allowed]
            groups.append(possible if value is None else sorted(possible, key=lambda row: value[row])[:1])
    return groups


def _purpose(chosen: Configuration, candidates: Sequence[Configuration]) -> str:
    same = [c for c in candidates if c.instance_type == chosen.instance_type]
    cluster = _place(chosen.world_size, [c.world_size for c in same])
    batch = _place(chosen.local_batch_size, [c.local_batch_size for c in same])
    why = "so that nothing lies outside" if cluster == "largest" else "most informative for the model"
    return f"Design: {cluster} cluster with {batch} batch, {why}."


def _place(value: int, among: Sequence[int]) -> str:
    return "largest" if value == max(among) else "smallest" if value == min(among) else "middle"
