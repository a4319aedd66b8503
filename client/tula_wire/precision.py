"""How precisely a profiling run knows its step time: the one rule of agent and service by which a run ends early."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import Final

FEWEST_STEPS: Final = 8
"""A loader of so many processes may stall once in as many steps."""
_MEAN_OFF_MEDIAN: Final = 0.1


def relative_error(step_times_s: Sequence[float]) -> float:
    """Half-width of a 95 % interval of the median step time over that median; infinite below eight steps.

    Infinite too while mean and median differ by more than 10 %: some steps are slow, and eight may not hold their share
    of them.
    """
    if len(step_times_s) < FEWEST_STEPS:
        return math.inf
    centre = median(step_times_s)
    if centre <= 0 or abs(fmean(step_times_s) - centre) > _MEAN_OFF_MEDIAN * centre:
        return math.inf
    spread = 1.4826 * median(abs(value - centre) for value in step_times_s)
    return float(1.96 * 1.2533 * spread / math.sqrt(len(step_times_s)) / centre)
