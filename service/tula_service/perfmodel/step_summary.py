"""What the steps of a run say: robust figures for a fit, and whether enough were measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import special

from tula_service.domain import SampleColumns
from tula_service.perfmodel.points import FloatArray, column

_FEWEST_STEPS = 5
_MEAN_OFF_MEDIAN = 0.1  # beyond it some steps are of another kind, and a few steps may not hold their share of them
_BATCHES = 5
_LEVEL = 0.95


def summarise(samples: SampleColumns) -> dict[str, float | int | None]:
    """Figures of a run by name, times in seconds and None where nothing was measured: of each column the robust mean,
    so that slow steps that recur count as they do in a long run.

    One row for each step and rank. Step times are averaged over the ranks first: ranks of one step wait for each other,
    so only steps count as independent in `relative_sd`, the standard error of `step_time_s` over it (None below two
    steps). A straggler is named when it was the slowest rank in more than half of the steps.
    """
    steps, which = np.unique(samples.step, return_inverse=True)
    mean, error = robust_mean(np.bincount(which, weights=samples.step_time_s) / np.maximum(np.bincount(which), 1))
    ranks = np.zeros(0, np.int64) if samples.straggler_rank is None else samples.straggler_rank
    ranks = ranks[ranks >= 0]
    slowest, times = np.unique(ranks, return_counts=True)  # never an array as long as the highest rank
    return {name: known_mean(values) for name, values in vars(samples).items() if name.endswith("_s")} | {
        "num_steps": int(steps.size),
        "step_time_s": mean,
        "relative_sd": None if mean is None or error is None else error / mean,
        "straggler_rank": int(slowest[times.argmax()]) if ranks.size and 2 * times.max() > ranks.size else None,
    }


def robust_mean(values: FloatArray) -> tuple[float | None, float | None]:
    """The mean of `values` and its standard error, robust against one outlier: time and money are sums over steps.

    Where the largest value lies farther above the second largest than all others spread, it counts as the second
    largest: one checkpoint or collector pause. Two such values are a pattern and count in full.
    """
    if values.size == 0:
        return None, None
    capped = _without_outlier(values)
    return float(capped.mean()), float(capped.std(ddof=1) / np.sqrt(capped.size)) if capped.size > 1 else None


def _without_outlier(values: FloatArray) -> FloatArray:
    if values.size < 3:
        return values
    second, largest = np.partition(values, (-2, -1))[-2:]
    alone = largest - second > second - values.min()
    return np.minimum(values, second) if alone else values


def measured_precisely_enough(step_times_s: Sequence[float] | FloatArray, precision: float = 0.02) -> bool:
    """True when the 95 % interval of the mean step time is within +- `precision` (relative): the run may end.

    Needs at least five steps after warm-up. Steps that resemble their neighbours count for less: the error is at least
    that of the means of five successive batches. Never true while the plain mean is more than 10 % off the median: one
    slow step among few may recur. Raises ObservationError on a step that is not positive and finite.
    """
    column("precision", [precision], above=0.0)
    times = column("step_times_s", step_times_s, above=0.0)
    mean, error = robust_mean(times)
    if mean is None or error is None or times.size < _FEWEST_STEPS:
        return False
    middle = float(np.median(times))
    if abs(float(times.mean()) - middle) > _MEAN_OFF_MEDIAN * middle:
        return False
    if times.size >= 2 * _BATCHES:
        means = [float(part.mean()) for part in np.array_split(_without_outlier(times), _BATCHES)]
        error = max(error, float(np.std(means, ddof=1)) / np.sqrt(_BATCHES))
    dof = min(times.size, _BATCHES) - 1 if times.size < 4 * _BATCHES else times.size - 1
    return float(special.stdtrit(dof, 0.5 + _LEVEL / 2.0)) * error / mean <= precision


def known_mean(values: FloatArray | None) -> float | None:
    """The robust mean of the finite values; None where there are none."""
    return None if values is None else robust_mean(values[np.isfinite(values)])[0]
