"""When a profiling run has measured enough steps to know its step time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from tula_service.perfmodel.points import FloatArray, ObservationError, column

_FEWEST_STEPS = 5
_BATCHES = 5
_LEVEL = 0.95


@dataclass(frozen=True)
class StepTimeSummary:
    """The step time of one run: its robust centre, the relative standard error of that, and the number of steps."""

    step_time_s: float
    relative_sd: float
    steps: int


def summarise_steps(step_times_s: Sequence[float] | FloatArray) -> StepTimeSummary:
    """Mean of the middle 80 % of the steps, with a standard error that allows for steps that resemble their neighbours.

    The error is the larger of the trimmed-mean formula and the spread of five successive batches' means. Raises
    ObservationError without a step, or on one that is not positive and finite.
    """
    times = column("step_times_s", step_times_s, above=0.0)
    if times.size == 0:
        raise ObservationError("step_times_s: there are none; measure at least one step.")
    low, high = np.quantile(times, [0.1, 0.9])
    clipped = np.clip(times, low, high)
    centre = float(clipped.mean())
    if times.size < 2:
        return StepTimeSummary(centre, 0.3, 1)
    error = float(clipped.std(ddof=1)) / (0.8 * np.sqrt(times.size))
    if times.size >= 2 * _BATCHES:
        means = [float(part.mean()) for part in np.array_split(clipped, _BATCHES)]
        error = max(error, float(np.std(means, ddof=1)) / np.sqrt(_BATCHES))
    return StepTimeSummary(centre, error / centre, int(times.size))


def measured_precisely_enough(step_times_s: Sequence[float] | FloatArray, precision: float = 0.02) -> bool:
    """True when the 95 % interval of the mean step time is within +- `precision` (relative): the run may end.

    At least five steps after warm-up are wanted, however alike they are.
    """
    column("precision", [precision], above=0.0)
    times = column("step_times_s", step_times_s, above=0.0)
    if times.size < _FEWEST_STEPS:
        return False
    summary = summarise_steps(times)
    freedom = min(times.size, _BATCHES) - 1 if times.size < 20 else times.size - 1
    reach = float(special.stdtrit(freedom, 0.5 + _LEVEL / 2.0))
    return reach * summary.relative_sd <= precision
