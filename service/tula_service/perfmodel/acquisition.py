"""What a run is worth for a goal: before any run, how dear each candidate is; later, how good it may be."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence

import numpy as np
from scipy import special

from tula_service.domain import Measure
from tula_service.perfmodel.choice import OF_TOTALS, Choice, Limits
from tula_service.perfmodel.columns import Column, column_of
from tula_service.perfmodel.intervals import Interval
from tula_service.perfmodel.points import FloatArray
from tula_service.perfmodel.pricing import SECONDS_PER_HOUR, Estimate, Offer, spot_slowdown
from tula_service.perfmodel.recommend import Goal, Recommendation
from tula_service.perfmodel.step_time_model import StepTimeModel
from tula_wire.configurations import Configuration

_FORBIDDEN = 50.0
_BOUND_SDS = 2.0  # replays of half of the public grids with 3 % noise: 1.5 to 2.5 give the same regret, 1 gives more


def log_value(model: StepTimeModel, candidates: Sequence[Configuration], goal: Goal) -> FloatArray:
    """log of what the goal wants small up to a constant, shape (n,); 50 where the goal forbids a candidate.

    That is time, cost, or for a compromise what `choice.Preference` says. Each candidate takes its best offer. Memory
    is not known yet, so a price per GB-hour counts as if every rank held one GB.
    """
    steps = np.log(model.predict(candidates).mean_s)
    value = np.full(len(candidates), _FORBIDDEN)
    power = 2.0 if _is_product(goal) else 1.0
    largest = goal.limits.max_global_batch_size or math.inf
    rates: dict[tuple[str, int, int], float] = {}
    for row, c in enumerate(candidates):
        cluster = (c.instance_type, c.num_nodes, c.world_size)
        if cluster not in rates:
            offers = [each[c.instance_type] for each in (goal.offers, goal.spot_offers) if c.instance_type in each]
            rates[cluster] = min((_rate(offer, c, goal) for offer in offers), default=math.inf)
        rate = rates[cluster]
        if math.isfinite(rate) and c.global_batch_size <= largest:
            time = steps[row] - math.log(c.global_batch_size) + math.log(goal.steps_factor.get(c, 1.0))
            value[row] = min(power * time + math.log(rate), _FORBIDDEN)
    return value


def _is_product(goal: Goal) -> bool:
    """Whether time x cost is to be small, which grows with the square of the step time."""
    return goal.objective.measure is Measure.COMPROMISE and goal.priced and goal.usd_per_hour_of_waiting is None


def _rate(offer: Offer, c: Configuration, goal: Goal) -> float:
    """Seconds, USD, or of a product their product, that one second of uninterrupted training takes."""
    slowdown, measure = spot_slowdown(offer.spot, c.num_nodes), goal.objective.measure
    if measure is not Measure.COST and not (measure is Measure.COMPROMISE and goal.priced):
        return slowdown
    usd_per_s = max(offer.usd_per_s(c, gb_per_rank=1.0), 1e-12)
    if measure is Measure.COMPROMISE:
        usd_per_s += (goal.usd_per_hour_of_waiting or 0.0) / SECONDS_PER_HOUR
    return slowdown * usd_per_s * (slowdown if _is_product(goal) else 1.0)


def most_promising(
    recommendation: Recommendation, limits: Limits, runnable: Collection[Configuration]
) -> Estimate | None:
    """The estimate with the lowest confidence bound (Cox and John 1992) of what is to be small; None without one.

    Of the unmeasured estimates only `runnable` ones count. Their bound is two standard deviations of the logarithm
    below the mean; a measured one and the choice count with their means. Deadline and budget come before the value: the
    least excess over the limits wins, by the same bounds. A candidate that may not fit into memory is among them, since
    its run answers whether it does.
    """
    choice = recommendation.choice
    forbidden = _forbidden(choice)
    known = {e.key for e in recommendation.estimates if e.measured or e is choice.chosen}

    def rank(estimate: Estimate) -> tuple[float, float, int, Configuration]:
        sds = 0.0 if estimate.key in known else _BOUND_SDS
        limited = ((estimate.time_s, limits.deadline_s), (estimate.cost_usd, limits.budget_usd))
        excess = (_bound(value, sds) - math.log(limit) for value, limit in limited if limit is not None)
        bound = _bound(choice.preference.value(estimate), sds)
        # Among equals the smaller cluster: its run costs less.
        c = estimate.configuration
        return (round(max([0.0, *excess]), 3), round(bound, 3), c.world_size, c)

    possible = [
        estimate
        for estimate in recommendation.estimates
        if estimate.key not in forbidden and (estimate.key in known or estimate.configuration in runnable)
    ]
    return min(possible, key=rank, default=None)


def expected_gain(recommendation: Recommendation, runnable: Collection[Configuration]) -> float:
    """How much of its value the best choice is expected to lose by the launch that promises most (0.01 = 1 %).

    It is the sum of the expected improvements (Jones 1998) of the logarithm over all unmeasured batches of a column,
    each at its better offer, since one run measures it for both. The improvement of the best batch is no larger, nor is
    that of the few which one launch measures. Infinite while the choice may break a limit.
    """
    choice = recommendation.choice
    if choice.chosen is None or not choice.within_limits_is_likely:
        return math.inf
    best, forbidden = choice.preference.value(choice.chosen), _forbidden(choice)
    gains: defaultdict[Column, dict[Configuration, float]] = defaultdict(dict)
    for estimate in recommendation.estimates:
        if not estimate.measured and estimate.configuration in runnable and estimate.key not in forbidden:
            value = choice.preference.value(estimate)
            sd = max(value.log_sd, 1e-9)
            ahead = (_bound(best, 0.0) - _bound(value, 0.0)) / sd
            density = math.exp(-0.5 * ahead**2) / math.sqrt(2.0 * math.pi)
            gain = sd * (ahead * float(special.ndtr(ahead)) + density)
            of_column = gains[column_of(estimate.configuration)]
            of_column[estimate.configuration] = max(gain, of_column.get(estimate.configuration, 0.0))
    return max((sum(of_column.values()) for of_column in gains.values()), default=0.0)


def _forbidden(choice: Choice) -> frozenset[tuple[Configuration, bool]]:
    """The keys of estimates that no deadline or budget lets in."""
    return frozenset(found.estimate.key for found in choice.excluded if found.limit not in OF_TOTALS)


def _bound(value: Interval, sds: float) -> float:
    """log of a value so many standard deviations below its mean; a large negative number if the value is 0."""
    return math.log(max(value.mean, 1e-300)) - sds * value.log_sd
