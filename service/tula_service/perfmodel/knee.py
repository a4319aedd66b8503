"""The knee of a trade-off curve: the batch from which on a doubling hardly shortens the training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tula_service.perfmodel.points import FloatArray, column

DENSE_POINTS = 129
_LEAST_SAVING = 0.10
"""Share of the time that a doubling of the batch must save to be worth it."""
_LEAST_RANGE = 4.0


@dataclass(frozen=True)
class KneeFinding:
    """The global batch at the knee of a curve, or None with the reason why it has none."""

    global_batch_size: float | None
    reason: str


def dense_batches(smallest: float, largest: float) -> FloatArray:
    """The fixed dense grid, even in log batch, on which every knee is looked for; shape (DENSE_POINTS,)."""
    return np.geomspace(smallest, max(largest, smallest), DENSE_POINTS)


def find_knee(global_batch_size: Sequence[float] | FloatArray, time_s: Sequence[float] | FloatArray) -> KneeFinding:
    """The least batch of the curve `time_s` over global batch, both of shape (n,), whose doubling saves less than 10 %.

    The curve is the lower convex hull of log time over log batch. Unlike Kneedle's, its slope is in the curve's own
    units: neither end of the range moves the knee, and a curve that falls steeply to its end has none. Raises
    ObservationError on NaN, infinity or values that are not positive.
    """
    batches = column("global_batch_size", global_batch_size, above=0.0)
    times = column("time_s", time_s, batches.size, above=0.0)
    batches, first = np.unique(batches, return_index=True)
    if batches[-1] / batches[0] < _LEAST_RANGE:
        return KneeFinding(None, "no knee: the candidates span less than a factor of four in global batch.")
    x, y = _lower_hull(np.log2(batches), np.log2(times[first]))
    saving = 1.0 - np.exp2(np.diff(y) / np.diff(x))  # by a doubling, on each edge of the hull
    enough = np.flatnonzero(saving >= _LEAST_SAVING)
    at = int(enough[-1]) + 1 if enough.size else 0
    if at == x.size - 1:
        return KneeFinding(None, "no knee: every doubling of the batch saves 10 % of the time or more.")
    batch = float(2.0 ** x[at])
    return KneeFinding(
        batch, f"from a global batch of about {batch:.0f} on, a doubling saves less than 10 % of the time."
    )


def _lower_hull(x: FloatArray, y: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The corners of the largest convex curve below y: where one cluster takes over from the next, y has kinks."""
    kept: list[int] = []
    for row in range(x.size):
        while len(kept) > 1:
            start, middle = kept[-2], kept[-1]
            rise = (y[middle] - y[start]) * (x[row] - x[start])
            if rise < (y[row] - y[start]) * (x[middle] - x[start]):
                break
            kept.pop()
        kept.append(row)
    return x[kept], y[kept]
