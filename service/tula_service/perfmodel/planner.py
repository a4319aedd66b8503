"""What planning knows when it decides: candidates, what was measured, what is on its way, and what is left to spend."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tula_service.domain import Objective, Search, StepTimeForm
from tula_service.perfmodel.acquisition import Doubt, hopes, log_value
from tula_service.perfmodel.choice import Choice
from tula_service.perfmodel.memory_model import MemoryModel
from tula_service.perfmodel.optimal_design import corner_design, greedy_design, uncertainty
from tula_service.perfmodel.points import FloatArray, ObservationError, StepTimeObservations
from tula_service.perfmodel.priors import Priors, StepTimePrior, generic_prior
from tula_service.perfmodel.recommend import Goal, Recommendation, recommend
from tula_service.perfmodel.residual_gp import HYPOTHESES, SURPRISING, Hypothesis
from tula_service.perfmodel.step_time_model import StepTimeModel, fit_step_time, unmeasured_model
from tula_wire.configurations import Configuration


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
    form: StepTimeForm
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
            form=self.form,
            candidates=self.candidates,
            hypotheses=hypotheses,
        )


def situation(
    search: Search,
    candidates: tuple[Configuration, ...],
    observations: StepTimeObservations | None,
    budget: PlanBudget,
    prior: StepTimePrior | Priors | None,
    form: StepTimeForm,
    pending: frozenset[Configuration],
) -> Situation:
    """Fit what was measured, and see which candidates are open and which of them the budget pays for."""
    now = Situation(
        candidates=candidates,
        observations=observations,
        prior=Priors.of(prior),
        form=form,
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
    form: StepTimeForm = StepTimeForm.OVERLAP,
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
    now = situation(search, left, observations, budget, prior, form, frozenset(pending))
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


_DEARER, _LEAST_WEIGHT = 0.5, 1e-3


def weighing(goal: Goal | None) -> Goal | None:
    """The goal, if single candidates are better or worse for it: a knee is a matter of the whole curve."""
    return None if goal is None or goal.objective is Objective.KNEE else goal


def informative_runs(
    now: Situation, wanted: int, goal: Goal | None, *, thrifty: bool = False
) -> tuple[PlannedRun, ...]:
    """The most informative open candidates; the largest cluster of a type comes before anything else of it.

    Towards a goal, that cluster runs its would-be best batch, and what matters is the variance of candidates that may
    be chosen: one that is expected to be twice as dear as the best counts a quarter of it. `thrifty`, once a model is
    there, divides what a run tells by the root of its GPU-seconds.
    """
    goal = weighing(goal)
    generic = generic_prior()
    # The prior's own uncertainty, not the fit's: a design fixed before measuring does as well as one re-planned after
    # every run, and every run of it may go in parallel.
    model = unmeasured_model(replace(now.prior, anywhere=now.prior.anywhere or generic), now.candidates)
    value = None if goal is None else log_value(model, now.candidates, goal)
    costs = now.step_gpu_seconds if thrifty else None
    taken = {*now.measured, *now.pending}
    rows = greedy_design(
        uncertainty(model, now.candidates),
        generic.scales.noise**2,
        wanted,
        allowed=now.affordable,
        known=[row for row, c in enumerate(now.candidates) if c in taken],
        first=_largest_clusters(now, value),
        weights=None if value is None else np.exp((value.min() - value) / _DEARER) + _LEAST_WEIGHT,
        costs=None if costs is None else np.sqrt(costs),
    )
    return tuple(
        PlannedRun(now.candidates[row], _purpose(now.candidates[row], now.candidates, thrifty=thrifty)) for row in rows
    )


def _largest_clusters(now: Situation, value: FloatArray | None) -> list[list[int]]:
    """For each type whose largest cluster has no run yet: what may be run on it, or what would be chosen there."""
    groups = []
    for name in now.types:
        largest = max(c.world_size for c in now.candidates if c.instance_type == name)
        group = [row for row, c in enumerate(now.candidates) if (c.instance_type, c.world_size) == (name, largest)]
        if not any(now.candidates[row] in now.measured | now.pending for row in group):
            possible = [row for row in group if row in now.affordable]
            groups.append(possible if value is None else sorted(possible, key=lambda row: value[row])[:1])
    return groups


def _purpose(chosen: Configuration, candidates: Sequence[Configuration], *, thrifty: bool) -> str:
    same = [c for c in candidates if c.instance_type == chosen.instance_type]
    cluster = _place(chosen.world_size, [c.world_size for c in same])
    batch = _place(chosen.local_batch_size, [c.local_batch_size for c in same])
    why = "nothing extrapolates beyond it" if cluster == "largest" else "it tells most about the rest"
    if thrifty:
        why = "predictions are still wide, and for what it costs it tells most about the rest"
    return f"Design: {cluster} cluster with {batch} batch; {why}."


def _place(value: int, among: Sequence[int]) -> str:
    return "largest" if value == max(among) else "smallest" if value == min(among) else "middle"


_WORTH_A_RUN = 0.005
_CHANCE_WORTH_A_RUN = 0.02
_KNOWN_WELL = 0.03
_CHEAP = 0.2
_MEDIAN_OF_NORMAL = 0.67


def towards_choice(
    now: Situation,
    model: StepTimeModel,
    goal: Goal,
    memory: Mapping[str, MemoryModel] | None,
    *,
    design: int,
    cheap: int,
) -> Plan:
    """The next run towards the choice, or why there is none.

    The design may be a run short of `design`. That run comes first where the would-be choice was not measured: then the
    choice is open, and the run tells most about what may be chosen. Where it was, the run waits until nothing is hoped
    for any more. Then, while predictions are expected to err by more than 3 %, it and up to `cheap` further runs are
    made that tell most about all candidates; the further ones only where each costs at most a fifth of what was spent.
    A knee makes neither: it rests on the whole curve, and its four runs were made for that.
    """
    result = recommend(now.candidates, model, goal, memory=memory)
    choice = result.choice
    rows = {c: row for row, c in enumerate(now.candidates)}
    chosen = choice.chosen
    unfinished = weighing(goal) is not None and now.done < design
    if unfinished and now.runs_left > 1 and not (chosen is not None and chosen.measured):
        return Plan(informative_runs(now, 1, goal, thrifty=True), None)
    if chosen is not None and not chosen.measured and rows[chosen.configuration] in now.affordable:
        why = "Verification: it would be recommended, so it is measured itself."
        return Plan((PlannedRun(chosen.configuration, why),), None)
    found = hopes(choice, result.estimates, goal, doubts=_doubts(now, model, result, goal))
    affordable = [(hope, c) for hope, c in found if rows[c] in now.affordable]
    if affordable:
        # Among equals the smaller cluster: its run costs less.
        hope, best = max(affordable, key=lambda pair: (round(pair[0], 3), -pair[1].world_size, pair[1]))
        if not choice.within_limits_is_likely and hope > _CHANCE_WORTH_A_RUN:
            why = f"Contender: it might keep the limits, with a chance of {100 * hope:.1f} %."
            return Plan((PlannedRun(best, why),), None)
        if choice.within_limits_is_likely and hope > _WORTH_A_RUN:
            why = f"Contender: it might beat the choice; expected gain {100 * hope:.1f} %."
            return Plan((PlannedRun(best, why),), None)
    if weighing(goal) is not None and _expected_error(now, model) > _KNOWN_WELL:
        worth_it = now if unfinished else replace(now, affordable=_cheap(now, design + cheap))
        if worth_it.affordable:
            return Plan(informative_runs(worth_it, 1, None, thrifty=True), None)
    return Plan((), _reason(choice))


def _cheap(now: Situation, most: int) -> frozenset[int]:
    """The affordable rows whose run adds little to what was spent; none once `most` runs were made."""
    costs = now.step_gpu_seconds
    if costs is None or now.done >= most:
        return frozenset()
    spent = sum(float(costs[row]) for row, c in enumerate(now.candidates) if c in now.measured)
    return frozenset(row for row in now.affordable if costs[row] <= _CHEAP * spent)


def _doubts(now: Situation, model: StepTimeModel, result: Recommendation, goal: Goal) -> Mapping[Configuration, Doubt]:
    """What each candidate would be were this a job whose clusters differ more than any form can know."""
    if goal.objective is Objective.KNEE or not result.choice.within_limits_is_likely:
        return {}
    usual, surprising = (m.predict(now.candidates) for m in (model, now.fit((SURPRISING,))))
    shifts = np.log(surprising.mean_s / usual.mean_s)
    return {
        c: Doubt(float(shift), float(sd))
        for c, shift, sd in zip(now.candidates, shifts, surprising.log_sd, strict=True)
    }


def _expected_error(now: Situation, model: StepTimeModel) -> float:
    """Median over what was not measured of the median relative error that the model owns up to; 0 if all was."""
    predicted = model.predict(now.candidates)
    open_sd = predicted.log_sd[~predicted.measured]
    return _MEDIAN_OF_NORMAL * float(np.median(open_sd)) if open_sd.size else 0.0


def _reason(choice: Choice) -> str:
    if choice.chosen is None:
        return f"No further run helps: {choice.reason}"
    if not choice.chosen.measured:
        return "The rest of the budget pays for no run of the choice: it stays a prediction."
    if choice.objective is Objective.KNEE and choice.knee is None:
        return f"The choice is stable: it has been measured. {choice.knee_finding.reason.capitalize()}"
    return "The choice is stable: it has been measured, and no further run is likely to better it."
