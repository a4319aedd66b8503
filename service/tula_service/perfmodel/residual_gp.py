"""The residual of the form `overlap`: a Gaussian process on log step time over batch, cluster, and their product."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tula_service.perfmodel.points import FloatArray, Points


@dataclass(frozen=True)
class ResidualScales:
    """Prior standard deviations of log step time around the form, and over how many doublings they stay correlated.

    `batch` is shared by all clusters at one batch (kernel choice), `cluster` by all batches on one cluster (link
    contention), `both` belongs to a configuration and its neighbours, `own` to one configuration alone, `noise` to one
    run: with it, choices from runs that differ by 3 % lie inside their intervals as often as stated.
    """

    batch: float = 0.041
    cluster: float = 0.07
    both: float = 0.025
    own: float = 0.015
    noise: float = 0.02
    batch_doublings: float = 1.3
    cluster_doublings: float = 1.2


_STRAYING, _STRAYING_SHARE = 3.5, 0.25
"""A quarter of the jobs stray 3.5 times as far: on one half of the public grids, intervals of irregular ones then hold
87 % of what was not run, as wanted."""


def hypotheses(scales: ResidualScales) -> tuple[tuple[ResidualScales, float], ...]:
    """Two beliefs about how far a job strays from the form, each with the share of jobs that it holds for.

    Most jobs follow the form; in some, step time jumps with the batch (another kernel is chosen) or with the cluster (a
    congested link). The measurements decide between the two.
    """
    far = {name: _STRAYING * getattr(scales, name) for name in ("batch", "cluster", "both", "own")}
    return (scales, 1.0 - _STRAYING_SHARE), (replace(scales, **far), _STRAYING_SHARE)


def residual_covariance(first: Points, second: Points, scales: ResidualScales) -> FloatArray:
    """Covariance without `own` and `noise`, shape (len(first), len(second)); exponential in log2 distance."""
    batch, cluster = batch_correlation(first, second, scales), cluster_correlation(first, second, scales)
    return scales.batch**2 * batch + scales.cluster**2 * cluster + scales.both**2 * batch * cluster


def batch_correlation(first: Points, second: Points, scales: ResidualScales) -> FloatArray:
    """Correlation of what is shared by all clusters at one batch, shape (len(first), len(second))."""
    apart = _distance(first.local_batch_size, second.local_batch_size)
    return np.asarray(np.exp(-apart / scales.batch_doublings), dtype=np.float64)


def cluster_correlation(first: Points, second: Points, scales: ResidualScales) -> FloatArray:
    """Correlation of what is shared by all batches on one cluster, shape (len(first), len(second))."""
    apart = _distance(first.world_size, second.world_size) + 0.5 * _distance(first.num_nodes, second.num_nodes)
    return np.asarray(np.exp(-apart / scales.cluster_doublings), dtype=np.float64)


def residual_variance(scales: ResidualScales) -> float:
    """Prior variance of the residual at any one point, without `own` and `noise`."""
    return scales.batch**2 + scales.cluster**2 + scales.both**2


def same_points(first: Points, second: Points) -> npt.NDArray[np.bool_]:
    """Where both are the same configuration, shape (len(first), len(second)); instance types are not compared."""
    same = np.ones((len(first), len(second)), dtype=np.bool_)
    for name in ("num_nodes", "world_size", "local_batch_size", "grad_accum_steps"):
        same &= getattr(first, name)[:, None] == getattr(second, name)[None, :]
    return same


def _distance(first: FloatArray, second: FloatArray) -> FloatArray:
    return np.asarray(np.abs(np.log2(first)[:, None] - np.log2(second)[None, :]), dtype=np.float64)
