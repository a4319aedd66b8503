"""From a fitted model to a recommendation: predict, price (equations 4a and 4b, spot interruptions included), find the
knee, choose inside the limits."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tula_service.domain import MEASURES, Measure
from tula_service.perfmodel.intervals import Interval
from tula_service.perfmodel.memory_model import MemoryModel, predict_peaks
from tula_service.perfmodel.points import FloatArray, ObservationError, column
from tula_service.perfmodel.step_time_model import StepTimeModel
from tula_wire.configurations import Configuration
from tula_wire.enums import Objective

_NEARLY_BEST = 1.1
"""A compromise gives up a tenth of the best for a smaller batch, which generalises better, and for fewer nodes."""
_LEAST_SAVING = 0.10
"""Share of the time that a doubling of the batch must save to be worth it."""
_LEAST_RANGE = 4.0
SECONDS_PER_HOUR = 3600.0
_BYTES_PER_GB = 1e9
_HOPELESS_EXPONENT = 50.0


@dataclass(frozen=True)
class Spot:
    """Interruptible capacity: Poisson interruptions per node, work since the last checkpoint is lost at each."""

    interruptions_per_node_hour: float
    checkpoint_interval_s: float = 600.0
    restart_s: float = 120.0


@dataclass(frozen=True)
class Offer:
    """What one instance type costs; prices add up, and zero means "not charged this way"."""

    usd_per_node_hour: float = 0.0
    usd_per_gb_hour: float = 0.0
    usd_per_rank_hour: float = 0.0
    spot: Spot | None = None

    def usd_per_s(self, configuration: Configuration, *, gb_per_rank: float = 0.0) -> float:
        """What a configuration costs in a second when each rank holds so many gigabytes of memory."""
        per_rank = self.usd_per_rank_hour + gb_per_rank * self.usd_per_gb_hour
        hourly = configuration.num_nodes * self.usd_per_node_hour + configuration.world_size * per_rank
        return hourly / SECONDS_PER_HOUR


@dataclass(frozen=True)
class Training:
    """How much there is to train: E epochs over D examples (equation 4a)."""

    dataset_size: float
    epochs: float = 1.0


@dataclass(frozen=True)
class Estimate:
    """One candidate with everything that a choice looks at; `terms` splits the mean step time, in seconds.

    A candidate has one estimate on demand and one on interruptible capacity (`spot`), where both have a price.
    """

    configuration: Configuration
    step_time_s: Interval
    time_s: Interval
    cost_usd: Interval
    epoch_time_s: Interval
    peak_bytes: Interval | None
    extrapolated: bool = False
    measured: bool = False
    terms: Mapping[str, float] = field(default_factory=dict)
    spot: bool = False

    @property
    def key(self) -> tuple[Configuration, bool]:
        """Unique among the estimates of one choice."""
        return self.configuration, self.spot


@dataclass(frozen=True)
class Limits:
    """What a recommendation must keep to; None means no such limit. Deadline and budget are for the whole training."""

    deadline_s: float | None = None
    budget_usd: float | None = None
    max_global_batch_size: int | None = None

    def of_totals(self, estimate: Estimate) -> list[tuple[str, Interval, float]]:
        """The deadline and the budget where they are set: (name, what the candidate takes of it, limit)."""
        both = (
            ("deadline_s", estimate.time_s, self.deadline_s),
            ("budget_usd", estimate.cost_usd, self.budget_usd),
        )
        return [(name, value, limit) for name, value, limit in both if limit is not None]

    def margin(self, estimate: Estimate) -> float:
        """Standard deviations of the logarithm from the mean to the tighter limit, negative where it is broken."""
        both = [(value, limit) for _, value, limit in self.of_totals(estimate) if value.mean > 0]
        return min((math.log(limit / value.mean) / max(value.log_sd, 1e-9) for value, limit in both), default=math.inf)


@dataclass(frozen=True)
class Goal:
    """What is to be chosen: for which training, at which prices, within which limits, and by how many steps.

    `offers` are on-demand prices and `spot_offers` prices of interruptible capacity, both by instance type; every
    instance type needs one of the two. `steps_factor` is how many times as many steps a candidate needs for the same
    quality, 1 where it is not given. `priced`: costs are money; else they are node-hours. `usd_per_hour_of_waiting` is
    what an hour of the training's duration costs its owner.
    """

    objective: Objective
    training: Training
    offers: Mapping[str, Offer]
    limits: Limits = field(default_factory=Limits)
    spot_offers: Mapping[str, Offer] = field(default_factory=dict)
    steps_factor: Mapping[Configuration, float] = field(default_factory=dict)
    priced: bool = True
    usd_per_hour_of_waiting: float | None = None

    def value(self, estimate: Estimate) -> Interval:
        """What is to be small. Of a compromise: money and waiting together where waiting has a price, else time x cost,
        which needs no scale; time alone without prices."""
        measure = MEASURES[self.objective]
        if measure is Measure.COST:
            return estimate.cost_usd
        if measure is Measure.COMPROMISE and self.priced:
            if self.usd_per_hour_of_waiting is not None:
                waiting = estimate.time_s.scaled(self.usd_per_hour_of_waiting / SECONDS_PER_HOUR)
                return estimate.cost_usd.plus(waiting)
            return estimate.time_s.times(estimate.cost_usd)
        return estimate.time_s


@dataclass(frozen=True)
class KneeFinding:
    """The global batch at the knee of a curve, or None with the reason why it has none."""

    global_batch_size: float | None
    reason: str


@dataclass(frozen=True)
class Exclusion:
    """One limit that a candidate breaks; `certain` is False when only the interval's upper end breaks it.

    `share` is what it takes of the limit, at the upper end: above 1.
    """

    estimate: Estimate
    limit: str
    certain: bool
    share: float


@dataclass(frozen=True)
class Choice:
    """A recommendation and what it was chosen from. `chosen` is None when no candidate keeps the limits.

    `estimates` are of all candidates, on demand in their order and then on spot; the `ineligible` could not be chosen.
    `excluded` has every limit that every candidate breaks, of one candidate the decisive one first.
    `within_limits_is_likely` is False when every candidate might break a limit and the one least likely to was taken.
    `best_is_excluded`: deadline or budget exclude what would have been chosen without them.
    """

    estimates: tuple[Estimate, ...]
    goal: Goal
    knee_finding: KneeFinding
    excluded: tuple[Exclusion, ...]
    within_limits_is_likely: bool = False
    best_is_excluded: bool = False
    chosen: Estimate | None = None
    runner_up: Estimate | None = None
    least_time: Estimate | None = None
    least_cost: Estimate | None = None
    balanced: Estimate | None = None
    knee: Estimate | None = None
    frontier: tuple[Estimate, ...] = ()
    ineligible: frozenset[Configuration] = frozenset()


def recommend(
    candidates: Sequence[Configuration],
    model: StepTimeModel,
    goal: Goal,
    *,
    memory: Mapping[str, MemoryModel] | None = None,
    unavailable: Collection[Configuration] = (),
    doubtful: Collection[Configuration] = (),
) -> Choice:
    """Predict, price and choose among the candidates: the answer that users get and that the planner verifies.

    `memory` is by instance type and is needed under per-GB prices. `unavailable` candidates failed to run and
    `doubtful` ones may not fit into memory: the choice takes a doubtful one only where nothing else is left, and an
    unavailable one only where everything is. Raises ObservationError when a price is missing.
    """
    estimates = price_candidates(candidates, model, goal, memory=memory)
    ineligible: frozenset[Configuration] = frozenset()
    for left_out in (frozenset(unavailable), frozenset((*unavailable, *doubtful))):
        if any(c not in left_out for c in candidates):
            ineligible = left_out
    eligible = [estimate for estimate in estimates if estimate.configuration not in ineligible]
    possible = [e for e in estimates if math.isfinite(e.time_s.mean)]
    # Of the time of equal epochs, so that a job has one knee, whatever the objective.
    times_s = [e.time_s.mean / goal.steps_factor.get(e.configuration, 1.0) for e in possible]
    knee = find_knee([e.configuration.global_batch_size for e in possible], times_s)
    return replace(choose(goal, eligible, knee), estimates=estimates, ineligible=ineligible)


def price_candidates(
    candidates: Sequence[Configuration],
    model: StepTimeModel,
    goal: Goal,
    *,
    memory: Mapping[str, MemoryModel] | None = None,
    assumed_peak: Interval | None = None,
) -> tuple[Estimate, ...]:
    """Time and cost of every candidate, on demand and then on interruptible capacity; arguments as in `recommend`.

    `assumed_peak` bytes count where no memory model is.
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
            ),
            extrapolated=bool(predicted.extrapolated[row]),
            measured=bool(predicted.measured[row]),
            terms={part: float(getattr(predicted, part)[row]) for part in parts},
        )
        for offers in (goal.offers, goal.spot_offers)
        for row, c in enumerate(candidates)
        if c.instance_type in offers
    )


def spot_slowdown(spot: Spot | None, num_nodes: int) -> float:
    """Expected wall time over uninterrupted time of a synchronous job on `num_nodes` interruptible nodes.

    With rate L = num_nodes * rate, a stretch of length tau between checkpoints takes (1/L + R) * (exp(L tau) - 1) in
    expectation (Daly 2006, without checkpoint cost); infinite when the job would practically never get through.
    """
    if spot is None:
        return 1.0
    rate = num_nodes * spot.interruptions_per_node_hour / SECONDS_PER_HOUR
    expected = rate * spot.checkpoint_interval_s
    if expected > _HOPELESS_EXPONENT:
        return math.inf
    # The same, written so that a rate near 0 divides by nothing.
    growth = math.expm1(expected) / expected if expected > 0.0 else 1.0
    return (1.0 + rate * spot.restart_s) * growth


def price(
    configuration: Configuration,
    step_time_s: Interval,
    training: Training,
    offer: Offer,
    *,
    peak_bytes: Interval | None = None,
    steps_factor: float = 1.0,
) -> Estimate:
    """Time (4a) and cost (4b) of one candidate.

    T = E * D / B * t_step * spot slowdown * steps factor; C = T * (n * usd_per_node_hour
    + world_size * (usd_per_rank_hour + peak_GB * usd_per_gb_hour)). `steps_factor` is how many more steps it needs for
    the same quality. Raises ObservationError when a price needs a peak that is not known.
    """
    slowdown = spot_slowdown(offer.spot, configuration.num_nodes)
    epoch_steps = training.dataset_size / configuration.global_batch_size * steps_factor
    epoch = step_time_s.scaled(epoch_steps * slowdown)
    time_s = epoch.scaled(training.epochs)
    cost = time_s.scaled(offer.usd_per_s(configuration))
    if offer.usd_per_gb_hour > 0.0:
        if peak_bytes is None:
            raise ObservationError("usd_per_gb_hour needs predicted memory; profile a run that reports its peak.")
        gb_usd = configuration.world_size * offer.usd_per_gb_hour / SECONDS_PER_HOUR / _BYTES_PER_GB
        cost = cost.plus(time_s.times(peak_bytes).scaled(gb_usd))
    return Estimate(
        configuration=configuration,
        step_time_s=step_time_s,
        time_s=time_s,
        cost_usd=cost,
        epoch_time_s=epoch,
        peak_bytes=peak_bytes,
        spot=offer.spot is not None,
    )


def find_knee(global_batch_size: Sequence[float] | FloatArray, time_s: Sequence[float] | FloatArray) -> KneeFinding:
    """The least batch of the curve `time_s` over global batch, both of shape (n,), whose doubling saves less than 10 %.

    The curve is the lower convex hull of log time over log batch. Unlike Kneedle's, its slope is in the curve's own
    units: neither end of the range moves the knee, and a curve that falls steeply to its end has none. Raises
    ObservationError on NaN, infinity or values that are not positive.
    """
    x = np.log2(column("global_batch_size", global_batch_size, above=0.0))
    y = np.log2(column("time_s", time_s, x.size, above=0.0))
    if not x.size or np.ptp(x) < math.log2(_LEAST_RANGE):
        return KneeFinding(None, "no knee: the candidates span less than a factor of four in global batch.")
    x, y = _lower_hull(x, y)
    slope = np.diff(y) / np.diff(x)  # of log2: what a doubling does, on each edge of the hull
    enough = np.flatnonzero(slope <= math.log2(1.0 - _LEAST_SAVING))
    at = int(enough[-1]) + 1 if enough.size else 0
    if at == x.size - 1:
        return KneeFinding(None, "no knee: every doubling of the batch saves 10 % of the time or more.")
    batch = float(2.0 ** x[at])
    return KneeFinding(
        batch, f"from a global batch of about {batch:.0f} on, a doubling saves less than 10 % of the time."
    )


def _lower_hull(x: FloatArray, y: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The corners of the largest convex curve below y: where one cluster takes over from the next, y has kinks."""
    kept: list[int] = []
    for row in np.lexsort((y, x)).tolist():
        if kept and x[row] == x[kept[-1]]:
            continue
        while len(kept) > 1:
            start, middle = kept[-2], kept[-1]
            rise = (y[middle] - y[start]) * (x[row] - x[start])
            if rise < (y[row] - y[start]) * (x[middle] - x[start]):
                break
            kept.pop()
        kept.append(row)
    return x[kept], y[kept]


def pareto_frontier(estimates: Sequence[Estimate]) -> tuple[Estimate, ...]:
    """The estimates that no other dominates by its means of time and cost, the fastest first.

    One is dominated when another is no worse in both and better in one; of equals the first one stays.
    """
    frontier: list[Estimate] = []
    for each in sorted(estimates, key=lambda e: (e.time_s.mean, e.cost_usd.mean)):
        if not frontier or each.cost_usd.mean < frontier[-1].cost_usd.mean:
            frontier.append(each)
    return tuple(frontier)


def choose(goal: Goal, estimates: Sequence[Estimate], knee: KneeFinding | None = None) -> Choice:
    """The best candidate for the goal's objective inside its limits.

    A candidate keeps the deadline and the budget only if the upper end of its interval does, so with a 90 % interval a
    broken limit is rare. If none does, the one whose mean keeps them by the widest margin is taken, and
    `within_limits_is_likely` is False. `"time_to_quality"` chooses the least time among estimates that were priced with
    `Goal.steps_factor`.
    """
    limits, finding = goal.limits, knee or KneeFinding(None, "no knee: no trade-off curve was given.")
    excluded = tuple(found for estimate in estimates for found in _breaches(estimate, limits))
    out = {found.estimate.key for found in excluded}
    allowed = [estimate for estimate in estimates if estimate.key not in out]
    likely = bool(allowed)
    if not likely:
        hopeless = {found.estimate.key for found in excluded if found.certain}
        hopeful = [estimate for estimate in estimates if estimate.key not in hopeless]
        allowed = sorted(hopeful, key=lambda e: (-limits.margin(e), _order(e)))[:1]
    if not allowed:
        return Choice(tuple(estimates), goal, finding, excluded)
    ranked, barred = _ranked(goal, allowed, finding), barred_by(excluded)
    free = _ranked(goal, [estimate for estimate in estimates if estimate.key not in barred], finding)
    # By cost, the next best is the next that is not cheaper at its predicted value, which is printed beside it: the
    # rank is by expected cost, where a cheaper but less sure one may come after the chosen one.
    cheapest = ranked[0].cost_usd.mean if MEASURES[goal.objective] is Measure.COST else 0.0
    least_time, least_cost, balanced = (
        _ranked(replace(goal, objective=each), allowed, finding)[0] for each in ("time", "cost", "balanced")
    )
    return Choice(
        estimates=tuple(estimates),
        goal=goal,
        knee_finding=finding,
        excluded=excluded,
        within_limits_is_likely=likely,
        best_is_excluded=likely and free[0].key in out,
        chosen=ranked[0],
        runner_up=next((each for each in ranked[1:] if each.cost_usd.mean >= cheapest), None),
        least_time=least_time,
        least_cost=least_cost,
        balanced=balanced,
        knee=_nearest(finding, allowed),
        frontier=pareto_frontier(allowed),
    )


def barred_by(excluded: Sequence[Exclusion]) -> set[tuple[Configuration, bool]]:
    """The keys of estimates that no deadline or budget lets in: their batch is too large, or they never finish."""
    return {found.estimate.key for found in excluded if found.limit not in ("deadline_s", "budget_usd")}


def _ranked(goal: Goal, allowed: Sequence[Estimate], finding: KneeFinding) -> list[Estimate]:
    """The estimates, of a compromise those of the frontier, from the best on."""
    measure = MEASURES[goal.objective]
    if measure is Measure.COMPROMISE:
        return _balanced(goal, pareto_frontier(allowed))
    if measure is Measure.COST:
        return sorted(allowed, key=lambda e: (e.cost_usd.expected, e.time_s.expected, _order(e)))
    by_time = sorted(allowed, key=lambda e: (e.time_s.expected, e.cost_usd.expected, _order(e)))
    knee = _nearest(finding, allowed) if measure is Measure.CURVE else None
    return by_time if knee is None else [knee, *(e for e in by_time if e is not knee)]


def _balanced(goal: Goal, frontier: Sequence[Estimate]) -> list[Estimate]:
    """The frontier by the value of the compromise, the chosen candidate first."""
    ranked = sorted(frontier, key=lambda e: (goal.value(e).expected, _order(e)))
    if goal.priced and goal.usd_per_hour_of_waiting is not None:
        return ranked
    best = goal.value(ranked[0]).expected
    near = [e for e in ranked if goal.value(e).expected <= _NEARLY_BEST * best]
    chosen = min(near, key=lambda e: (e.configuration.global_batch_size, e.configuration.num_nodes, ranked.index(e)))
    return [chosen, *(e for e in ranked if e is not chosen)]


def _nearest(finding: KneeFinding, allowed: Sequence[Estimate]) -> Estimate | None:
    """The candidate whose global batch is nearest the knee in log, the fastest of equals."""
    if finding.global_batch_size is None:
        return None
    target = math.log(finding.global_batch_size)

    def order(e: Estimate) -> tuple[float, float, tuple[int, int, str, int, int]]:
        return round(abs(math.log(e.configuration.global_batch_size) - target), 9), e.time_s.mean, _order(e)

    return min(allowed, key=order)


def _breaches(estimate: Estimate, limits: Limits) -> list[Exclusion]:
    """Every limit that a candidate breaks, those that it surely breaks first."""
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
    return sorted(broken, key=lambda found: not found.certain)


def _order(estimate: Estimate) -> tuple[int, int, str, int, int]:
    """Ties go to fewer nodes, then the smaller batch, so that the choice is deterministic."""
    c = estimate.configuration
    return (c.world_size, c.global_batch_size, c.instance_type, c.local_batch_size, c.grad_accum_steps)
