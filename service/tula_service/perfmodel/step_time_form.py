"""Defines the step-time form `overlap`, which is computed in logarithms.

    t        = (m - 1) * T_g + (T_g^g + T_s^g)^(1/g) + T_o    m micro-steps; only the last one communicates
    T_g      = c * (a^h + x^h)^(1/h),  x = (b / b_ref)^q      compute of a micro-step: a floor, then growth with b;
                                                              multiplied by 1.28 from the batch `slow_from`
    T_s      = c * (s_intra * phi(r)^k_intra  [r > 1]         collectives: r ranks in a node
                  + s_inter * phi(n)^k_inter * r^k_share [n > 1])   n nodes; the ranks of a node share its link
    phi(x)   = x / 2                                          so that s is the cost for two participants
    T_o      = c * o                                          once per step: the optimizer, which overlaps nothing

theta has eleven parameters in the following order (`AT` has their indices). All except c are dimensionless, so the same
Gaussian prior can be used for a phone-sized network and for a language model.

    compute       log c        c in seconds: compute of one micro-step at b_ref if there were no floor
    floor         log a        floor of compute, due to launch overhead and the idle part of a device at small batches
    growth        log q        growth of compute with the batch
    bend          log(h - 1)   sharpness of the bend between floor and growth (h = 1 means their sum)
    intra         log s_intra  collective between two ranks of a node, relative to c
    intra_growth  k_intra      growth of this collective with the ranks of a node
    inter         log s_inter  collective between two nodes, relative to c
    inter_growth  k_inter      growth of this collective with the nodes
    shared_link   k_share      growth of this collective with the ranks that share a node's link
    overlap       log(g - 1)   overlap of communication with compute (g = 1 means none; a large g hides communication)
    once          log o        once-per-step part, relative to c; T_g includes it unless steps accumulate gradients

The residual of the form is a Gaussian process on log t over the batch, the cluster, and both (`ResidualScales`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tula_service.perfmodel.points import FloatArray, Points


class Parameters(NamedTuple):
    """The index of each parameter in theta, and in its means and standard deviations."""

    compute: int
    floor: int
    growth: int
    bend: int
    intra: int
    intra_growth: int
    inter: int
    inter_growth: int
    shared_link: int
    overlap: int
    once: int


AT: Final = Parameters(*range(11))
NUM_PARAMETERS: Final = len(AT)
COLLECTIVES: Final = (AT.intra, AT.inter)
"""The entries of theta that are proportional to the times of collectives: s_intra and s_inter."""

ABSENT: Final = -60.0
"""The logarithm that represents the time of an absent part of a step."""
LOG_SLOWER: Final = math.log(1.28)
"""The slowdown of compute for convolutions with at least 2^31 elements; 18 to 39 % (VGG11 and AlexNet on an H100)."""
_LARGEST_EXPONENT: Final = 20.0
"""The largest exponent, since the search may try values far from the data, for which exp would overflow."""
_LOG_2 = math.log(2.0)


def to_seconds(entries: Sequence[int]) -> FloatArray:
    """Return the (11, 11) matrix that converts these entries of theta from logs of ratios to c into logs of seconds."""
    matrix = np.eye(NUM_PARAMETERS)
    matrix[list(entries), AT.compute] = 1.0
    return matrix


@dataclass(frozen=True)
class Terms:
    """The log seconds of the parts of a step, shape (n,): whole step, compute, collectives, once-per-step part.

    The slopes, shape (n, 11), are the derivatives of the whole step and of its compute with respect to theta.
    """

    step: FloatArray
    compute: FloatArray
    communication: FloatArray
    once: FloatArray
    step_slopes: FloatArray
    compute_slopes: FloatArray


@dataclass(frozen=True)
class LogStepTimes:
    """Natural logarithms of predicted seconds, shape (n,): the mean step time, its compute, and its communication.

    `sd` is the scale of log step time around `mean`, for Student's t with `dof` degrees of freedom; `known_sd` is this
    scale without the noise of a run.
    """

    mean: FloatArray
    sd: FloatArray
    known_sd: FloatArray
    dof: float
    compute: FloatArray
    communication: FloatArray


def log_terms(theta: FloatArray, points: Points, reference_batch_size: float, slow_from: float = math.inf) -> Terms:
    """Return the terms of the form at `theta`, shape (11,), for n points; `communication` is -60 for a single rank.

    `slow_from` is the smallest local batch for which a convolution is so large that slower kernels are used.
    """
    c, a, log_q, log_bend, s_intra, k_intra, s_inter, k_inter, k_share, log_overlap, log_once = theta.tolist()
    log_q, log_bend, log_overlap = (min(entry, _LARGEST_EXPONENT) for entry in (log_q, log_bend, log_overlap))
    batch, ranks, nodes, micro_steps, earlier = points.logarithms
    several = points.world_size > 1.0
    bend, overlap = 1.0 + math.exp(log_bend), 1.0 + math.exp(log_overlap)
    growth = math.exp(log_q) * (batch - math.log(reference_batch_size))
    bent = np.logaddexp(bend * a, bend * growth)
    micro_step = c + bent / bend + LOG_SLOWER * (points.local_batch_size >= slow_from)
    within = np.where(ranks > 0.0, s_intra + k_intra * (ranks - _LOG_2), ABSENT)
    between = np.where(nodes > 0.0, s_inter + k_inter * (nodes - _LOG_2) + k_share * ranks, ABSENT)
    collective = np.logaddexp(within, between)
    communication = np.where(several, c + collective, ABSENT)
    overlapped = np.logaddexp(overlap * micro_step, overlap * communication)
    last, once = overlapped / overlap, np.full(len(points), c + log_once)
    repeated = np.logaddexp(last, micro_step + earlier)
    step, compute = np.logaddexp(repeated, once), np.logaddexp(micro_step + micro_steps, once)
    # The derivative of log(e^x + e^y) by x is the share of e^x in the sum.
    floor, inner = np.exp(bend * a - bent), np.exp(within - collective) * several
    hidden, waits = np.exp(overlap * micro_step - overlapped), np.exp(last - repeated)
    outer = several - inner
    of_micro_step, of_collective, of_once = (np.zeros((len(points), theta.size)) for _ in range(3))
    of_micro_step[:, AT.compute] = 1.0
    of_micro_step[:, AT.floor] = floor
    of_micro_step[:, AT.growth] = (1.0 - floor) * growth
    of_micro_step[:, AT.bend] = math.exp(log_bend) / bend * (floor * a + (1.0 - floor) * growth - bent / bend)
    of_collective[:, AT.compute] = several
    of_collective[:, AT.intra] = inner
    of_collective[:, AT.intra_growth] = inner * (ranks - _LOG_2)
    of_collective[:, AT.inter] = outer
    of_collective[:, AT.inter_growth] = outer * (nodes - _LOG_2)
    of_collective[:, AT.shared_link] = outer * ranks
    of_once[:, [AT.compute, AT.once]] = 1.0
    of_last = of_collective + hidden[:, None] * (of_micro_step - of_collective)
    mean = communication + hidden * (micro_step - communication)
    of_last[:, AT.overlap] = math.exp(log_overlap) / overlap * (mean - overlapped / overlap)
    of_repeated = of_micro_step + waits[:, None] * (of_last - of_micro_step)
    of_step = of_repeated + np.exp(once - step)[:, None] * (of_once - of_repeated)
    of_compute = of_micro_step + np.exp(once - compute)[:, None] * (of_once - of_micro_step)
    return Terms(step, compute, communication, once, of_step, of_compute)


@dataclass(frozen=True)
class ResidualScales:
    """Prior standard deviations of log step time around the form, and their correlation lengths in doublings.

    At one batch, all clusters share the deviation `batch`, for example due to the choice of a kernel. On one cluster,
    all batches share the deviation `cluster`, for example due to link contention. Neighbouring configurations share the
    deviation `both`; each configuration also has the independent deviation `own`, and each run the deviation `noise`.
    With the default `noise`, intervals for chosen candidates have the stated coverage if repeated runs differ by 3 %.
    """

    batch: float = 0.041
    cluster: float = 0.07
    both: float = 0.025
    own: float = 0.015
    noise: float = 0.02
    batch_doublings: float = 1.3
    cluster_doublings: float = 1.2


RUN_NOISE: Final = ResidualScales().noise
"""The standard deviation of one run's log step time.

The uncertainty of a measured configuration is at most this, however far other configurations are from the form.
"""
_STRAYING, _STRAYING_SHARE = 3.5, 0.25
"""A quarter of jobs are assumed to deviate 3.5 times as far from the form as other jobs.

With these values, the intervals for the irregular grids in one half of the public grids contained 87 % of the
configurations that were not run, as intended.
"""


def hypotheses(scales: ResidualScales) -> tuple[tuple[ResidualScales, float], ...]:
    """Return two hypotheses about a job's deviation from the form, each with the share of jobs that it describes.

    Most jobs follow the form. For all other jobs, the step time jumps between batches if different kernels are chosen,
    or between clusters if a link is congested. The measurements determine the weights of the two hypotheses.
    """
    far = {name: _STRAYING * getattr(scales, name) for name in ("batch", "cluster", "both", "own")}
    return (scales, 1.0 - _STRAYING_SHARE), (replace(scales, **far), _STRAYING_SHARE)


def residual_covariance(first: Points, second: Points, scales: ResidualScales) -> FloatArray:
    """Return the covariance of the residuals without `own` and `noise`, shape (len(first), len(second)).

    The covariance decreases exponentially with the distance between the points in doublings.
    """
    ranks, nodes = _distance(first.world_size, second.world_size), _distance(first.num_nodes, second.num_nodes)
    batch = np.exp(-_distance(first.local_batch_size, second.local_batch_size) / scales.batch_doublings)
    cluster = np.exp(-(ranks + 0.5 * nodes) / scales.cluster_doublings)
    return scales.batch**2 * batch + scales.cluster**2 * cluster + scales.both**2 * batch * cluster


def residual_variance(scales: ResidualScales) -> float:
    """Return the prior variance of the residual at any single point, without `own` and `noise`."""
    return scales.batch**2 + scales.cluster**2 + scales.both**2


def same_points(first: Points, second: Points) -> npt.NDArray[np.bool_]:
    """Return a boolean array, shape (len(first), len(second)), that marks equal points; variants are ignored."""
    same = np.ones((len(first), len(second)), dtype=np.bool_)
    for name in Points.COLUMNS:
        same &= getattr(first, name)[:, None] == getattr(second, name)[None, :]
    return same


def _distance(first: FloatArray, second: FloatArray) -> FloatArray:
    return np.asarray(np.abs(np.log2(first)[:, None] - np.log2(second)[None, :]), dtype=np.float64)
