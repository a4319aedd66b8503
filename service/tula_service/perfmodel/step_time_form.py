"""The physical step-time form: saturating compute, hierarchical communication, overlap, accumulation; in logarithms.

    t        = (m - 1) * T_g + (T_g^g + T_s^g)^(1/g)          m micro-steps, only the last one waits for gradients
    T_g      = c * (a^h + x^h)^(1/h),  x = (b / b_ref)^q      compute of a micro-step: a floor, then growth with b
    T_s      = c * (s_intra * phi(r)^k_intra  [r > 1]         r ranks in a node
                  + s_inter * phi(n)^k_inter * r^k_share [n > 1])   n nodes; the ranks of a node share its link
    phi(x)   = x / 2                                          so that s is the cost of two participants

Everything but c has no unit, so one Gaussian prior fits a phone-sized network and a language model alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tula_service.perfmodel.points import FloatArray, Points

_SLOPE_STEP = 1e-5
_ABSENT = -60.0


@dataclass(frozen=True)
class Parameter:
    """One unknown of the form: how it is written in the equation, its unit, and how theta encodes it."""

    symbol: str
    unit: str
    meaning: str
    encoding: str

    def decode(self, value: float) -> float:
        """The parameter in its unit from its entry in theta."""
        if self.encoding == "log":
            return math.exp(value)
        return value if self.encoding == "as is" else 1.0 + math.exp(value)


PARAMETERS: tuple[Parameter, ...] = (
    Parameter("c", "s", "compute of one micro-step at b_ref, were there no floor", "log"),
    Parameter("a", "1", "floor of compute: launch overhead, under-used device at small b", "log"),
    Parameter("q", "1", "growth of compute with the batch", "log"),
    Parameter("h", "1", "sharpness of the bend between floor and growth (1 = they add)", "log of h - 1"),
    Parameter("s_intra", "1", "collective between two ranks of a node, over c", "log"),
    Parameter("k_intra", "1", "its growth with the ranks of a node", "as is"),
    Parameter("s_inter", "1", "collective between two nodes, over c", "log"),
    Parameter("k_inter", "1", "its growth with the nodes", "as is"),
    Parameter("k_share", "1", "its growth with the ranks that share a node's link", "as is"),
    Parameter("g", "1", "overlap (1 = none, large = communication hides behind compute)", "log of g - 1"),
)


@dataclass(frozen=True)
class Terms:
    """Natural logarithms of the parts, in seconds, shape (..., n): whole step, one micro-step's compute, collective."""

    step: FloatArray
    compute: FloatArray
    communication: FloatArray


def log_terms(theta: FloatArray, points: Points, reference_batch_size: float) -> Terms:
    """The form at `theta` of shape (..., 10), for n points; `communication` is -60 where there is nobody to talk to."""
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


def log_step_time(theta: FloatArray, points: Points, reference_batch_size: float) -> FloatArray:
    """log of the step time in seconds; theta (..., 10) and n points give shape (..., n)."""
    return log_terms(theta, points, reference_batch_size).step


def jacobian(theta: FloatArray, points: Points, reference_batch_size: float) -> tuple[Terms, FloatArray, FloatArray]:
    """The terms at `theta` of shape (10,), and the slopes of log step and log compute in theta, shape (n, 10) each."""
    shifted = np.vstack([theta[None, :], theta[None, :] + _SLOPE_STEP * np.eye(theta.size)])
    terms = log_terms(shifted, points, reference_batch_size)
    step = (terms.step[1:] - terms.step[0]).T / _SLOPE_STEP
    compute = (terms.compute[1:] - terms.compute[0]).T / _SLOPE_STEP
    return Terms(terms.step[0], terms.compute[0], terms.communication[0]), step, compute
