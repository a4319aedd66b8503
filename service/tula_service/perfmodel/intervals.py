"""Defines the type of prediction intervals and computes log-normal intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from tula_service.perfmodel.points import FloatArray

LEVEL = 0.9
"""The fraction of measurements that should lie inside their prediction intervals."""

_SDS_TO_THE_END = 1.7  # between 1.645 for a normal distribution and 1.81 for Student's t with ten degrees of freedom
_WIDEST_SD = 1.0
WIDEST_LOG = 50.0  # a factor of 5e21, which means "unknown", and whose products with other values do not overflow


@dataclass(frozen=True)
class Interval:
    """A predicted value with its prediction interval; the field `mean` contains the median."""

    mean: float
    low: float
    high: float

    @property
    def log_sd(self) -> float:
        """Return the standard deviation of the value's logarithm, computed from the interval's upper end."""
        if not (self.mean > 0.0 and math.isfinite(self.high)):
            return 0.0
        return max(math.log(self.high / self.mean) / _SDS_TO_THE_END, 0.0)

    @property
    def expected(self) -> float:
        """Return the expected value of the log-normal distribution, which is at least the median `mean`."""
        return self.mean * math.exp(0.5 * min(self.log_sd, _WIDEST_SD) ** 2)

    def scaled(self, factor: float) -> Interval:
        """Return this interval multiplied by a known factor of at least 0."""
        return Interval(self.mean * factor, self.low * factor, self.high * factor)

    def plus(self, other: Interval) -> Interval:
        """Return the sum of two values, conservatively assuming that their errors have the same direction."""
        return Interval(self.mean + other.mean, self.low + other.low, self.high + other.high)

    def times(self, other: Interval) -> Interval:
        """Return the product of two positive values, conservatively assuming errors in the same direction."""
        return Interval(self.mean * other.mean, self.low * other.low, self.high * other.high)

    def over(self, other: Interval) -> Interval | None:
        """Return the ratio of two values, assuming independent errors, or None if either may be zero."""
        if min(self.low, other.low) <= 0.0:
            return None
        up = math.hypot(math.log(self.high / self.mean), math.log(other.mean / other.low))
        down = math.hypot(math.log(self.mean / self.low), math.log(other.high / other.mean))
        mean = self.mean / other.mean
        return Interval(mean, mean * math.exp(-down), mean * math.exp(up))


def log_interval(mean: FloatArray, log_sd: FloatArray, dof: float) -> tuple[FloatArray, FloatArray]:
    """Return both ends of the intervals, mean * exp(-+ q * log_sd), shape (n,) each.

    q is the quantile of Student's t with `dof` degrees of freedom.
    """
    width = np.exp(np.minimum(float(special.stdtrit(dof, 0.5 + LEVEL / 2.0)) * log_sd, WIDEST_LOG))
    return mean / width, mean * width
