"""The links between ranks as a probe measured them: an all-reduce of s bytes takes alpha + beta s."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tula_service.perfmodel.intervals import Interval, log_interval
from tula_service.perfmodel.points import FloatArray, column
from tula_service.perfmodel.priors import StepTimePrior

_LEAST_SD = 0.05
_WEAK_SD = 5.0
"""Of log alpha and log beta before the readings, so that sizes that show only one of them leave the other wide."""
_INTERVAL_DOF = 10.0
_BUCKET_BYTES = 25 * 2**20
"""What DistributedDataParallel reduces at once, unless a script sets another `bucket_cap_mb`."""
_LEAST_BETWEEN_SHARE = 0.1
_OF_A_STEP_SD = 0.25  # of the log of a step's collectives, beside all-reduces of the same bytes on idle ranks
_GROWTH_SD = 0.1  # of k_intra and k_inter around a ring's growth
_SHARED_LINK_SD = 0.05  # of k_share: the probe had as many ranks on each node's link


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

    @property
    def between_nodes(self) -> bool:
        """True if the probe says what several nodes cost."""
        return self.num_nodes > 1

    def within(self, ranks: int, size_bytes: float) -> tuple[float, float] | None:
        """Seconds of a node's collectives and the sd of their log; None where a node was not measured apart."""
        cost = self.all_ranks if self.num_nodes == 1 else self.in_node
        return None if cost is None or ranks < 2 else _collective(cost, self.ranks_per_node, ranks, size_bytes)

    def between(self, nodes: int, ranks: int, size_bytes: float) -> tuple[float, float]:
        """What several nodes of so many ranks add to `within`, in seconds, and the sd of its log."""
        probed = self.num_nodes * self.ranks_per_node
        whole, log_sd = _collective(self.all_ranks, probed, nodes * ranks, size_bytes)
        inner = self.within(ranks, size_bytes)
        added = max(whole - (inner[0] if inner else 0.0), _LEAST_BETWEEN_SHARE * whole)
        return added, log_sd * whole / added


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


def with_fabric(
    prior: StepTimePrior, fabric: Fabric, *, gradient_bytes: float, max_nodes: int, ranks_per_node: int
) -> StepTimePrior:
    """`prior` with the collectives of a probe of the same nodes where those are known better from it.

    A step reduces `gradient_bytes` in buckets of 25 MiB, T(N) = buckets alpha(N) + beta(N) bytes, by a ring. s_inter
    and k_inter are the line through log T over log n/2 for 2 nodes to `max_nodes`; s_intra is T of one node at the
    job's ranks. Both are in seconds, so compute readings on one node leave them as they are. The basis stays.
    """
    mean, sd = prior.mean.copy(), prior.sd.copy()
    known = set(prior.in_seconds)
    inner = fabric.within(ranks_per_node, gradient_bytes)
    if inner is not None and (inner_sd := math.hypot(inner[1], _OF_A_STEP_SD)) < sd[4]:
        sd[4], sd[5] = inner_sd, min(sd[5], _SHARED_LINK_SD)
        mean[4] = math.log(inner[0]) - mean[5] * math.log(ranks_per_node / 2.0) - mean[0]
        known.add(4)
    if fabric.between_nodes and max_nodes > 1:
        nodes = 2 ** np.arange(1, max(math.ceil(math.log2(max_nodes)), 2) + 1)
        seconds, log_sds = zip(*(fabric.between(int(n), ranks_per_node, gradient_bytes) for n in nodes), strict=True)
        outer_sd = math.hypot(max(log_sds), _OF_A_STEP_SD)
        if outer_sd < sd[6]:
            growth, at_two = np.polyfit(np.log(nodes / 2.0), np.log(seconds), 1)
            mean[6] = at_two - mean[8] * math.log(ranks_per_node) - mean[0]
            mean[7], sd[6:9] = growth, (outer_sd, min(sd[7], _GROWTH_SD), min(sd[8], _SHARED_LINK_SD))
            known.add(6)
    return replace(prior, mean=mean, sd=sd, in_seconds=tuple(sorted(known)))


def _collective(cost: AllReduceCost, probed: int, ranks: int, size_bytes: float) -> tuple[float, float]:
    return cost.ring(probed, ranks, max(math.ceil(size_bytes / _BUCKET_BYTES), 1), size_bytes)
