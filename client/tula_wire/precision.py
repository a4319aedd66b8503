"""How precisely a profiling run knows its step time: the one rule of agent and service by which a run ends early."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Final

FEWEST_STEPS: Final = 8
"""Fewest steps that a mean needs: a loader with eight processes may stall once in eight steps."""
_LEAST_S: Final = 1.0
_OF_START_UP: Final = 0.1
_NORMAL: Final = 1.96
NORMAL_90: Final = 1.645
"""Half-width of a 90 % interval of a normal variable, in standard deviations."""


def relative_error(step_times_s: Sequence[float], start_up_s: float = 0.0) -> float:
    """Return the half-width of a 95 % interval of the mean step time, over that mean.

    It is infinite below eight steps, and until the steps have taken a tenth of `start_up_s` (the seconds before the
    first step) or one second, whichever is more: measuring costs little compared with a start, and slow steps may be
    rare.
    """
    count, total_s = len(step_times_s), math.fsum(step_times_s)
    if count < FEWEST_STEPS or total_s < max(_LEAST_S, _OF_START_UP * start_up_s):
        return math.inf
    error_s = stdev(step_times_s) / math.sqrt(count)
    return student(count - 1) * error_s / fmean(step_times_s)


def student(freedom: int, z: float = _NORMAL) -> float:
    """Return the quantile of Student's t at which a normal variable has `z`, without which its 97.5 % quantile.

    By the first terms of a series in 1 / freedom (Abramowitz 26.7.5): at 97.5 % it is 3 % too low with two degrees of
    freedom, and less than 1 % with more.
    """
    first = (z**3 + z) / 4.0
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
    third = (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / 384.0
    return z + first / freedom + second / freedom**2 + third / freedom**3
