"""The whole way from a fitted model to a recommendation: predict, price, draw the trade-off curve, choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tula_service.domain import Basis, Objective
from tula_service.perfmodel.choice import Choice, Limits, choose
from tula_service.perfmodel.intervals import Interval
from tula_service.perfmodel.knee import KneeFinding, dense_batches, find_knee
from tula_service.perfmodel.memory_model import MemoryModel
from tula_service.perfmodel.points import FloatArray, Points
from tula_service.perfmodel.pricing import Estimate, Offer, Training, price, spot_slowdown
from tula_service.perfmodel.step_time_model import StepTimeModel
from tula_wire.configurations import Configuration


@dataclass(frozen=True)
class Goal:
    """What is to be chosen: for which training, at which prices (by instance type), within which limits."""

    objective: Objective
    training: Training
    offers: Mapping[str, Offer]
    limits: Limits = field(default_factory=Limits)
    level: float = 0.9


@dataclass(frozen=True)
class Curve:
    """The fitted trade-off over global batch, shape (n,): the fastest cluster at each batch, whole training."""

    global_batch_size: FloatArray
    time_s: FloatArray
    cost_usd: FloatArray


@dataclass(frozen=True)
class Recommendation:
    """Every candidate's estimate in the order given, the curve, and the choice with its reasons."""

    basis: Basis
    estimates: tuple[Estimate, ...]
    curve: Curve
    choice: Choice
    notes: tuple[str, ...]


def recommend(
    candidates: Sequence[Configuration],
    model: StepTimeModel,
    goal: Goal,
    *,
    memory: Mapping[str, MemoryModel] | None = None,
    steps_factor: Sequence[float] | None = None,
) -> Recommendation:
    """Predict, price and choose among the candidates.

    `memory` is per instance type and is needed under per-GB prices. `steps_factor` (one per candidate) multiplies the
    number of steps, for an objective of time to quality. Raises ObservationError when a price is missing.
    """
    predicted = model.predict(candidates, level=goal.level)
    estimates = price(
        candidates,
        predicted.intervals(),
        goal.training,
        goal.offers,
        peak_bytes=_peaks(candidates, memory, goal.level) if memory else None,
        extrapolated=predicted.extrapolated.tolist(),
        measured=predicted.measured.tolist(),
        terms=predicted.terms(),
        steps_factor=steps_factor,
    )
    curve = tradeoff_curve(candidates, model, goal)
    if curve.global_batch_size.size:
        knee = find_knee(curve.global_batch_size, curve.time_s)
    else:
        knee = KneeFinding(None, "no knee: every candidate has the same global batch.")
    choice = choose(goal.objective, estimates, limits=goal.limits, knee=knee)
    return Recommendation(model.basis, estimates, curve, choice, model.notes)


def tradeoff_curve(candidates: Sequence[Configuration], model: StepTimeModel, goal: Goal) -> Curve:
    """Time and cost of the fastest cluster at every global batch on a dense log grid; empty when there is one batch.

    Cost here counts nodes and ranks, with spot interruptions; per-GB prices belong to candidates, not to the curve.
    """
    batches = np.array([c.global_batch_size for c in candidates], dtype=np.float64)
    if batches.max() <= batches.min():
        none = np.zeros(0)
        return Curve(none, none, none)
    grid = dense_batches(float(batches.min()), float(batches.max()))
    clusters: dict[tuple[int, int, str, int], list[Configuration]] = {}
    for c in candidates:
        clusters.setdefault((c.num_nodes, c.world_size, c.instance_type, c.grad_accum_steps), []).append(c)
    time_s, cost_usd = np.full(grid.size, np.inf), np.full(grid.size, np.inf)
    for key, members in sorted(clusters.items()):
        nodes, world, name, steps = key
        sizes = [c.global_batch_size for c in members]
        inside = np.flatnonzero((grid >= min(sizes) * (1 - 1e-9)) & (grid <= max(sizes) * (1 + 1e-9)))
        slowdown = spot_slowdown(goal.offers[name].spot, nodes)
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
        cost = total * goal.offers[name].usd_per_s(members[0])
        faster = total < time_s[inside]
        time_s[inside[faster]], cost_usd[inside[faster]] = total[faster], cost[faster]
    known = np.isfinite(time_s)
    return Curve(grid[known], time_s[known], cost_usd[known])


def _peaks(
    candidates: Sequence[Configuration], memory: Mapping[str, MemoryModel], level: float
) -> list[Interval | None]:
    peaks: list[Interval | None] = [None] * len(candidates)
    for name, model in memory.items():
        rows = [row for row, candidate in enumerate(candidates) if candidate.instance_type == name]
        found = model.predict([float(candidates[row].local_batch_size) for row in rows], level=level)
        for row, mean, low, high in zip(rows, found.mean_bytes, found.low_bytes, found.high_bytes, strict=True):
            peaks[row] = Interval(float(mean), float(low), float(high))
    return peaks
