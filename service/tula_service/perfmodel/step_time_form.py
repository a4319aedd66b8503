"""The step-time form `overlap`: saturating compute, two levels of network, overlap, accumulation; in logarithms.

    t        = (m - 1) * T_g + (T_g^g + T_s^g)^(1/g)          m micro-steps, only the last one waits for gradients
    T_g      = c * (a^h + x^h)^(1/h),  x = (b / b_ref)^q      compute of a micro-step: a floor, then growth with b
    T_s      = c * (s_intra * phi(r)^k_intra  [r > 1]         r ranks in a node
                  + s_inter * phi(n)^k_inter * r^k_share [n > 1])   n nodes; the ranks of a node share its link
    phi(x)   = x / 2                                          so that s is the cost of two participants

theta holds the ten parameters in this order; everything but c has no unit, so one Gaussian prior fits both a
phone-sized network and a language model.

    0  log c        c in seconds: compute of one micro-step at b_ref, were there no floor
    1  log a        floor of compute: launch overhead, a device that small batches leave idle
    2  log q        growth of compute with the batch
    3  log(h - 1)   sharpness of the bend between floor and growth (h = 1: they add)
    4  log s_intra  collective between two ranks of a node, over c
    5  k_intra      its growth with the ranks of a node
    6  log s_inter  collective between two nodes, over c
    7  k_inter      its growth with the nodes
    8  k_share      its growth with the ranks that share a node's link
    9  log(g - 1)   overlap (g = 1: none; large: communication hides behind compute)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tula_service.perfmodel.points import FloatArray, Points

NUM_PARAMETERS = 10
COLLECTIVES = (4, 6)
"""The entries of theta that times of collectives are proportional to: s_intra and s_inter."""

_SLOPE_STEP = 1e-5
_ABSENT = -60.0


def to_seconds(entries: Sequence[int]) -> FloatArray:
    """The matrix, shape (10, 10), that turns these entries of theta, which are relative to c, into logs of seconds."""
    matrix = np.eye(NUM_PARAMETERS)
    matrix[list(entries), 0] = 1.0
    return matrix


@dataclass(frozen=True)
class Terms:
    """Natural logarithms of the parts, in seconds, shape (..., n): whole step, one micro-step's compute, collective."""

    step: FloatArray
    compute: FloatArray
    communication: FloatArray


@dataclass(frozen=True)
class LogStepTimes:
    """Natural logarithms of predicted seconds, shape (n,): mean of a whole step, its compute, and its communication.

    `sd` is the standard deviation of the log step time around `mean`, Student's t with `dof` degrees of freedom.
    """

    mean: FloatArray
    sd: FloatArray
    dof: float
    compute: FloatArray
    communication: FloatArray


def log_terms(theta: FloatArray, points: Points, reference_batch_size: float) -> Terms:
    """The form at `theta` of shape (..., 10), for n points; `communication` is -60 where there is one rank only."""
    c, a, q, h, s1, k1, s2, k2, k3, g = np.moveaxis(np.asarray(theta, dtype=np.float64)[..., None], -2, 0)
    ranks = points.world_size / points.num_nodes
    growth = np.exp(q) * np.log(points.local_batch_size / reference_batch_size)
    sharpness = 1.0 + np.exp(h)
    compute = c + np.logaddexp(sharpness * a, sharpness * growth) / sharpness
    intra = np.where(ranks > 1.0, s1 + k1 * np.log(np.maximum(ranks, 1.0) / 2.0), _ABSENT)
    inter = np.where(points.num_nodes > 1.0, s2 + k2 * np.log(points.num_nodes / 2.0) + k3 * np.log(ranks), _ABSENT)
    communication = np.where(points.world_size > 1.0, c + np.logaddexp(intra, inter), _ABSENT)
    overlap = 1.0 + np.exp(g)
    last = np.logaddexp(overlap * compute, overlap * communication) / overlap
    earlier = np.log(np.maximum(points.grad_accum_steps - 1.0, 1e-30))
    return Terms(np.logaddexp(last, compute + earlier), compute, communication)


def jacobian(theta: FloatArray, points: Points, reference_batch_size: float) -> tuple[Terms, FloatArray, FloatArray]:
    """The terms at `theta` of shape (10,), and the slopes of log step and log compute in theta, shape (n, 10) each."""
    shifted = np.vstack([theta[None, :], theta[None, :] + _SLOPE_STEP * np.eye(theta.size)])
    terms = log_terms(shifted, points, reference_batch_size)
    step = (terms.step[1:] - terms.step[0]).T / _SLOPE_STEP
    compute = (terms.compute[1:] - terms.compute[0]).T / _SLOPE_STEP
    return Terms(terms.step[0], terms.compute[0], terms.communication[0]), step, compute
