"""Defines the objectives, which rank the candidates, choose one, and explain the choice.

To add an objective, write a class in this file, add it to `OBJECTIVES`, add its name to `tula_wire/enums.py` and
`docs/commands.md`, and write a test. If it needs inputs beyond time and cost, add them to `Goal` as fields, and fill
them in `analysis/job_data.py:build_goal`.
"""

# ruff: noqa: ARG002 - an objective may ignore arguments that other objectives use

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tula_service.perfmodel.guard import AccuracyGuard
from tula_service.perfmodel.intervals import Interval
from tula_service.perfmodel.pricing import (
    SECONDS_PER_HOUR,
    Estimate,
    Limits,
    Offer,
    Training,
    pareto_frontier,
    tie_break,
)
from tula_wire.configurations import Configuration
from tula_wire.enums import Objective as Name
from tula_wire.format import multiple
from tula_wire.options import Options

_NEARLY_BEST = 1.1
"""`balanced` accepts a value up to 10 % above the best for a smaller batch, which generalises better, or for fewer
nodes with the same batch.
"""
_KNEE_WITHIN = 3.0
"""The search for a knee ends at this multiple of the shortest time, because slower candidates would shift the knee
although nobody would choose them.
"""
_FEWEST_FOR_A_KNEE = 3
_ROUNDING = 1e-6  # share of the range of log cost; a curve that bends by less is treated as straight


@dataclass(frozen=True)
class Goal:
    """The goal of a choice: the objective, the amount of training, the prices and the limits.

    `offers` has on-demand prices and `spot_offers` the prices of interruptible capacity, both by instance type; every
    instance type needs one of the two. `steps_factor` has the factor by which a candidate needs more steps to reach the
    same quality; a candidate without an entry has the factor 1. `priced` is True if costs are in dollars rather than
    node-hours. `usd_per_hour_of_waiting` is the cost of each hour that somebody waits for the training to finish.
    `guard` decides which batches preserve the accuracy; None allows all batches. `batch_normalization` is True if the
    network has batch normalization layers, which lose accuracy if they normalize over many examples. `sharded` is True
    if ranks share the optimizer's work. `power_w` is the power of a rank's device by instance type, for either all
    types or none. `options` has the values of each option of the job, starting with the value that the script currently
    uses.
    """

    objective: Name
    training: Training
    offers: Mapping[str, Offer]
    limits: Limits = field(default_factory=Limits)
    spot_offers: Mapping[str, Offer] = field(default_factory=dict)
    steps_factor: Mapping[Configuration, float] = field(default_factory=dict)
    priced: bool = True
    usd_per_hour_of_waiting: float | None = None
    guard: AccuracyGuard | None = None
    batch_normalization: bool = False
    sharded: bool = False
    power_w: Mapping[str, Interval] = field(default_factory=dict)
    options: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def normalized_too_widely(self, local_batch_size: int) -> int:
        """Return by how many examples a micro-step exceeds twice the base batch, the limit for batch normalization."""
        if not self.batch_normalization or self.guard is None:
            return 0
        return max(0, local_batch_size - 2 * self.guard.base_batch_size)

    def value(self, estimate: Estimate) -> Interval:
        """Return the value by which the objective ranks an estimate; a smaller value is better."""
        return OBJECTIVES[self.objective].value(self, estimate)

    def changes(self, chosen: Options) -> tuple[int, list[int]]:
        """Return the number of options that differ from the script's, and the index of each value.

        The value that the script currently uses has the index 0.
        """
        places = [list(self.options[name]).index(word) for name, word in chosen]
        return sum(place > 0 for place in places), places

    def may_choose(self, configuration: Configuration) -> bool:
        """Return False if the objective rejects the configuration's global batch regardless of time and cost."""
        return OBJECTIVES[self.objective].may_choose(self, configuration.global_batch_size)


@dataclass(frozen=True)
class KneeFinding:
    """The candidate at the knee of the cost-time frontier, or None and the reason why there is no knee."""

    estimate: Estimate | None
    reason: str


class Objective:
    """The objective that minimises time, and the base class of the other objectives.

    `needs_prices` is True if the objective requires prices. `needs_efficiency` is True if estimates must include the
    additional steps with which a batch matches the quality of the smallest batch. `by_cost` is True if tables sort
    candidates by cost. `is_compromise` is True if the explanation compares the choice with the fastest candidate.
    """

    needs_prices = False
    needs_efficiency = False
    by_cost = False
    is_compromise = False

    def value(self, goal: Goal, estimate: Estimate) -> Interval:
        """Return the value by which the objective ranks an estimate; a smaller value is better."""
        return estimate.time_s

    def may_choose(self, goal: Goal, global_batch_size: int) -> bool:
        """Return False if the objective rejects this global batch."""
        return True

    def rank(self, goal: Goal, allowed: Sequence[Estimate]) -> list[Estimate]:
        """Return the estimates, best first; `allowed` must not be empty."""
        return sorted(allowed, key=lambda e: (e.time_s.expected, e.cost_usd.expected, tie_break(e)))

    def next_best(self, ranked: Sequence[Estimate]) -> Estimate | None:
        """Return the estimate that would be chosen without the best one, or None if there are no other estimates."""
        return ranked[1] if len(ranked) > 1 else None

    def merit(self, goal: Goal, allowed: Sequence[Estimate]) -> str:
        """Return a clause that explains why the best estimate is best."""
        return "it is expected to be the fastest of the candidates within the limits."


class _TimeToQuality(Objective):
    needs_efficiency = True


class _Cost(Objective):
    needs_prices = True
    by_cost = True

    def value(self, goal: Goal, estimate: Estimate) -> Interval:
        return estimate.cost_usd

    def rank(self, goal: Goal, allowed: Sequence[Estimate]) -> list[Estimate]:
        return sorted(allowed, key=lambda e: (e.cost_usd.expected, e.time_s.expected, tie_break(e)))

    def next_best(self, ranked: Sequence[Estimate]) -> Estimate | None:
        # Since the ranking is by expected cost, an estimate after the best may have a lower predicted cost that is less
        # certain. Users see both predicted costs, so estimates with a lower predicted cost than the best are skipped.
        return next((e for e in ranked[1:] if e.cost_usd.mean >= ranked[0].cost_usd.mean), None)

    def merit(self, goal: Goal, allowed: Sequence[Estimate]) -> str:
        return "it is expected to be the cheapest of the candidates within the limits."


class _Compromise(Objective):
    """Minimises the product of time and cost, which requires no weights, or only the time if there are no prices."""

    is_compromise = True

    def value(self, goal: Goal, estimate: Estimate) -> Interval:
        return estimate.time_s.times(estimate.cost_usd) if goal.priced else estimate.time_s

    def rank(self, goal: Goal, allowed: Sequence[Estimate]) -> list[Estimate]:
        frontier = pareto_frontier(allowed)
        return sorted(frontier, key=lambda e: (self.value(goal, e).expected, tie_break(e)))

    def merit(self, goal: Goal, allowed: Sequence[Estimate]) -> str:
        if goal.priced:
            return "it is the best compromise: its time multiplied by its cost is the smallest of all candidates."
        return super().merit(goal, allowed)


class _Balanced(_Compromise):
    """A compromise among batches that preserve the accuracy; minimises the total cost if waiting has a price."""

    def value(self, goal: Goal, estimate: Estimate) -> Interval:
        if goal.priced and goal.usd_per_hour_of_waiting is not None:
            return estimate.cost_usd.plus(estimate.time_s.scaled(goal.usd_per_hour_of_waiting / SECONDS_PER_HOUR))
        return super().value(goal, estimate)

    def may_choose(self, goal: Goal, global_batch_size: int) -> bool:
        # If the user has set a largest batch, all batches up to it are acceptable.
        if goal.guard is None or goal.limits.max_global_batch_size is not None:
            return True
        return goal.guard.allows(global_batch_size)

    def rank(self, goal: Goal, allowed: Sequence[Estimate]) -> list[Estimate]:
        kept = self._kept(goal, allowed)
        ranked = super().rank(goal, kept)
        if goal.priced and goal.usd_per_hour_of_waiting is not None:
            return ranked

        def preference(estimate: Estimate) -> tuple[int, int, int, int]:
            c = estimate.configuration
            too_widely = goal.normalized_too_widely(c.local_batch_size)
            return c.global_batch_size, too_widely, c.num_nodes, ranked.index(estimate)

        chosen = min(self._near(goal, ranked), key=preference)
        return [chosen, *(e for e in ranked if e is not chosen)]

    def _near(self, goal: Goal, ranked: Sequence[Estimate]) -> list[Estimate]:
        """Return the estimates whose values are within 10 % of the best, in the given order."""
        best = min(self.value(goal, e).expected for e in ranked)
        return [e for e in ranked if self.value(goal, e).expected <= _NEARLY_BEST * best]

    def merit(self, goal: Goal, allowed: Sequence[Estimate]) -> str:
        kept = self._kept(goal, allowed)
        among = "" if len(kept) == len(allowed) else ", considering only batches that keep the accuracy"
        if goal.priced and goal.usd_per_hour_of_waiting is not None:
            return f"it has the lowest expected cost including the cost of waiting{among}."
        ranked = self.rank(goal, allowed)
        if self.value(goal, ranked[0]).expected > min(self.value(goal, e).expected for e in ranked):
            what = "time multiplied by cost is" if goal.priced else "time is"
            local = self._of_a_smaller_local_batch(goal, ranked)
            return f"it has the smallest batch of the candidates whose {what} within 10 % of the minimum{among}{local}."
        return super().merit(goal, allowed)[:-1] + f"{among}."

    def _of_a_smaller_local_batch(self, goal: Goal, ranked: Sequence[Estimate]) -> str:
        chosen = ranked[0].configuration
        equal = (e.configuration for e in self._near(goal, ranked))
        most = max(c.local_batch_size for c in equal if c.global_batch_size == chosen.global_batch_size)
        if goal.normalized_too_widely(most) <= goal.normalized_too_widely(chosen.local_batch_size):
            return ""
        return (
            f", with {chosen.local_batch_size} examples per rank and micro-step because networks with batch "
            "normalization lose accuracy if a micro-step exceeds twice the base batch"
        )

    def _kept(self, goal: Goal, allowed: Sequence[Estimate]) -> list[Estimate]:
        """Return the estimates whose batch preserves the accuracy; if there are none, those with the smallest batch."""
        kept = [e for e in allowed if self.may_choose(goal, e.configuration.global_batch_size)]
        least = min(e.configuration.global_batch_size for e in allowed)
        return kept or [e for e in allowed if e.configuration.global_batch_size == least]


class _Knee(_Compromise):
    def rank(self, goal: Goal, allowed: Sequence[Estimate]) -> list[Estimate]:
        ranked, knee = super().rank(goal, allowed), find_knee(pareto_frontier(allowed)).estimate
        return ranked if knee is None else [knee, *(e for e in ranked if e is not knee)]

    def merit(self, goal: Goal, allowed: Sequence[Estimate]) -> str:
        knee = find_knee(pareto_frontier(allowed))
        if knee.estimate is not None:
            return f"it is the candidate at the knee: {knee.reason}"
        return f"{super().merit(goal, allowed)[:-1]}; {knee.reason}"


class _Energy(Objective):
    """Minimises the energy used by the accelerators, or the time if no run has reported energy yet."""

    def value(self, goal: Goal, estimate: Estimate) -> Interval:
        return estimate.energy_kwh or estimate.time_s

    def rank(self, goal: Goal, allowed: Sequence[Estimate]) -> list[Estimate]:
        return sorted(allowed, key=lambda e: (self.value(goal, e).expected, e.time_s.expected, tie_break(e)))

    def merit(self, goal: Goal, allowed: Sequence[Estimate]) -> str:
        if goal.power_w:
            return "it is expected to use the least energy of the candidates within the limits."
        return f"no run has reported energy (NVML measures it on NVIDIA devices), so {super().merit(goal, allowed)}"


OBJECTIVES: Final[Mapping[Name, Objective]] = {
    "balanced": _Balanced(),
    "time": Objective(),
    "cost": _Cost(),
    "knee": _Knee(),
    "time_to_quality": _TimeToQuality(),
    "energy": _Energy(),
}


def find_knee(frontier: Sequence[Estimate]) -> KneeFinding:
    """Return the knee of log cost over log time on the frontier, found with Kneedle (Satopaa 2011).

    The search covers the frontier up to three times the shortest time. On the frontier, additional time saves much
    money before the knee, and little after the knee. A curve of time over batch would be unsuitable, because Kneedle
    normalises both axes, which cancels the job's coefficients.
    """
    near = [e for e in frontier if e.time_s.mean <= _KNEE_WITHIN * frontier[0].time_s.mean and e.cost_usd.mean > 0.0]
    if len(near) < _FEWEST_FOR_A_KNEE:
        return KneeFinding(
            None,
            "no knee: cost over time has fewer than three points on its frontier within three times the least time.",
        )
    from kneed import KneeLocator  # imported here because it imports scipy.signal, which is slow

    log_time = np.log([e.time_s.mean for e in near])
    log_cost = np.log([e.cost_usd.mean for e in near])
    at = KneeLocator(log_time, log_cost, S=0.0, curve="convex", direction="decreasing").knee
    row = 0 if at is None else int(np.argmin(np.abs(log_time - at)))
    chord = np.interp(log_time, log_time[[0, -1]], log_cost[[0, -1]])
    if (chord - log_cost)[row] <= _ROUNDING * (log_cost[0] - log_cost[-1]):
        return KneeFinding(None, "no knee: the frontier of cost over time has no bend.")
    knee = near[row]
    saved = math.exp(float(log_cost[0])) / knee.cost_usd.mean
    return KneeFinding(
        knee,
        f"the fastest candidate costs {multiple(saved)} times as much, and slower candidates save little more.",
    )
