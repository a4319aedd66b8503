"""How long a step waits for data: a loader needs so long for each example, and a share of the step's rest hides it.

    t_input = max(0, L m b - h (t - t_input))        m b examples of a rank a step; 0 <= h <= 1

A loader in the training process hides nothing (h = 0), workers that fill a queue hide up to all of the rest (h = 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tula_service.perfmodel.points import FloatArray, Points, StepTimeObservations

_LEAST_SHARE = 0.01  # of a step: below it, a wait is that of taking a batch from a full queue
_HIDES_NOTHING = 0.02  # how strongly, where the runs do not tell loading from hiding
_LEAST_REST = 0.02  # of a step
_PRIOR_DOF, _PRIOR_SD = 3.0, 0.1
_MOST_ROUNDS = 5


@dataclass(frozen=True)
class InputWait:
    """Of one instance type: L in seconds, h, the relative error of a wait, and the waits that were measured, s."""

    s_per_example: float
    hidden: float
    relative_sd: float
    measured_s: Mapping[tuple[str, float, float, float, float], float]

    def predict(self, points: Points, rest_s: FloatArray) -> FloatArray:
        """Seconds of waiting, shape (n,), in steps that take `rest_s` without; as measured where it was."""
        loading = self.s_per_example * points.local_batch_size * points.grad_accum_steps
        waits = np.maximum(loading - self.hidden * rest_s, 0.0)
        known = [self.measured_s.get(row) for row in points.rows()]
        return np.array([wait if seen is None else seen for wait, seen in zip(waits, known, strict=True)])


def fit_input_wait(observations: StepTimeObservations) -> InputWait | None:
    """Least squares, relative to the step, over the rows of one type that wait or would; None where none does."""
    from scipy.optimize import lsq_linear  # imported on use: few jobs wait for data

    reported = observations.take(np.isfinite(observations.input_time_s))
    points, step_s = reported.points, reported.step_time_s
    share = reported.input_time_s / step_s
    columns = np.column_stack([points.local_batch_size * points.grad_accum_steps / step_s, share - 1.0])
    waiting = share > _LEAST_SHARE
    if not waiting.any():
        return None
    scale = float(columns[:, 0].max())
    for _ in range(_MOST_ROUNDS):
        known = np.vstack([columns[waiting] / [scale, 1.0], [0.0, _HIDES_NOTHING]])
        found = lsq_linear(known, np.append(share[waiting], 0.0), bounds=([0.0, 0.0], [np.inf, 1.0])).x / [scale, 1.0]
        predicted = np.maximum(columns @ found, 0.0)
        before, waiting = waiting, waiting | (predicted > _LEAST_SHARE)
        if (before == waiting).all():
            break
    missed = (predicted - share)[waiting] / np.maximum(share[waiting], _LEAST_SHARE)
    dof = _PRIOR_DOF + max(int(waiting.sum()) - 2, 0)
    variance = (_PRIOR_DOF * _PRIOR_SD**2 + float(missed @ missed)) / dof
    measured = dict(zip(points.rows(), reported.input_time_s.tolist(), strict=True))
    return InputWait(float(found[0]), float(found[1]), float(np.sqrt(variance)), measured)


def without_waits(observations: StepTimeObservations) -> StepTimeObservations:
    """The same runs as if no step had waited for data; what was measured less surely than the whole says so."""
    waits = np.nan_to_num(observations.input_time_s)
    rest = np.maximum(observations.step_time_s - waits, _LEAST_REST * observations.step_time_s)
    sd = observations.relative_sd * observations.step_time_s / rest
    return replace(observations, step_time_s=rest, relative_sd=sd, input_time_s=np.full(len(observations), np.nan))
