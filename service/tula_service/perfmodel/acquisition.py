"""What a run is worth for a goal: before any run, how dear each candidate is; later, its expected improvement."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from tula_service.domain import Measure
from tula_service.perfmodel.choice import OF_TOTALS
from tula_service.perfmodel.intervals import Interval
from tula_service.perfmodel.points import FloatArray
from tula_service.perfmodel.pricing import SECONDS_PER_HOUR, Offer, spot_slowdown
from tula_service.perfmodel.recommend import Goal, Recommendation
from tula_service.perfmodel.step_time_model import StepTimeModel
from tula_wire.configurations import Configuration

_FORBIDDEN = 50.0
_LARGEST_LOG_SD = 0.4
_SURPRISE_PROBABILITY = 0.1
_DOF = 4.0
_QUANTILES = special.stdtrit(_DOF, (np.arange(400) + 0.5) / 400)


@dataclass(frozen=True)
class ModelDoubt:
    """A candidate in a job that strays far from the form: the shift of its log step time, and its deviation there."""

    log_shift: float
    log_sd: float


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


def expected_improvements(
    recommendation: Recommendation, goal: Goal, *, doubts: Mapping[Configuration, ModelDoubt] | None = None
) -> list[tuple[float, Configuration]]:
    """What measuring each unmeasured candidate is expected to gain, as a share of the choice's value.

    Expected improvement E[(1 - value / best)+] times the chance that it keeps deadline and budget; log values follow
    Student's t with four degrees of freedom, since grids hold more surprises than a fit expects. For the same reason a
    tenth of it is what the candidate gains under its `doubts`: a few runs are evidence neither for a job that strays
    far from the form nor against it. While no candidate is likely to keep the limits, or none does by its mean, that
    chance alone counts. A candidate that may not fit into memory is among them, since its run answers whether it does.
    Empty for the knee, which rests on the whole curve.
    """
    choice, limits = recommendation.choice, goal.limits
    if choice.objective.measure is Measure.CURVE:
        return []
    forbidden = {f.estimate.key for f in choice.excluded if f.limit not in OF_TOTALS}
    best = None if choice.chosen is None else choice.preference.value(choice.chosen).mean
    if best is not None and best <= 0.0:
        return []
    found = []
    for estimate in recommendation.estimates:
        c = estimate.configuration
        if estimate.measured or estimate.key in forbidden:
            continue
        chance = _probability_below(estimate.time_s, limits.deadline_s)
        chance = min(chance, _probability_below(estimate.cost_usd, limits.budget_usd))
        value = choice.preference.value(estimate)
        if choice.within_limits_is_likely and best is not None and value.mean > 0.0:
            chance *= _improvement(math.log(value.mean / best), _log_sd(value), (doubts or {}).get(c))
        found.append((chance, c))
    return found


def _log_sd(value: Interval) -> float:
    return min(max(value.log_sd, 1e-6), _LARGEST_LOG_SD)


def _probability_below(value: Interval, limit: float | None) -> float:
    """Probability that a value keeps a limit; 1 without one."""
    if limit is None or value.mean <= 0.0:
        return 1.0
    return float(special.stdtr(_DOF, math.log(limit / value.mean) / _log_sd(value)))


def _improvement(log_ratio: float, log_sd: float, doubt: ModelDoubt | None) -> float:
    usual = _expected_improvement(log_ratio, log_sd)
    if doubt is None:
        return usual
    surprising = _expected_improvement(log_ratio + doubt.log_shift, doubt.log_sd)
    return (1.0 - _SURPRISE_PROBABILITY) * usual + _SURPRISE_PROBABILITY * surprising


def _expected_improvement(log_ratio: float, log_sd: float) -> float:
    """E[(1 - exp(X))+] for X with this median and scale: a mean over equally likely quantiles of Student's t."""
    return float(np.maximum(-np.expm1(log_ratio + log_sd * _QUANTILES), 0.0).mean())
