"""The knee of a trade-off curve: Kneedle, kept away from the inputs on which it misleads."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tula_service.perfmodel.points import FloatArray, column

DENSE_POINTS = 129
_LEAST_RANGE = 4.0
_LEAST_GAIN = 0.05
_LEAST_GAIN_OVER_NOISE = 7.0
_RIPPLE = 0.03
_POWERS = np.linspace(0.1, 3.0, 30)


@dataclass(frozen=True)
class KneeFinding:
    """Where the curve bends, or None with the reason why it has no knee worth naming."""

    global_batch_size: float | None
    reason: str


def dense_batches(smallest: float, largest: float) -> FloatArray:
    """The fixed dense grid, even in log batch, on which every knee is looked for; shape (DENSE_POINTS,)."""
    return np.geomspace(smallest, max(largest, smallest), DENSE_POINTS)


def find_knee(global_batch_size: Sequence[float] | FloatArray, value: Sequence[float] | FloatArray) -> KneeFinding:
    """The knee of a falling curve `value` (time or cost) over global batch, both of shape (n,).

    Kneedle (Satopaa 2011, through `kneed`) answers None for few points, finds knees in flat noisy data and depends on
    the range of x, so it sees only the lower hull of the curve resampled on `dense_batches`, and only after
    value = v + A * B^-p has beaten a straight line in log B. Raises ObservationError on NaN, infinity or batches that
    are not positive.
    """
    batches = column("global_batch_size", global_batch_size, above=0.0)
    values = column("value", value, batches.size, above=0.0)
    batches, first = np.unique(batches, return_index=True)
    values = values[first]
    if batches.size < 5 or batches[-1] / batches[0] < _LEAST_RANGE:
        return KneeFinding(None, "no knee: the candidates span less than a factor of four in global batch.")
    grid = dense_batches(batches[0], batches[-1])
    x = np.log2(grid)
    y = np.interp(x, np.log2(batches), values / values[0])
    fall = 1.0 - y.min()
    if fall < _LEAST_GAIN:
        return KneeFinding(None, f"no knee: the largest batch gains only {100 * max(fall, 0):.1f} % over the smallest.")
    if fall < _LEAST_GAIN_OVER_NOISE * _noise(values / values[0]):
        return KneeFinding(None, "no knee: the curve falls no more than its own noise explains.")
    hull = _lower_hull(x, y)
    if not _saturates(x, hull):
        return KneeFinding(None, "no knee: a straight line describes the curve as well as a saturating one.")
    from kneed import KneeLocator  # imported on use: it imports all of scipy.signal, a quarter of the service's start

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        located = KneeLocator(x, hull, S=1.0, curve="convex", direction="decreasing").knee
    if located is None:
        return KneeFinding(None, "no knee: Kneedle finds none on the fitted curve.")
    batch = float(2.0 ** float(located))
    return KneeFinding(batch, f"beyond a global batch of about {batch:.0f} each doubling gains less than the last.")


def _noise(y: npt.NDArray[np.float64]) -> float:
    """Standard deviation of independent noise that would bend y as much as it bends (from its second differences)."""
    return float(np.sqrt(np.mean(np.diff(y, 2) ** 2) / 6.0))


def _lower_hull(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The largest convex curve below y, made falling: where one cluster takes over from the next the curve has kinks,
    and Kneedle stops at the first of them."""
    kept: list[int] = []
    for row in range(x.size):
        while len(kept) > 1:
            start, middle = kept[-2], kept[-1]
            rise = (y[middle] - y[start]) * (x[row] - x[start])
            if rise < (y[row] - y[start]) * (x[middle] - x[start]):
                break
            kept.pop()
        kept.append(row)
    hull = np.interp(x, x[kept], y[kept])
    return np.asarray(np.minimum.accumulate(hull), dtype=np.float64)


def _saturates(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> bool:
    """True when v + A * 2^(-p x), A > 0, leaves less than half of the straight line's squared error, and that error is
    more than ripple: the hull bends by the height of any noise, however straight the curve."""
    centred = y - y.mean()
    slope = float(centred @ (x - x.mean()) / ((x - x.mean()) @ (x - x.mean())))
    straight = float(np.sum((centred - slope * (x - x.mean())) ** 2))
    best = np.inf
    for power in _POWERS:
        basis = np.exp2(-power * (x - x[0]))
        basis -= basis.mean()
        height = float(centred @ basis / (basis @ basis))
        if height > 0:
            best = min(best, float(np.sum((centred - height * basis) ** 2)))
    ripple = _RIPPLE * float(np.ptp(y))
    return straight > ripple**2 * y.size and best < 0.5 * straight
