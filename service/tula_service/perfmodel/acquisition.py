"""What candidates promise for a goal: before any run, by how much they are dearer; after some, what a run may gain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from tula_service.domain import Objective
from tula_service.perfmodel.choice import Choice
from tula_service.perfmodel.intervals import Interval
from tula_service.perfmodel.points import FloatArray
from tula_service.perfmodel.pricing import Estimate, spot_slowdown
from tula_service.perfmodel.recommend import Goal
from tula_service.perfmodel.step_time_model import StepTimeModel
from tula_wire.configurations import Configuration

_FORBIDDEN = 50.0
_WIDEST = 0.4
_CHANCE_OF_SURPRISE = 0.1
_DOF = 4.0
_QUANTILES = special.stdtrit(_DOF, (np.arange(400) + 0.5) / 400)


@dataclass(frozen=True)
class Doubt:
    """A candidate in a job that strays far from the form: how its log step time moves, and the deviation it gets."""

    log_shift: float
    log_sd: float


def log_value(model: StepTimeModel, candidates: Sequence[Configuration], goal: Goal) -> FloatArray:
    """log of time (or cost) of a training up to a constant, shape (n,); large where the goal forbids a candidate.

    Memory is not known yet, so a price per GB-hour counts as if every rank held one.
    """
    steps = np.log(model.predict(candidates).mean_s)
    limits, found = goal.limits, np.full(len(candidates), _FORBIDDEN)
    for row, c in enumerate(candidates):
        offer = goal.offers.get(c.instance_type)
        if offer is None or c.num_nodes > (limits.max_num_nodes or math.inf):
            continue
        if not (limits.min_global_batch_size or 0) <= c.global_batch_size <= (limits.max_global_batch_size or math.inf):
            continue
        slowdown = spot_slowdown(offer.spot, c.num_nodes)
        by_rank = replace(offer, usd_per_rank_hour=offer.usd_per_rank_hour + offer.usd_per_gb_hour)
        usd = by_rank.usd_per_s(c) if goal.objective is Objective.COST else 1.0
        if math.isfinite(slowdown):
            found[row] = steps[row] - math.log(c.global_batch_size) + math.log(slowdown * max(usd, 1e-12))
    return found


def hopes(
    choice: Choice, estimates: Sequence[Estimate], goal: Goal, *, doubts: Mapping[Configuration, Doubt] | None = None
) -> list[tuple[float, Configuration]]:
    """What measuring each unmeasured candidate may be expected to gain, as a share of the choice's value.

    Expected improvement E[(1 - value / best)+] times the chance that it keeps deadline and budget; log values follow
    Student's t with four degrees, since grids hold more surprises than any fit says. For the same reason one part in
    ten of it is what the candidate's doubt promises: a few runs speak neither for a job that strays far from the form
    nor against it. While no candidate is likely to keep the limits, or none does by its mean, that chance alone counts.
    """
    if choice.objective is Objective.KNEE:
        return []
    hard = {f.estimate.key for f in choice.excluded if f.limit not in ("deadline_s", "budget_usd")}
    best = None if choice.chosen is None else _value(choice.chosen, choice.objective).mean
    found = []
    for estimate in estimates:
        if estimate.measured or estimate.key in hard or (best is not None and best <= 0.0):
            continue
        chance = _chance_below(estimate.time_s, goal.limits.deadline_s)
        chance = min(chance, _chance_below(estimate.cost_usd, goal.limits.budget_usd))
        value = _value(estimate, choice.objective)
        if choice.within_limits_is_likely and best is not None and value.mean > 0.0:
            chance *= _gain(math.log(value.mean / best), _log_sd(value), (doubts or {}).get(estimate.configuration))
        found.append((chance, estimate.configuration))
    return found


def _value(estimate: Estimate, objective: Objective) -> Interval:
    return estimate.cost_usd if objective is Objective.COST else estimate.time_s


def _log_sd(value: Interval) -> float:
    return min(max(value.log_sd, 1e-6), _WIDEST)


def _chance_below(value: Interval, limit: float | None) -> float:
    """Probability that a value keeps a limit; 1 without one."""
    if limit is None or value.mean <= 0.0:
        return 1.0
    return float(special.stdtr(_DOF, math.log(limit / value.mean) / _log_sd(value)))


def _gain(log_ratio: float, log_sd: float, doubt: Doubt | None) -> float:
    gain = _expected_improvement(log_ratio, log_sd)
    if doubt is None:
        return gain
    surprise = _expected_improvement(log_ratio + doubt.log_shift, doubt.log_sd)
    return (1.0 - _CHANCE_OF_SURPRISE) * gain + _CHANCE_OF_SURPRISE * surprise


def _expected_improvement(log_ratio: float, log_sd: float) -> float:
    """E[(1 - exp(X))+] for X with this median and scale: a mean over equally likely quantiles of Student's t."""
    return float(np.maximum(-np.expm1(log_ratio + log_sd * _QUANTILES), 0.0).mean())
