"""How precisely a profiling run knows its step time: the rules of agent and service by which a run ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Final

FEWEST_STEPS: Final = 8
"""Fewest steps that a mean needs: a loader with eight processes may stall once every eight steps."""
_LEAST_S: Final = 1.0
_OF_START_UP: Final = 0.1
_NORMAL: Final = 1.96
NORMAL_90: Final = 1.645
"""Half-width of a 90 % interval of a normal variable, in standard deviations."""
_TOLERABLE: Final = 0.07
"""Half-width of the interval of the mean that needs no further steps: training for 400 steps as random as these leaves
5 % to chance, and both together stay within a tenth."""
MOST_TIMES: Final = 8
"""A run measures at most this many times the steps that were asked for."""


def relative_error(step_times_s: Sequence[float], start_up_s: float = 0.0) -> float:
    """Return the half-width of a 95 % interval of the mean step time, over that mean.

    It is infinite below eight steps, and until the steps have taken a tenth of `start_up_s` (the seconds before the
    first step) or one second, whichever is longer: measuring costs little compared with a start, and slow steps may be
    rare.
    """
    count, total_s = len(step_times_s), math.fsum(step_times_s)
    if count < FEWEST_STEPS or total_s < max(_LEAST_S, _OF_START_UP * start_up_s):
        return math.inf
    return half_width(stdev(step_times_s), count) / fmean(step_times_s)


def is_known(
    step_times_s: Sequence[float], precision: float, start_up_s: float = 0.0, usual_spread: float = 0.0
) -> bool:
    """Return True if the step time is known to `precision`, so that a run may end early; never if `precision` is 0.

    `usual_spread` is what `spread` returned for an earlier batch of the same launch. Slow steps that came at random
    there may be missing here by chance, so that spread too must leave the mean open by 7 % at most.
    """
    if precision <= 0.0 or relative_error(step_times_s, start_up_s) > precision:
        return False
    return half_width(usual_spread, len(step_times_s)) <= _TOLERABLE


def is_long_enough(
    step_times_s: Sequence[float], measured: int, measuring_steps: int, precision: float, usual_spread: float = 0.0
) -> bool:
    """Return True if a run that measured `measured` steps has done what it was asked to do.

    A run measures `measuring_steps` steps. If slow steps come at random, the mean of so few steps is uncertain: a 95 %
    interval of more than 7 % either way doubles the steps, up to three times. The interval follows from the `spread` of
    these steps, or from `usual_spread` as in `is_known` if that is larger. With a `precision` of 0, or below eight
    steps, no step is added.
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
    """Return the standard deviation of independent steps whose mean would be equally uncertain, over that mean.

    Successive steps may be alike, and slow steps may come at regular distances, so it follows from the means of
    successive steps (batch means). It is 0 below eight steps.
    """
    if len(step_times_s) < FEWEST_STEPS:
        return 0.0
    means = _means(step_times_s)
    return stdev(means) * math.sqrt(_in_each(len(step_times_s))) / fmean(means)


def _means(times: Sequence[float]) -> list[float]:
    """Return the means of successive times, without the first few times.

    If the largest time lies apart, it counts as the second largest, as in the mean that the service reports.
    """
    smallest, *_, second, largest = sorted(times)
    most = second if largest - second > second - smallest else largest
    size = _in_each(len(times))
    starts = range(len(times) % size, len(times), size)
    return [fmean(min(time_s, most) for time_s in times[start : start + size]) for start in starts]


def _in_each(count: int) -> int:
    """Return how many of `count` times a batch mean takes: the cube root grows like the size with the least error."""
    return round(math.cbrt(count))


def half_width(deviation: float, count: int, z: float = _NORMAL) -> float:
    """Return the half-width of a 95 % interval of the mean of `count` values of this standard deviation.

    Another `z` gives the interval whose half-width is `z` standard deviations of a normal variable.
    """
    return _student(count - 1, z) * deviation / math.sqrt(count) if count > 1 else math.inf


def _student(freedom: int, z: float) -> float:
    """Return the quantile of Student's t at which a normal variable has `z`.

    By the first terms of a series in 1 / freedom (Abramowitz 26.7.5): at 97.5 % it is 3 % too low with two degrees of
    freedom, and less than 1 % with more.
    """
    first = (z**3 + z) / 4.0
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
    third = (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / 384.0
    return z + first / freedom + second / freedom**2 + third / freedom**3
