"""Makes a recommendation from a fitted model: predicts and prices all candidates, and applies the objective."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from tula_service.perfmodel.intervals import Interval
from tula_service.perfmodel.memory_model import MemoryModel, predict_peaks
from tula_service.perfmodel.objectives import OBJECTIVES, Goal, KneeFinding, find_knee
from tula_service.perfmodel.points import ObservationError
from tula_service.perfmodel.pricing import Estimate, Limits, build_menu, pareto_frontier, price, tie_break
from tula_service.perfmodel.step_time_form import RUN_NOISE
from tula_service.perfmodel.step_time_model import StepTimeModel
from tula_wire.configurations import Configuration, Variant
from tula_wire.options import Options

_NO_KNEE = KneeFinding(None, "no knee: there is no candidate within the limits.")
_LEAST_CHANGED = (
    "no candidate within the limits is clearly better, and of the candidates that may be as good, this one changes the "
    "fewest options."
)
_WORTH_A_SWITCH = 0.02  # a larger expected gain justifies a switch even if it may be noise, so a tie costs at most this


@dataclass(frozen=True)
class Exclusion:
    """A limit that a candidate exceeds; `certain` is False if only the upper end of its interval exceeds the limit.

    `share` is the upper end of the candidate's interval divided by the limit, which is more than 1.
    """

    estimate: Estimate
    limit: str
    certain: bool
    share: float


@dataclass(frozen=True)
class Choice:
    """A recommendation and the estimates considered; `chosen` is None if no estimate is within the limits.

    `estimates` contains all candidates in their order, first for on-demand and then for spot capacity; `ineligible`
    candidates were not considered for the choice. `excluded` contains every limit that a candidate exceeds; the first
    limit listed for a candidate is the decisive one. `within_limits_is_likely` is False if every candidate might exceed
    a limit; the chosen candidate is then the one least likely to do so. `best_is_excluded` is True if the deadline or
    the budget excludes the candidate that would otherwise have been chosen. `merit` is the end of a sentence that says
    why the chosen candidate is best. `expected_best` is the candidate that the objective ranks first; another candidate
    is chosen only if it changes fewer options and may be equally good. `menu` contains up to five estimates on the
    frontier of the candidates that the objective may choose, fastest first, including the chosen one.
    """

    estimates: tuple[Estimate, ...]
    goal: Goal
    excluded: tuple[Exclusion, ...]
    merit: str = ""
    within_limits_is_likely: bool = False
    best_is_excluded: bool = False
    chosen: Estimate | None = None
    expected_best: Estimate | None = None
    runner_up: Estimate | None = None
    least_time: Estimate | None = None
    least_cost: Estimate | None = None
    balanced: Estimate | None = None
    frontier: tuple[Estimate, ...] = ()
    menu: tuple[Estimate, ...] = ()
    ineligible: frozenset[Configuration] = frozenset()

    @functools.cached_property
    def knee(self) -> KneeFinding:
        """Return the knee of the frontier, computed on first use because planning rarely needs it."""
        return find_knee(self.frontier) if self.frontier else _NO_KNEE

    @property
    def barred(self) -> set[tuple[Configuration, bool]]:
        """Return the keys of estimates that no deadline or budget could admit, such as those with too large a batch."""
        refused = {e.key for e in self.estimates if not self.goal.may_choose(e.configuration)}
        return _hard(self.excluded) | (refused - ({self.chosen.key} if self.chosen else set()))


def recommend(
    candidates: Sequence[Configuration],
    model: StepTimeModel,
    goal: Goal,
    *,
    memory: Mapping[Variant, MemoryModel] | None = None,
    unavailable: Collection[Configuration] = (),
    doubtful: Collection[Configuration] = (),
) -> Choice:
    """Return the choice among the candidates. The service shows it to users, and the planner verifies it.

    `memory` has the memory model of each variant and is required if prices are per GB. `unavailable` candidates failed
    to run, and `doubtful` candidates may not fit into memory. A doubtful candidate is chosen only if there is no other,
    and an unavailable candidate only if all candidates are unavailable. A candidate whose options differ from the base
    is chosen only if its launch has been measured, or if no other candidate is available. Raises ObservationError if a
    price is missing.
    """
    estimates = price_candidates(candidates, model, goal, memory=memory)
    ineligible: frozenset[Configuration] = frozenset()
    unlaunched, unavailable = unlaunched_options(candidates, model), frozenset(unavailable)
    for left_out in (unavailable, unavailable | unlaunched, unavailable | unlaunched | frozenset(doubtful)):
        if any(c not in left_out for c in candidates):
            ineligible = left_out
    eligible = [estimate for estimate in estimates if estimate.configuration not in ineligible]
    return replace(choose(goal, eligible), estimates=estimates, ineligible=ineligible)


def unlaunched_options(candidates: Sequence[Configuration], model: StepTimeModel) -> frozenset[Configuration]:
    """Return the candidates whose options differ from the base and whose launch has no measurement yet."""
    rows = [] if model.observations is None else model.observations.points.rows()
    launched = {(variant, nodes, world, steps) for variant, nodes, world, _, steps in rows}
    return frozenset(
        c
        for c in candidates
        if c.options != model.priors.base and (c.variant, c.num_nodes, c.world_size, c.grad_accum_steps) not in launched
    )


def price_candidates(
    candidates: Sequence[Configuration],
    model: StepTimeModel,
    goal: Goal,
    *,
    memory: Mapping[Variant, MemoryModel] | None = None,
    assumed_peak: Interval | None = None,
) -> tuple[Estimate, ...]:
    """Return the time and the cost of every candidate, first for on-demand and then for spot capacity.

    The arguments are as in `recommend`; a variant without a memory model has a peak of `assumed_peak` bytes.
    """
    if missing := sorted({c.instance_type for c in candidates} - {*goal.offers, *goal.spot_offers}):
        raise ObservationError(f"no price for instance type {missing[0]!r}; add an offer for it.")
    predicted, peaks = model.predict(candidates), predict_peaks(memory or {}, candidates)
    intervals, parts = predicted.intervals(), ("compute_s", "exposed_comm_s", "input_s")
    return tuple(
        replace(
            price(
                c,
                intervals[row],
                goal.training,
                offers[c.instance_type],
                peak_bytes=peaks[row] or assumed_peak,
                steps_factor=goal.steps_factor.get(c, 1.0),
                power_w=goal.power_w.get(c.instance_type),
            ),
            extrapolated=bool(predicted.extrapolated[row]),
            measured=bool(predicted.measured[row]),
            known_sd=float(predicted.known_sd[row]),
            terms={part: float(getattr(predicted, part)[row]) for part in parts},
        )
        for offers in (goal.offers, goal.spot_offers)
        for row, c in enumerate(candidates)
        if c.instance_type in offers
    )


def choose(goal: Goal, estimates: Sequence[Estimate]) -> Choice:
    """Return the candidate that best meets the goal's objective within the goal's limits.

    A candidate with changed options must be clearly better than candidates with fewer changes. Two values are tied if
    they differ by at most 2 % and the 90 % interval of their ratio, excluding the noise of a run, includes 1. Among the
    options tied with the best value, the options with the fewest changes from the current script are chosen.

    A candidate meets the deadline and the budget only if the upper end of its 90 % interval does, so the training run
    rarely exceeds them. If no candidate meets both, the candidate whose mean meets them by the widest margin is chosen,
    and `within_limits_is_likely` is False.
    """
    limits, objective = goal.limits, OBJECTIVES[goal.objective]
    excluded = tuple(exclusion for estimate in estimates for exclusion in _breaches(estimate, limits))
    out = {exclusion.estimate.key for exclusion in excluded}
    allowed = [estimate for estimate in estimates if estimate.key not in out]
    likely = bool(allowed)
    if not likely:
        hopeless = {exclusion.estimate.key for exclusion in excluded if exclusion.certain}
        hopeful = [estimate for estimate in estimates if estimate.key not in hopeless]
        allowed = sorted(hopeful, key=lambda e: (-limits.margin(e), tie_break(e)))[:1]
    if not allowed:
        return Choice(tuple(estimates), goal, excluded)
    ranked, hard = objective.rank(goal, allowed), _hard(excluded)
    best, merit = ranked[0], objective.merit(goal, allowed)
    if (nearest := _least_changed(goal, allowed, best)) is not best:
        ranked, merit = [nearest, *(e for e in ranked if e is not nearest)], _LEAST_CHANGED
    choosable = [estimate for estimate in allowed if goal.may_choose(estimate.configuration)]
    free = objective.rank(goal, [estimate for estimate in estimates if estimate.key not in hard])
    frontier = pareto_frontier(allowed)
    return Choice(
        estimates=tuple(estimates),
        goal=goal,
        excluded=excluded,
        merit=merit,
        within_limits_is_likely=likely,
        best_is_excluded=likely and free[0].key in out,
        chosen=ranked[0],
        expected_best=best,
        runner_up=objective.next_best(ranked),
        least_time=OBJECTIVES["time"].rank(goal, allowed)[0],
        least_cost=OBJECTIVES["cost"].rank(goal, allowed)[0],
        balanced=OBJECTIVES["balanced"].rank(goal, allowed)[0],
        frontier=frontier,
        menu=build_menu(pareto_frontier(choosable), ranked[0]),
    )


def _least_changed(goal: Goal, allowed: Sequence[Estimate], best: Estimate) -> Estimate:
    """Return the best estimate with the fewest changed options, among the options that may be as good as the best."""
    alike = defaultdict[Options, list[Estimate]](list)
    for estimate in allowed if goal.options else ():
        alike[estimate.configuration.options].append(estimate)
    if len(alike) < 2:
        return best
    ranked = {options: OBJECTIVES[goal.objective].rank(goal, estimates) for options, estimates in alike.items()}
    values: dict[Options, Interval] = {}
    for options, estimates in ranked.items():
        least = min(estimates, key=lambda e: goal.value(e).expected)
        # An unmeasured value is not tied merely because its interval is wide, since a run will verify the value. Each
        # interval is therefore narrowed to at most the noise of a run.
        values[options] = least.narrowed(goal.value(least), min(least.known_sd, RUN_NOISE))

    def is_clearly_worse(options: Options) -> bool:
        ratio = values[best.configuration.options].over(values[options])
        return ratio is not None and (ratio.high < 1.0 or ratio.mean < 1.0 - _WORTH_A_SWITCH)

    as_good = [options for options in ranked if not is_clearly_worse(options)]
    nearest = min(as_good, key=goal.changes)
    return best if nearest == best.configuration.options else ranked[nearest][0]


def _hard(excluded: Sequence[Exclusion]) -> set[tuple[Configuration, bool]]:
    return {exclusion.estimate.key for exclusion in excluded if exclusion.limit not in ("deadline_s", "budget_usd")}


def _breaches(estimate: Estimate, limits: Limits) -> list[Exclusion]:
    """Return every limit that a candidate exceeds, starting with the limits that even its mean exceeds."""
    batch, most = estimate.configuration.global_batch_size, limits.max_global_batch_size
    broken = []
    if most is not None and batch > most:
        broken.append(Exclusion(estimate, "max_global_batch_size", True, batch / most))
    if not math.isfinite(estimate.time_s.mean):
        return [*broken, Exclusion(estimate, "interruptions", True, math.inf)]
    broken += [
        Exclusion(estimate, name, value.mean > limit, value.high / limit)
        for name, value, limit in limits.of_totals(estimate)
        if value.high > limit
    ]
    return sorted(broken, key=lambda exclusion: not exclusion.certain)
