"""The links between ranks as a probe measured them: an all-reduce of s bytes takes alpha + beta s."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tula_service.perfmodel.intervals import Interval, log_interval
from tula_service.perfmodel.points import FloatArray, column

_LEAST_SD = 0.05
_WEAK_SD = 5.0
"""Of log alpha and log beta before the readings, so that sizes that show only one of them leave the other wide."""
_INTERVAL_DOF = 10.0


@dataclass(frozen=True)
class AllReduceCost:
    """Logarithms of alpha in seconds and beta in seconds per byte, shape (2,), and their covariance, shape (2, 2)."""

    mean: FloatArray
    covariance: FloatArray

    @property
    def latency_s(self) -> Interval:
        """alpha with its 90 % interval."""
        return self._interval(0)

    @property
    def seconds_per_byte(self) -> Interval:
        """beta with its 90 % interval."""
        return self._interval(1)

    def ring(self, probed: int, ranks: int, messages: float, size_bytes: float) -> tuple[float, float]:
        """Seconds of `size_bytes` in so many messages over a ring of `ranks`, and the standard deviation of their
        logarithm, from a probe of `probed` ranks: a ring of N takes 2 (N - 1) hops of s / N bytes each.
        """
        hops = (ranks - 1) / (probed - 1)
        parts = np.exp(self.mean) * [messages * hops, size_bytes * hops * probed / ranks]
        shares = parts / parts.sum()
        return float(parts.sum()), math.sqrt(float(shares @ self.covariance @ shares))

    def _interval(self, entry: int) -> Interval:
        mean, sd = np.exp(self.mean[[entry]]), np.sqrt(self.covariance[[entry], entry])
        low, high = log_interval(mean, sd, _INTERVAL_DOF)
        return Interval(float(mean[0]), float(low[0]), float(high[0]))


@dataclass(frozen=True)
class Fabric:
    """What a probe measured over all ranks of so many nodes, and over the ranks of one node where that was apart."""

    num_nodes: int
    ranks_per_node: int
    all_ranks: AllReduceCost
    in_node: AllReduceCost | None = None


def fit_all_reduce(size_bytes: Sequence[float], time_s: Sequence[float], relative_sd: Sequence[float]) -> AllReduceCost:
    """alpha and beta by Huber's loss on log seconds, weighted by the errors of the medians (`relative_sd`).

    A library changes its algorithm with the size, so readings count as 5 % off at least, and what they miss the line by
    widens both. Raises ObservationError unless sizes and seconds are positive.
    """
    from scipy.optimize import least_squares  # imported on use: most starts of the service fit no probe

    sizes = column("size_bytes", size_bytes, above=0.0)
    log_s = np.log(column("time_s", time_s, sizes.size, above=0.0))
    sd = np.hypot(np.asarray(relative_sd, dtype=np.float64), _LEAST_SD)
    order = np.argsort(sizes)
    start = np.array([log_s[order[0]], log_s[order[-1]] - math.log(sizes[order[-1]])])

    def residuals(theta: FloatArray) -> FloatArray:
        line = np.logaddexp(theta[0], theta[1] + np.log(sizes))
        return np.append((line - log_s) / sd, (theta - start) / _WEAK_SD)

    found = least_squares(residuals, start, loss="huber")
    missed = np.abs(residuals(found.x)[: sizes.size])
    excess = float(np.sum(np.minimum(missed**2, 2.0 * missed))) / max(sizes.size - 2, 1)
    return AllReduceCost(found.x, np.linalg.inv(found.jac.T @ found.jac) * max(excess, 1.0))
