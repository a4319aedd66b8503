"""Compute apart from communication by public means: every second step of a profiling run goes without synchronising."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from tula_agent.measure.sync_split import Split
from tula_agent.weakly import Weakly

__all__ = ["Alternation", "Lap", "split_by_alternation"]


@dataclass(frozen=True)
class Lap:
    """One rank's time of one step, seconds without waiting for data, and whether gradients were synchronised in it."""

    step: int
    synchronised: bool
    busy_time_s: float


class Alternation:
    """Switches gradient synchronisation off for every odd step, as `no_sync` does; replicas drift apart.

    Hence only for profiling runs, whose weights nobody keeps. All ranks do the same at the same step.
    """

    def __init__(self, models: list[Any]) -> None:
        self._models = Weakly(models)
        self._synchronised = True

    def lap_over(self, step: int, busy_time_s: float) -> Lap:
        """`step` has ended; sets the next one up."""
        lap = Lap(step, self._synchronised, busy_time_s)
        self._set(step % 2 == 1)
        return lap

    def end(self) -> None:
        """Synchronise from now on."""
        self._set(True)

    def _set(self, synchronised: bool) -> None:
        self._synchronised = synchronised
        for model in self._models:
            model.require_backward_grad_sync = synchronised


def split_by_alternation(laps: Mapping[int, list[Lap]]) -> Split | None:
    """The run's split from all ranks' laps, or None when a rank or a kind of step is missing.

    A synchronised step lasts as long as the slowest rank computes, and then communicates: exposed communication is its
    mean less the mean over unsynchronised steps of the slowest rank. (Means: skew falls on other steps in one kind
    than in the other, so single steps cannot be compared.) With random skew this needs many steps.
    """
    alone: dict[int, list[float]] = {}
    together: dict[int, list[float]] = {}
    for rank_laps in laps.values():
        for lap in rank_laps:
            (together if lap.synchronised else alone).setdefault(lap.step, []).append(lap.busy_time_s)
    ranks = len(laps)
    slowest = [max(times) for times in alone.values() if len(times) == ranks]
    whole = [max(times) for times in together.values() if len(times) == ranks]
    if len(slowest) < 2 or len(whole) < 2:
        return None
    exposed = max(0.0, fmean(whole) - fmean(slowest))
    skews = [max(times) - min(times) for times in alone.values() if len(times) == ranks]
    compute = median(time for times in alone.values() for time in times)
    return Split(compute, exposed, exposed, fmean(skews), None)
