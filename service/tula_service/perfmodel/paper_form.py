"""The paper's additive forms (equations 2a, 2c), kept as the baselines that the physical form has to beat."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from tula_service.perfmodel.points import FloatArray, Points, StepTimeObservations

_PRIOR_DOF = 3.0
_PRIOR_SD = 0.1
_LEAST = 1e-12


@dataclass(frozen=True)
class BaselineFit:
    """t = m * (a + c * b) + s * phi(N); phi(N) = 1 - 1/N for a ring and N for a parameter server."""

    coefficients: FloatArray
    servers: bool
    gram_inverse: FloatArray
    log_sd: float
    dof: float

    def predict(self, points: Points) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """Mean step time, standard deviation of its log, compute and communication; seconds, shape (n,) each."""
        columns = _columns(points, self.servers)
        parts = columns * self.coefficients
        mean = np.maximum(parts.sum(axis=1), _LEAST)
        relative = columns / mean[:, None]
        leverage = np.einsum("ij,jk,ik->i", relative, self.gram_inverse, relative)
        sd = self.log_sd * np.sqrt(1.0 + np.minimum(leverage, 100.0))
        return mean, sd, np.maximum(parts[:, 0] + parts[:, 1], _LEAST), np.maximum(parts[:, 2], _LEAST)


def fit_baseline(observations: StepTimeObservations, *, servers: bool) -> BaselineFit:
    """Non-negative least squares on relative errors."""
    columns = _columns(observations.points, servers) / observations.step_time_s[:, None]
    size = np.maximum(np.linalg.norm(columns, axis=0), _LEAST)
    coefficients = nnls(columns / size, np.ones(len(observations)))[0] / size
    missed = columns @ coefficients - 1.0
    dof = _PRIOR_DOF + max(len(observations) - np.count_nonzero(coefficients), 0)
    variance = (_PRIOR_DOF * _PRIOR_SD**2 + float(missed @ missed)) / dof
    return BaselineFit(coefficients, servers, np.linalg.pinv(columns.T @ columns), float(np.sqrt(variance)), float(dof))


def _columns(points: Points, servers: bool) -> FloatArray:
    sync = points.world_size if servers else 1.0 - 1.0 / points.world_size
    return np.column_stack([points.grad_accum_steps, points.grad_accum_steps * points.local_batch_size, sync])
