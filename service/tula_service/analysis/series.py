"""Reduces a long series of values to a few points that show its trend or its extremes."""

from __future__ import annotations

import numpy as np
from tsdownsample import MinMaxDownsampler

from tula_service.domain import FloatArray, IntArray

TREND_POINTS = 150


def trend(steps: IntArray, values: FloatArray, points: int = TREND_POINTS) -> tuple[IntArray, FloatArray] | None:
    """Return the medians of `points` intervals of equal size, and the middle steps of these intervals.

    The trend uses medians, because a running mean would follow a single slow step, and a mean of downsampled points
    would follow the extremes that downsampling keeps. The result is None if `points` is zero or an interval would have
    fewer than three values.
    """
    has_value = ~np.isnan(values)
    if not bool(has_value.all()):
        steps, values = steps[has_value], values[has_value]
    if not 0 < 3 * points <= steps.size:
        return None
    edges = np.linspace(0, steps.size, points + 1).astype(np.int64)
    starts, widths, medians = edges[:-1], np.diff(edges), np.empty(points)
    for width in np.unique(widths):  # at most two widths, so that all intervals need only two calls of median
        same = widths == width
        medians[same] = np.median(values[starts[same, None] + np.arange(width)], axis=1)
    return steps[(edges[:-1] + edges[1:]) // 2], medians


def downsample(steps: IntArray, values: FloatArray, max_points: int) -> tuple[IntArray, FloatArray]:
    """Return at most `max_points` of the points: the minimum and the maximum of each interval, and both ends.

    Steps without a value are dropped first, so that a sparse column, such as validation accuracy, keeps its values.
    """
    if steps.size <= max_points:
        return steps, values
    has_value = ~np.isnan(values)
    if bool(has_value.any()) and not bool(has_value.all()):
        steps, values = steps[has_value], values[has_value]
    if steps.size <= max_points:
        return steps, values
    ends = np.array([0, steps.size - 1])
    if max_points < 4:
        return steps[ends], values[ends]
    kept = MinMaxDownsampler().downsample(np.ascontiguousarray(values), n_out=(max_points - 2) // 2 * 2)
    kept = np.union1d(kept.astype(np.int64), ends)
    return steps[kept], values[kept]
