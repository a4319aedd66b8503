"""Reduce measured step times to what the forms of the step time fit.

The forms describe a step that waits for no data, so this module takes the waits out, keeps them apart, and merges
repeats of one configuration.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np

from tula_service.perfmodel.points import FloatArray, PointKey, Points, StepTimeObservations
from tula_service.perfmodel.variants import Variant, switches
from tula_wire.options import Options

_LEAST_SHARE = 0.01  # of a step: a shorter wait is the time that taking a batch from a full queue needs
_HIDES_NOTHING = 0.02  # the weight of h = 0 where the runs do not tell loading from hiding
_LEAST_REST = 0.02  # of a step
_PRIOR_DOF, _PRIOR_SD = 3.0, 0.1
_MOST_ROUNDS = 5
_SD_PER_DEVIATION = 1.48  # standard deviation over the median absolute deviation, of normal values


@dataclass(frozen=True)
class InputWait:
    """How long a step of one variant waits for data.

    A loader takes `s_per_example` seconds (L) for each example, and the share `hidden` (h) of the rest of the step
    hides that time:

        t_input = max(0, L m b - h (t - t_input))        m b examples of a rank a step; 0 <= h <= 1

    A loader in the training process hides nothing (h = 0); workers that fill a queue hide up to all of it (h = 1).
    `relative_sd` is the relative error of a wait, and `measured_s` holds the measured waits in seconds. Where L was
    not measured but believed, `unsure_s_per_example` is how far it may be off, in seconds for each example.
    """

    s_per_example: float
    hidden: float
    relative_sd: float
    measured_s: Mapping[PointKey, float]
    unsure_s_per_example: float = 0.0

    def predict(self, points: Points, rest_s: FloatArray) -> FloatArray:
        """Return the seconds of waiting, shape (n,), in steps that take `rest_s` without a wait.

        A point whose wait was measured keeps the measured wait.
        """
        loading = self.s_per_example * points.local_batch_size * points.grad_accum_steps
        waits = np.maximum(loading - self.hidden * rest_s, 0.0)
        measured = [self.measured_s.get(row) for row in points.rows()]
        return np.array([wait if seen is None else seen for wait, seen in zip(waits, measured, strict=True)])

    def sd_s(self, points: Points, rest_s: FloatArray) -> FloatArray:
        """Return the standard deviation of `predict`, shape (n,), in seconds."""
        slower = replace(self, s_per_example=self.s_per_example + self.unsure_s_per_example)
        wait_s = self.predict(points, rest_s)
        return np.hypot(self.relative_sd * wait_s, slower.predict(points, rest_s) - wait_s)

    def with_loader(self, factor: float) -> InputWait:
        """Return the waits of a loader that is believed to take `factor` times as long for an example.

        Half of the change is its standard deviation: whether workers help depends on what they wait for.
        """
        s_per_example = self.s_per_example * factor
        unsure = 0.5 * abs(self.s_per_example - s_per_example)
        return replace(self, s_per_example=s_per_example, measured_s={}, unsure_s_per_example=unsure)


NO_WAIT = InputWait(0.0, 0.0, 0.0, {})


@dataclass(frozen=True)
class ReducedObservations:
    """Measured step times without the waits for data, and these waits.

    `merged` has one row for each configuration, and `extremes`, shape (n, 2), holds the least and the largest step time
    of its runs in seconds. `by_variant` holds the rows of each variant, with the number of runs that each row
    merges, shape (rows,); `input_waits` describes how a step waits for data in each. In both, the variant with the
    fewest switches from the base comes first, and of these the one with most rows.
    """

    merged: StepTimeObservations
    extremes: FloatArray
    by_variant: Mapping[Variant, tuple[StepTimeObservations, FloatArray]]
    input_waits: Mapping[Variant, InputWait]


def reduce_observations(observations: StepTimeObservations, base: Options = ()) -> ReducedObservations:
    """Take the waits out of measured steps, merge repeats, and return both results; `base` are the base options."""
    measured = observations.by_variant()
    waits = {name: fit_input_wait(rows) for name, rows in measured.items()}
    merged, repeats, extremes = merge_repeats(_without_waits(observations))
    rows_of = {name: merged.points.rows_of(name) for name in measured}
    ordered = sorted(rows_of, key=lambda name: (len(switches(base, name.options)), -rows_of[name].size))
    by_variant = {name: (merged.take(rows_of[name]), repeats[rows_of[name]]) for name in ordered}
    return ReducedObservations(merged, extremes, by_variant, {name: waits[name] for name in ordered})


def fit_input_wait(observations: StepTimeObservations) -> InputWait:
    """Fit the wait of one variant to its rows by least squares, relative to the step.

    Only rows that wait, or that the fit expects to wait, count. Return `NO_WAIT` where no row waits.
    """
    from scipy.optimize import lsq_linear  # imported on use: few jobs wait for data

    reported, points = np.isfinite(observations.input_time_s), observations.points
    step_s, input_s = observations.step_time_s[reported], observations.input_time_s[reported]
    share = input_s / step_s
    examples = (points.local_batch_size * points.grad_accum_steps)[reported]
    columns = np.column_stack([examples / step_s, share - 1.0])
    waiting = share > _LEAST_SHARE
    if not waiting.any():
        return NO_WAIT
    scale = float(columns[:, 0].max())
    for _ in range(_MOST_ROUNDS):
        design = np.vstack([columns[waiting] / [scale, 1.0], [0.0, _HIDES_NOTHING]])
        solution = lsq_linear(design, np.append(share[waiting], 0.0), bounds=([0.0, 0.0], [np.inf, 1.0])).x / [
            scale,
            1.0,
        ]
        predicted = np.maximum(columns @ solution, 0.0)
        before, waiting = waiting, waiting | (predicted > _LEAST_SHARE)
        if (before == waiting).all():
            break
    missed = (predicted - share)[waiting] / np.maximum(share[waiting], _LEAST_SHARE)
    dof = _PRIOR_DOF + max(int(waiting.sum()) - 2, 0)
    variance = (_PRIOR_DOF * _PRIOR_SD**2 + float(missed @ missed)) / dof
    measured = dict(zip(compress(points.rows(), reported), input_s.tolist(), strict=True))
    return InputWait(float(solution[0]), float(solution[1]), float(np.sqrt(variance)), measured)


def _without_waits(observations: StepTimeObservations) -> StepTimeObservations:
    """Return the observations without their waits for data, as the forms count a step.

    The absolute error stays the same, so that the relative error of the shorter step grows.
    """
    rest_s = observations.step_time_s - np.nan_to_num(observations.input_time_s)
    step_s = np.maximum(rest_s, _LEAST_REST * observations.step_time_s)
    relative_sd = observations.relative_sd * observations.step_time_s / step_s
    return replace(observations, step_time_s=step_s, relative_sd=relative_sd)


def merge_repeats(observations: StepTimeObservations) -> tuple[StepTimeObservations, FloatArray, FloatArray]:
    """Merge the rows of each configuration into one: the median of three or more, the geometric mean of two.

    Return the merged rows, the number of rows that each one merges, shape (n,), and the least and the largest step time
    of these in seconds, shape (n, 2).
    """
    points = observations.points
    groups: defaultdict[object, list[int]] = defaultdict(list)
    for row, key in enumerate(points.rows()):
        groups[key].append(row)
    extremes, columns = [], defaultdict(list)
    for group in groups.values():
        times = observations.step_time_s[group]
        extremes.append((times.min(), times.max()))
        for name in StepTimeObservations.OPTIONAL:
            values = getattr(observations, name)[group]
            values = values[np.isfinite(values)]
            columns[name].append(float(np.median(values)) if values.size else math.nan)
        # The error of the middle combines the errors within the runs and the spread between them.
        middle = float(np.median(np.log(times)))
        between = _SD_PER_DEVIATION * float(np.median(np.abs(np.log(times) - middle)))
        within = float(np.nan_to_num(columns["relative_sd"].pop()))
        columns["relative_sd"].append(math.hypot(within, between) / math.sqrt(len(group)))
        columns["step_time_s"].append(math.exp(middle))
    merged = StepTimeObservations.at(points.take([group[0] for group in groups.values()]), **columns)
    return merged, np.array([float(len(group)) for group in groups.values()]), np.array(extremes)
