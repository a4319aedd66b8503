"""Models the links between ranks from a probe's measurements: an all-reduce of s bytes takes alpha + beta s seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tula_service.perfmodel.intervals import Interval, log_interval
from tula_service.perfmodel.points import FloatArray, column
from tula_service.perfmodel.priors import StepTimePrior
from tula_service.perfmodel.step_time_form import AT

_LEAST_SD = 0.05
_WEAK_SD = 5.0
"""The prior standard deviation of log alpha and log beta, used if the probed sizes do not determine a parameter."""
_INTERVAL_DOF = 10.0
_MOST_BUCKETS = 100_000
BUCKET_BYTES = 25 * 2**20
"""The size of the buckets that DistributedDataParallel reduces, unless a script sets `bucket_cap_mb`."""
_LEAST_BETWEEN_SHARE = 0.1
_OF_A_STEP_SD = 0.25  # of the log time of a step's collectives, around the time of the same all-reduces on idle ranks
_GROWTH_SD = 0.1  # of k_inter around the growth of a ring
_OVERLAP_SD = 0.5  # of log(g - 1) if the buckets were timed
_PACES = (0.5, 1.0, 2.0, 4.0)
_SIMULATED_SD = 0.03  # of the log time of a simulated step around the form, besides the uncertainty of the probe
_SHARED_LINK_SD = 0.05  # of k_share, since the probe had the same number of ranks on each node's link as the job


@dataclass(frozen=True)
class AllReduceCost:
    """The fitted logarithms of alpha (seconds) and beta (seconds per byte), shape (2,), with their (2, 2) covariance.

    `log_readings`, shape (2, n), has the logarithms of the probed sizes in ascending order, and the logarithms of their
    times in seconds.
    """

    mean: FloatArray
    covariance: FloatArray
    log_readings: FloatArray | None = None

    @property
    def latency_s(self) -> Interval:
        """Return alpha with its 90 % interval."""
        return self._interval(0)

    @property
    def seconds_per_byte(self) -> Interval:
        """Return beta with its 90 % interval."""
        return self._interval(1)

    def ring(self, probed: int, ranks: int, messages: float, size_bytes: float) -> tuple[float, float]:
        """Return the time in seconds of an all-reduce over a ring, and the standard deviation of its logarithm.

        The ring has `ranks` ranks, and the all-reduce has `messages` messages with `size_bytes` bytes in total. A ring
        of N ranks takes 2 (N - 1) hops of s / N bytes each, and the probe measured `probed` ranks. If `ranks` equals
        `probed`, the result is also corrected by the probe's deviation from the line alpha + beta s, interpolated
        between the nearest probed sizes. Probes can deviate from the line because the line adds times that may overlap.
        """
        hops = (ranks - 1) / (probed - 1)
        parts = np.exp(self.mean) * [messages * hops, size_bytes * hops * probed / ranks]
        seconds, shares = float(parts.sum()), parts / parts.sum()
        if ranks == probed and self.log_readings is not None:
            sizes, log_s = self.log_readings
            size = math.log(size_bytes / messages)
            if sizes[0] <= size <= sizes[-1]:
                missed = log_s - np.logaddexp(self.mean[0], self.mean[1] + sizes)
                seconds *= math.exp(float(np.interp(size, sizes, missed)))
        return seconds, math.sqrt(float(shares @ self.covariance @ shares))

    def _interval(self, entry: int) -> Interval:
        mean, sd = np.exp(self.mean[[entry]]), np.sqrt(self.covariance[[entry], entry])
        low, high = log_interval(mean, sd, _INTERVAL_DOF)
        return Interval(float(mean[0]), float(low[0]), float(high[0]))


@dataclass(frozen=True)
class Fabric:
    """A probe's measurements across all its ranks and, if measured separately, across the ranks of one node.

    `launch_s` is the time in seconds to launch one kernel, or None if no device was probed.
    """

    num_nodes: int
    ranks_per_node: int
    all_ranks: AllReduceCost
    in_node: AllReduceCost | None = None
    launch_s: float | None = None

    def within(self, ranks: int, size_bytes: float, messages: int = 1) -> tuple[float, float] | None:
        """Return the time in seconds of a collective within a node, and the standard deviation of its logarithm.

        The result is None if the node has one rank, or if the probe did not measure the ranks of one node separately.
        """
        cost = self.all_ranks if self.num_nodes == 1 else self.in_node
        return None if cost is None or ranks < 2 else cost.ring(self.ranks_per_node, ranks, messages, size_bytes)

    def whole(self, nodes: int, ranks: int, size_bytes: float, messages: int = 1) -> tuple[float, float]:
        """Return the time in seconds of a collective across nodes, and the standard deviation of its logarithm.

        The collective is across `nodes` nodes of `ranks` ranks each.
        """
        probed = self.num_nodes * self.ranks_per_node
        return self.all_ranks.ring(probed, nodes * ranks, messages, size_bytes)

    def between(self, nodes: int, ranks: int, size_bytes: float, messages: int = 1) -> tuple[float, float]:
        """Return `whole` minus `within`, in seconds, and the standard deviation of the logarithm of this difference.

        The collective is across `nodes` nodes of `ranks` ranks each.
        """
        whole, log_sd = self.whole(nodes, ranks, size_bytes, messages)
        inner = self.within(ranks, size_bytes, messages)
        added = max(whole - (inner[0] if inner else 0.0), _LEAST_BETWEEN_SHARE * whole)
        return added, log_sd * whole / added


def fit_all_reduce(size_bytes: Sequence[float], time_s: Sequence[float], relative_sd: Sequence[float]) -> AllReduceCost:
    """Return alpha and beta, fitted to the logarithms of the measured times with the Huber loss.

    `relative_sd` contains the relative errors of the readings' medians, which determine the weights. Each reading is
    assumed to have an error of at least 5 %, because communication libraries choose their algorithm by message size.
    Both parameters become more uncertain if the readings deviate from the line. Raises ObservationError unless sizes
    and times are positive.
    """
    from scipy.optimize import least_squares  # imported here because most service processes never fit a probe

    sizes = column("size_bytes", size_bytes, above=0.0)
    log_s = np.log(column("time_s", time_s, sizes.size, above=0.0))
    sd = np.hypot(np.asarray(relative_sd, dtype=np.float64), _LEAST_SD)
    order = np.argsort(sizes)
    start = np.array([log_s[order[0]], log_s[order[-1]] - math.log(sizes[order[-1]])])

    def residuals(log_costs: FloatArray) -> FloatArray:
        log_alpha, log_beta = log_costs
        line = np.logaddexp(log_alpha, log_beta + np.log(sizes))
        return np.append((line - log_s) / sd, (log_costs - start) / _WEAK_SD)

    solution = least_squares(residuals, start, loss="huber")
    missed = np.abs(residuals(solution.x)[: sizes.size])
    excess = float(np.sum(np.minimum(missed**2, 2.0 * missed))) / max(sizes.size - 2, 1)
    readings = np.array([np.log(sizes[order]), log_s[order]])
    return AllReduceCost(solution.x, np.linalg.inv(solution.jac.T @ solution.jac) * max(excess, 1.0), readings)


@dataclass(frozen=True)
class Buckets:
    """The gradient buckets of a step; `size_bytes`, shape (n,), has their sizes in the order of reduction.

    `ready_s`, shape (n,), has the seconds from the start of the step until each bucket was complete, timed at one local
    batch. If `ready_s` is None, the amount of hidden communication is unknown.
    """

    size_bytes: FloatArray
    ready_s: FloatArray | None = None

    def __post_init__(self) -> None:
        """Raise ObservationError unless sizes and times are positive and, if both exist, equal in number."""
        object.__setattr__(self, "size_bytes", column("bucket bytes", self.size_bytes, above=0.0))
        if self.ready_s is not None:
            ready = column("ready_s", self.ready_s, self.size_bytes.size, above=0.0)
            object.__setattr__(self, "ready_s", np.maximum.accumulate(ready))

    @classmethod
    def of(cls, gradient_bytes: float) -> Buckets:
        """Return `gradient_bytes` divided equally into buckets of at most 25 MiB.

        If this would require more than 100,000 buckets (2.6 TB), 100,000 larger buckets are used, since latency is then
        negligible.
        """
        number = min(max(math.ceil(gradient_bytes / BUCKET_BYTES), 1), _MOST_BUCKETS)
        return cls(np.full(number, gradient_bytes / number))

    def end_s(self, reduce_s: FloatArray, pace: float = 1.0) -> float:
        """Return the time in seconds at which the reduction of the last bucket ends.

        The buckets are reduced one after another in `reduce_s` seconds each. The backward pass takes `pace` times as
        long as the timed one.
        """
        end = 0.0
        for ready, seconds in zip(np.asarray(self.ready_s) * pace, reduce_s, strict=True):
            end = max(float(ready), end) + float(seconds)
        return end


def nearest_form(
    buckets: Buckets, fabric: Fabric, nodes: FloatArray, ranks_per_node: int, mean: FloatArray, sd: FloatArray
) -> FloatArray:
    """Return the three communication parameters, shape (3,), for which the form best matches simulated steps.

    The parameters are the log seconds of the collective between two nodes, its growth with the nodes, and log(g - 1).
    `mean` and `sd`, shape (3,), are their prior. The simulation reduces a bucket once the bucket is complete and the
    previous bucket has been reduced; communication after the end of the backward pass is exposed. The simulated steps
    have 0.5 to 4 times the timed compute time, to represent other local batches.
    """
    from scipy.optimize import least_squares

    sizes = buckets.size_bytes.tolist()
    inner = fabric.within(ranks_per_node, sum(sizes), len(sizes))
    inner_s = 0.0 if inner is None else inner[0]
    reduce_s = [np.array([fabric.whole(int(n), ranks_per_node, size)[0] for size in sizes]) for n in nodes]
    compute_s = np.asarray(_PACES)[:, None] * np.asarray(buckets.ready_s)[-1]
    steps = np.log([[buckets.end_s(ready_s, pace) for ready_s in reduce_s] for pace in _PACES])

    def residuals(tried: FloatArray) -> FloatArray:
        log_two_nodes, growth, log_overlap = tried
        collective = np.log(inner_s + np.where(nodes > 1, np.exp(log_two_nodes + growth * np.log(nodes / 2.0)), 0.0))
        g = 1.0 + np.exp(log_overlap)
        missed = np.logaddexp(g * np.log(compute_s), g * collective) / g - steps
        return np.append(missed.ravel() / _SIMULATED_SD, (tried - mean) / sd)

    return np.asarray(least_squares(residuals, mean).x, dtype=np.float64)


def with_fabric(
    prior: StepTimePrior, fabric: Fabric, *, buckets: Buckets, max_nodes: int, ranks_per_node: int
) -> StepTimePrior:
    """Return `prior`, with collectives taken from a probe of the same nodes wherever the probe is more certain.

    A ring of N ranks reduces the `buckets` of a step in T(N) seconds, the sum of alpha(N) + beta(N) * bytes over the
    buckets. s_inter and k_inter come from a line fitted to log T over log n/2 for 2 to `max_nodes` nodes; s_intra is T
    for one node with the job's ranks. s_inter and s_intra are stored in seconds, so that measured compute times do not
    change them. If the buckets were timed, the line and g come from `nearest_form`. The basis of the prior does not
    change.
    """
    mean, sd = prior.mean.copy(), prior.sd.copy()
    in_seconds = set(prior.in_seconds)
    gradient_bytes, messages = float(buckets.size_bytes.sum()), buckets.size_bytes.size
    nodes, line, line_sd = np.array([1]), np.zeros(2), np.ones(2)
    inner = fabric.within(ranks_per_node, gradient_bytes, messages)
    if inner is not None and (inner_sd := math.hypot(inner[1], _OF_A_STEP_SD)) < sd[AT.intra]:
        sd[AT.intra], sd[AT.intra_growth] = inner_sd, min(sd[AT.intra_growth], _SHARED_LINK_SD)
        mean[AT.intra] = math.log(inner[0]) - mean[AT.intra_growth] * math.log(ranks_per_node / 2.0) - mean[AT.compute]
        in_seconds.add(AT.intra)
    if fabric.num_nodes > 1 and max_nodes > 1:
        nodes = 2 ** np.arange(1, max(math.ceil(math.log2(max_nodes)), 2) + 1)
        costs = (fabric.between(int(n), ranks_per_node, gradient_bytes, messages) for n in nodes)
        seconds, log_sds = zip(*costs, strict=True)
        line = np.polyfit(np.log(nodes / 2.0), np.log(seconds), 1)[::-1]
        line_sd = np.array([math.hypot(max(log_sds), _OF_A_STEP_SD), min(sd[AT.inter_growth], _GROWTH_SD)])
    if buckets.ready_s is not None and nodes[-1] * ranks_per_node > 1 and sd[AT.overlap] > _OVERLAP_SD:
        start, start_sd = np.append(line, mean[AT.overlap]), np.append(line_sd, sd[AT.overlap])
        nearest = nearest_form(buckets, fabric, nodes, ranks_per_node, start, start_sd)
        line, mean[AT.overlap], sd[AT.overlap] = nearest[:2], nearest[2], _OVERLAP_SD
    if nodes[0] > 1 and line_sd[0] < sd[AT.inter]:
        mean[AT.inter] = line[0] - mean[AT.shared_link] * math.log(ranks_per_node) - mean[AT.compute]
        mean[AT.inter_growth] = line[1]
        sd[AT.inter], sd[AT.inter_growth] = line_sd
        sd[AT.shared_link] = min(sd[AT.shared_link], _SHARED_LINK_SD)
        in_seconds.add(AT.inter)
    return replace(prior, mean=mean, sd=sd, in_seconds=tuple(sorted(in_seconds)))
