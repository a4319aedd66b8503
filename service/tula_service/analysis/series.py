"""Reduces a long series of a run to few points: its trend or its extremes. Pure."""

from __future__ import annotations

import numpy as np
from tsdownsample import MinMaxDownsampler

from tula_service.domain import FloatArray, IntArray

TREND_POINTS = 150


def trend(steps: IntArray, values: FloatArray, points: int = TREND_POINTS) -> tuple[IntArray, FloatArray] | None:
    """Return the medians of `points` intervals with equally many values, each at the middle step of its interval.

    A running mean would follow a single straggling step, and a mean of downsampled points would follow the peaks that
    downsampling keeps. Returns None for zero intervals, or if an interval would have fewer than three values.
    """
    has_value = ~np.isnan(values)
    if not bool(has_value.all()):
        steps, values = steps[has_value], values[has_value]
    if not 0 < 3 * points <= steps.size:
        return None
    edges = np.linspace(0, steps.size, points + 1).astype(np.int64)
    starts, widths, medians = edges[:-1], np.diff(edges), np.empty(points)
    for width in np.unique(widths):  # at most two: many rows at once cost little more than one
        same = widths == width
        medians[same] = np.median(values[starts[same, None] + np.arange(width)], axis=1)
    return steps[(edges[:-1] + edges[1:]) // 2], medians


def downsample(steps: IntArray, values: FloatArray, max_points: int) -> tuple[IntArray, FloatArray]:
    """Return at most `max_points` of the points: the minimum and maximum of each interval, and both ends.

    Steps without a value are dropped first, so that a column with few values (such as validation accuracy) keeps them.
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
