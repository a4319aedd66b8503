"""Fits the paper's step-time forms (equation 2), which are used for jobs that select them.

In these forms, the step time is the sum of compute time and communication time:

    t = m (a + A b) + s phi(N)      phi(N) = 1 - 1/N for a ring, N for a parameter server (equation 2c)

Compute is proportional to b (a = 0) in the paper's equation 2b and in a fit to two configurations. With three or more
configurations, the constant a is also fitted, and may be 0. The fit minimises squared relative errors and allows only
non-negative coefficients.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tula_service.perfmodel.points import FloatArray, Points, StepTimeObservations
from tula_service.perfmodel.step_time_form import LogStepTimes
from tula_wire.enums import StepTimeForm

_TERMS = 3
_PRIOR_DOF = 3.0
_PRIOR_SD = 0.1
_LEAST = 1e-12
_LARGEST_LEVERAGE = 100.0


@dataclass(frozen=True)
class PaperFit:
    """The least-squares fit of one variant: the coefficients (a, A, s), the inverse Gram matrix, and the error."""

    form: StepTimeForm
    coefficients: FloatArray
    gram_inverse: FloatArray
    log_sd: float
    dof: float

    def predict_step(self, points: Points) -> LogStepTimes:
        """Return the predicted measurement of one run at each of n points; the uncertainty grows with the leverage."""
        columns = _columns(points, self.form)
        parts = columns * self.coefficients
        mean = np.maximum(parts.sum(axis=1), _LEAST)
        relative = columns / mean[:, None]
        leverage = np.einsum("ij,jk,ik->i", relative, self.gram_inverse, relative)
        return LogStepTimes(
            mean=np.log(mean),
            sd=self.log_sd * np.sqrt(1.0 + np.minimum(leverage, _LARGEST_LEVERAGE)),
            known_sd=self.log_sd * np.sqrt(np.minimum(leverage, _LARGEST_LEVERAGE)),
            dof=self.dof,
            compute=np.log(np.maximum(parts[:, 0] + parts[:, 1], _LEAST)),
            communication=np.log(np.maximum(parts[:, 2], _LEAST)),
        )


def fit_paper_form(observations: StepTimeObservations, form: StepTimeForm) -> PaperFit | None:
    """Return the fit to the rows of one variant, or None if there is only one row; a is 0 if there are two rows."""
    from scipy.optimize import nnls  # imported here because only jobs that select these forms need it

    if len(observations) < _TERMS - 1:
        return None
    columns = _columns(observations.points, form) / observations.step_time_s[:, None]
    if len(observations) < _TERMS:
        columns[:, 0] = 0.0
    size = np.maximum(np.linalg.norm(columns, axis=0), _LEAST)
    coefficients = nnls(columns / size, np.ones(len(observations)))[0] / size
    missed = columns @ coefficients - 1.0
    dof = _PRIOR_DOF + max(len(observations) - int(np.count_nonzero(coefficients)), 0)
    variance = (_PRIOR_DOF * _PRIOR_SD**2 + float(missed @ missed)) / dof
    inverse = np.asarray(np.linalg.pinv(columns.T @ columns), np.float64)
    return PaperFit(form, coefficients, inverse, float(np.sqrt(variance)), float(dof))


def _columns(points: Points, form: StepTimeForm) -> FloatArray:
    sync = points.world_size if form == "parameter_server" else 1.0 - 1.0 / points.world_size
    return np.column_stack([points.grad_accum_steps, points.grad_accum_steps * points.local_batch_size, sync])
