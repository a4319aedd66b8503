"""Prediction intervals: the value type, how log-normal ones are made, and how the ledger calibrates their width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from tula_service.perfmodel.points import FloatArray, column

LEVEL = 0.9
"""Share of measurements that every interval should hold."""

_TRUST_IN_MODEL = 10.0
_SDS_TO_THE_END = 1.7  # between the normal's 1.645 and Student's at ten degrees, 1.81
_WIDEST_SD = 1.0
WIDEST_LOG = 50.0  # a factor of 5e21, which says "unknown" and overflows nothing that is multiplied by it
_WIDTH_BOUNDS = (0.5, 5.0)


@dataclass(frozen=True)
class Interval:
    """A predicted value (the median) and the interval that should hold it: low <= mean <= high, in one unit."""

    mean: float
    low: float
    high: float

    @property
    def log_sd(self) -> float:
        """Standard deviation of the value's logarithm, read off the upper end."""
        if not (self.mean > 0.0 and math.isfinite(self.high)):
            return 0.0
        return max(math.log(self.high / self.mean) / _SDS_TO_THE_END, 0.0)

    @property
    def expected(self) -> float:
        """The expected value of the log-normal around `mean` (its median): uncertainty makes it larger."""
        return self.mean * math.exp(0.5 * min(self.log_sd, _WIDEST_SD) ** 2)

    def scaled(self, factor: float) -> Interval:
        """The same multiplied by a known factor of at least 0."""
        return Interval(self.mean * factor, self.low * factor, self.high * factor)

    def plus(self, other: Interval) -> Interval:
        """The sum; conservative, as if both were wrong in the same direction."""
        return Interval(self.mean + other.mean, self.low + other.low, self.high + other.high)

    def times(self, other: Interval) -> Interval:
        """The product of two positive values; conservative in the same way."""
        return Interval(self.mean * other.mean, self.low * other.low, self.high * other.high)


def log_interval(mean: FloatArray, log_sd: FloatArray, dof: float) -> tuple[FloatArray, FloatArray]:
    """Low and high ends, shape (n,): mean * exp(-+ q * log_sd) with Student's q at `dof` degrees of freedom."""
    width = np.exp(np.minimum(float(special.stdtrit(dof, 0.5 + LEVEL / 2.0)) * log_sd, WIDEST_LOG))
    return mean / width, mean * width


def calibrate_intervals(
    predicted: Sequence[float] | FloatArray,
    low: Sequence[float] | FloatArray,
    high: Sequence[float] | FloatArray,
    measured: Sequence[float] | FloatArray,
) -> float:
    """The factor by which intervals should be widened in log space, from past predictions and what then happened.

    Each pair's score is |log(measured / predicted)| over the half-width of its interval; the factor is the 90 %
    quantile of the scores (split-conformal, Vovk 2005), shrunk towards 1 by ten imagined pairs that the model got
    right, and bounded to 0.5..5. Without pairs it is 1. All columns have shape (n,), in one unit, and are positive.
    """
    centre = column("predicted", predicted, above=0.0)
    names = {"low": low, "high": high, "measured": measured}
    lows, highs, actual = (column(name, values, centre.size, above=0.0) for name, values in names.items())
    if centre.size == 0:
        return 1.0
    half = np.maximum(np.where(actual > centre, np.log(highs / centre), np.log(centre / lows)), 1e-6)
    scores = np.abs(np.log(actual / centre)) / half
    rank = min(1.0, LEVEL * (centre.size + 1) / centre.size)
    quantile = max(float(np.quantile(scores, rank)), 1e-3)
    weight = centre.size / (centre.size + _TRUST_IN_MODEL)
    return float(np.clip(np.exp(weight * np.log(quantile)), *_WIDTH_BOUNDS))
