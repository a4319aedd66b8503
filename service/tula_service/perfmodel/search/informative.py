"""The open candidates whose runs tell most about all others, or about those worth choosing, each with its purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tula_service.domain import Configuration, Objective
from tula_service.perfmodel.choose.recommend import Goal
from tula_service.perfmodel.predict.observations import FloatArray
from tula_service.perfmodel.predict.priors import generic_prior
from tula_service.perfmodel.predict.step_time import unmeasured_model
from tula_service.perfmodel.search.design import greedy_design, uncertainty
from tula_service.perfmodel.search.promise import log_value
from tula_service.perfmodel.search.situation import PlannedRun, Situation

__all__ = ["informative_runs", "weighing"]

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
    generic = generic_prior(now.collective)
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
