"""Summarises a run's steps as robust means, which are the input of a fit."""

from __future__ import annotations

import numpy as np

from tula_service.domain import SampleColumns
from tula_service.perfmodel.points import FloatArray

_OF_ONE_STEP = 0.3
_OF_TWO_OR_THREE = 3.0  # for two or three steps, since Student's t with one or two degrees of freedom has no variance


def summarise(samples: SampleColumns) -> dict[str, float | int | None]:
    """Return the summary of a run as a dictionary: the robust mean of each column, and statistics of the steps.

    Times are in seconds, or None if they were not measured; recurring slow steps are fully included. `samples` has one
    row per step and rank. Step times are first averaged over the ranks. Because the ranks of a step wait for each
    other, only steps are treated as independent in `relative_sd`, which is the standard error of `step_time_s` divided
    by its mean. `straggler_rank` is the rank that was slowest in more than half of the steps, or None.
    """
    steps, which = np.unique(samples.step, return_inverse=True)
    mean, error = robust_mean(np.bincount(which, weights=samples.step_time_s) / np.maximum(np.bincount(which), 1))
    ranks = np.zeros(0, np.int64) if samples.straggler_rank is None else samples.straggler_rank
    ranks = ranks[ranks >= 0]
    slowest, times = np.unique(ranks, return_counts=True)  # bincount would need an array as long as the highest rank
    return {name: known_mean(values) for name, values in vars(samples).items() if name.endswith("_s")} | {
        "num_steps": int(steps.size),
        "step_time_s": mean,
        "relative_sd": None if mean is None else _relative_sd(mean, error, steps.size),
        "straggler_rank": int(slowest[times.argmax()]) if ranks.size and 2 * times.max() > ranks.size else None,
    }


def _relative_sd(mean: float, error: float | None, steps: int) -> float:
    """Return the relative standard error, multiplied by the standard deviation of Student's t distribution.

    This factor, which is 1.7 for four steps and 1.07 for sixteen, accounts for the uncertain spread of a few steps.
    """
    if error is None:
        return _OF_ONE_STEP
    return error / mean * (float(np.sqrt((steps - 1) / (steps - 3))) if steps > 3 else _OF_TWO_OR_THREE)


def robust_mean(values: FloatArray) -> tuple[float | None, float | None]:
    """Return a mean of `values` that is robust against one outlier, and its standard error.

    The largest value is replaced by the second largest if the gap between the two exceeds the spread of the other
    values, since the step probably included a checkpoint or a garbage collection. Two outliers are kept, since they may
    be part of a pattern.
    """
    if values.size == 0:
        return None, None
    if values.size > 2:
        second, largest = np.partition(values, (-2, -1))[-2:]
        if largest - second > second - values.min():
            values = np.minimum(values, second)
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(values.size)) if values.size > 1 else None


def known_mean(values: FloatArray | None) -> float | None:
    """Return the robust mean of the finite values, or None if no value is finite."""
    return None if values is None else robust_mean(values[np.isfinite(values)])[0]
