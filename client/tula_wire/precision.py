"""Computes how precise the step time of a profiling run is, and when agent and service should end the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Final

FEWEST_STEPS: Final = 8
"""The minimum number of steps for a mean, since a loader with eight processes may stall once every eight steps."""
_LEAST_S: Final = 1.0
_OF_START_UP: Final = 0.1
_NORMAL: Final = 1.96
NORMAL_90: Final = 1.645
"""The half-width of a 90 % interval of a normal variable, in standard deviations."""
_TOLERABLE: Final = 0.07
"""The relative half-width of the mean's interval below which no more steps are needed.

The mean of 400 training steps with the same randomness is uncertain by 5 %, so the combined uncertainty stays within 10
%.
"""
MOST_TIMES: Final = 8
"""A run measures at most this multiple of the requested number of steps."""


def relative_error(step_times_s: Sequence[float], start_up_s: float = 0.0) -> float:
    """Return the half-width of a 95 % interval of the mean step time, relative to the mean.

    The result is infinite if there are fewer than eight steps. It is also infinite until the steps have taken at
    least one second and at least a tenth of `start_up_s`, the seconds before the first step, because measuring costs
    little compared with a start-up and slow steps may be rare.
    """
    count, total_s = len(step_times_s), math.fsum(step_times_s)
    if count < FEWEST_STEPS or total_s < max(_LEAST_S, _OF_START_UP * start_up_s):
        return math.inf
    return half_width(stdev(step_times_s), count) / fmean(step_times_s)


def is_known(
    step_times_s: Sequence[float], precision: float, start_up_s: float = 0.0, usual_spread: float = 0.0
) -> bool:
    """Return True if the step time is known precisely enough to end a run early; always False if `precision` is 0.

    The relative error must be at most `precision`. `usual_spread` is the result of `spread` for an earlier batch of the
    same launch. By chance, the measured steps may include no slow steps although the earlier batch had some, so the
    uncertainty of the mean, when computed from `usual_spread`, must also be at most 7 %.
    """
    if precision <= 0.0 or relative_error(step_times_s, start_up_s) > precision:
        return False
    return half_width(usual_spread, len(step_times_s)) <= _TOLERABLE


def is_long_enough(
    step_times_s: Sequence[float], measured: int, measuring_steps: int, precision: float, usual_spread: float = 0.0
) -> bool:
    """Return True if a run has measured enough after `measured` steps.

    A run measures `measuring_steps` steps. If slow steps occur at random, the mean of so few steps may be uncertain. If
    the half-width of its 95 % interval exceeds 7 %, the number of steps is doubled, up to three times. The interval is
    computed from the `spread` of these steps, or from `usual_spread` as in `is_known` if that is larger. If `precision`
    is 0 or if there are fewer than eight steps, no steps are added.
    """
    if measured < measuring_steps or precision <= 0.0 or measured >= MOST_TIMES * measuring_steps:
        return measured >= measuring_steps
    doubled = (measured // measuring_steps).bit_length() - 1
    times = step_times_s[: measuring_steps << doubled]
    if len(times) < FEWEST_STEPS:
        return True
    means = _means(times)
    own = half_width(stdev(means), len(means)) / fmean(means)
    return max(own, half_width(usual_spread, len(times))) <= _TOLERABLE


def spread(step_times_s: Sequence[float]) -> float:
    """Return the relative standard deviation that independent steps with an equally uncertain mean would have.

    Successive steps may be correlated, and slow steps may occur at regular intervals, so the result is computed from
    the means of groups of successive steps (batch means). The result is 0 if there are fewer than eight steps.
    """
    if len(step_times_s) < FEWEST_STEPS:
        return 0.0
    means = _means(step_times_s)
    return stdev(means) * math.sqrt(_in_each(len(step_times_s))) / fmean(means)


def _means(times: Sequence[float]) -> list[float]:
    """Return the means of equal groups of successive step times; drop the first few times that do not fill a group.

    If the largest time is an outlier, the second largest time replaces it, as in the mean that the service reports.
    """
    smallest, *_, second, largest = sorted(times)
    most = second if largest - second > second - smallest else largest
    size = _in_each(len(times))
    starts = range(len(times) % size, len(times), size)
    return [fmean(min(time_s, most) for time_s in times[start : start + size]) for start in starts]


def _in_each(count: int) -> int:
    """Return how many step times each batch mean averages; the optimum is proportional to the cube root of `count`."""
    return round(math.cbrt(count))


def half_width(deviation: float, count: int, z: float = _NORMAL) -> float:
    """Return the half-width of a 95 % interval of the mean of `count` values with this standard deviation.

    With a different `z`, the interval has the coverage of `z` standard deviations of a normal variable.
    """
    return _student(count - 1, z) * deviation / math.sqrt(count) if count > 1 else math.inf


def _student(freedom: int, z: float) -> float:
    """Return the quantile of Student's t at the probability at which a normal variable has the quantile `z`.

    The function uses the first terms of a series in 1 / freedom (Abramowitz 26.7.5). At 97.5 %, the result is 3 % too
    low with two degrees of freedom, and less than 1 % too low with more.
    """
    first = (z**3 + z) / 4.0
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
    third = (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / 384.0
    return z + first / freedom + second / freedom**2 + third / freedom**3
