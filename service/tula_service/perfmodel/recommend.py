"""The whole way from a fitted model to a recommendation: predict, price, draw the trade-off curve, choose."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tula_service.domain import Objective
from tula_service.perfmodel.choice import Choice, Limits, choose
from tula_service.perfmodel.knee import KneeFinding, dense_batches, find_knee
from tula_service.perfmodel.memory_model import MemoryModel, predict_peaks
from tula_service.perfmodel.points import FloatArray, ObservationError, Points
from tula_service.perfmodel.pricing import Estimate, Offer, Training, price, spot_slowdown
from tula_service.perfmodel.step_time_model import StepTimeModel
from tula_wire.configurations import Configuration


@dataclass(frozen=True)
class Goal:
    """What is to be chosen: for which training, at which prices, within which limits, and by how many steps.

    `offers` are on-demand prices and `spot_offers` prices of interruptible capacity, both by instance type; every
    instance type needs one of the two. `steps_factor` is how many times as many steps a candidate needs for the same
    quality, 1 where it is not given. `priced` and `usd_per_hour_of_waiting`: see `choice.Preference`.
    """

    objective: Objective
    training: Training
    offers: Mapping[str, Offer]
    limits: Limits = field(default_factory=Limits)
    spot_offers: Mapping[str, Offer] = field(default_factory=dict)
    steps_factor: Mapping[Configuration, float] = field(default_factory=dict)
    priced: bool = True
    usd_per_hour_of_waiting: float | None = None

    def choose(self, estimates: Sequence[Estimate], knee: KneeFinding | None = None) -> Choice:
        """The best of the estimates for this goal."""
        return choose(
            self.objective,
            estimates,
            limits=self.limits,
            knee=knee,
            priced=self.priced,
            usd_per_hour_of_waiting=self.usd_per_hour_of_waiting,
        )


@dataclass(frozen=True)
class Recommendation:
    """The estimates (on demand in the order of the candidates, then on spot), and the choice with reasons.

    `ineligible` candidates have estimates but could not be chosen.
    """

    estimates: tuple[Estimate, ...]
    choice: Choice
    ineligible: frozenset[Configuration] = frozenset()


def recommend(
    candidates: Sequence[Configuration],
    model: StepTimeModel,
    goal: Goal,
    *,
    memory: Mapping[str, MemoryModel] | None = None,
    unavailable: Collection[Configuration] = (),
    doubtful: Collection[Configuration] = (),
) -> Recommendation:
    """Predict, price and choose among the candidates: the answer that users get and that the planner verifies.

    `memory` is by instance type and is needed under per-GB prices. `unavailable` candidates failed to run and
    `doubtful` ones may not fit into memory: the choice takes a doubtful one only where nothing else is left, and an
    unavailable one only where everything is. Raises ObservationError when a price is missing.
    """
    estimates = price_candidates(candidates, model, goal, memory=memory)
    knee = find_knee(*tradeoff_curve(candidates, model, goal))
    ineligible, eligible = _eligible(estimates, frozenset(unavailable), frozenset(doubtful))
    choice = goal.choose(eligible, knee)
    return Recommendation(estimates, choice, ineligible)


def _eligible(
    estimates: Sequence[Estimate], unavailable: frozenset[Configuration], doubtful: frozenset[Configuration]
) -> tuple[frozenset[Configuration], list[Estimate]]:
    """The configurations that the choice leaves out, and the estimates of the others: at least one."""
    for ineligible in (unavailable | doubtful, unavailable):
        eligible = [estimate for estimate in estimates if estimate.configuration not in ineligible]
        if eligible:
            return ineligible, eligible
    return frozenset(), list(estimates)


def price_candidates(
    candidates: Sequence[Configuration],
    model: StepTimeModel,
    goal: Goal,
    *,
    memory: Mapping[str, MemoryModel] | None = None,
) -> tuple[Estimate, ...]:
    """Time and cost of every candidate, on demand and then on interruptible capacity; arguments as in `recommend`."""
    offered = {*goal.offers, *goal.spot_offers}
    if missing := sorted({c.instance_type for c in candidates} - offered):
        raise ObservationError(f"no price for instance type {missing[0]!r}; add an offer for it.")
    estimates: list[Estimate] = []
    for offers in (goal.offers, goal.spot_offers):
        rows = [c for c in candidates if c.instance_type in offers]
        if not rows:
            continue
        predicted = model.predict(rows)
        intervals, terms, peaks = predicted.intervals(), predicted.terms(), predict_peaks(memory or {}, rows)
        estimates += [
            price(
                c,
                intervals[row],
                goal.training,
                offers[c.instance_type],
                peak_bytes=peaks[row],
                extrapolated=bool(predicted.extrapolated[row]),
                measured=bool(predicted.measured[row]),
                terms=terms[row],
                steps_factor=goal.steps_factor.get(c, 1.0),
            )
            for row, c in enumerate(rows)
        ]
    return tuple(estimates)


def tradeoff_curve(
    candidates: Sequence[Configuration], model: StepTimeModel, goal: Goal
) -> tuple[FloatArray, FloatArray]:
    """Global batches on a dense log grid, and the time of the whole training on the fastest cluster at each."""
    batches = [float(c.global_batch_size) for c in candidates]
    grid = dense_batches(min(batches), max(batches))
    clusters: dict[tuple[int, int, str, int], list[Configuration]] = {}
    for c in candidates:
        clusters.setdefault((c.num_nodes, c.world_size, c.instance_type, c.grad_accum_steps), []).append(c)
    offers = {**goal.spot_offers, **goal.offers}  # on demand where the type has such a price
    time_s = np.full(grid.size, np.inf)
    for key, members in sorted(clusters.items()):
        nodes, world, name, steps = key
        sizes = [c.global_batch_size for c in members]
        inside = np.flatnonzero((grid >= min(sizes) * (1 - 1e-9)) & (grid <= max(sizes) * (1 + 1e-9)))
        slowdown = spot_slowdown(offers[name].spot, nodes)
        if not inside.size or not np.isfinite(slowdown):
            continue
        local = np.maximum(grid[inside] / (world * steps), 1.0)
        ones = np.ones(inside.size)
        points = Points.columns(
            num_nodes=ones * nodes,
            world_size=ones * world,
            local_batch_size=local,
            grad_accum_steps=ones * steps,
            instance_type=[name] * inside.size,
        )
        total = (
            goal.training.epochs * goal.training.dataset_size / grid[inside] * model.predict(points).mean_s * slowdown
        )
        time_s[inside] = np.minimum(time_s[inside], total)
    known = np.isfinite(time_s)
    return grid[known], time_s[known]
