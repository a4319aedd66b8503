"""Computes the gradient noise scale, the progress per example in a larger batch, and the learning rate of a batch.

All functions are pure. The rule for the learning rate is the rule that performed best in our experiments for the same
kind of network (`experiments/generalization/results/quick.json`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

import tula_wire as wire
from tula_service.perfmodel.guard import UNDIVIDED
from tula_service.perfmodel.intervals import Interval
from tula_wire.bounds import NOISE_WEIGHT
from tula_wire.format import multiple
from tula_wire.jobs import ScalingRule

MOST_TIMES = 16.0
"""The largest ratio of batches in the experiments; the advice for a larger ratio mentions this limit."""
PARTS = 20
"""The number of equal parts into which a training run's examples are divided; a `NoiseCurve` has a value for each."""
LEAST_COVERED = 0.9
"""The minimum share of a training run's examples that its telemetry must cover for its `NoiseCurve` to have values."""
_AS_LOW, _LOST_POINTS = 1.05, 1.0
_MEASURED_OPTIMIZERS = ("sgd", "momentum", "adam")
_MIN_VALUES, _MIN_BLOCKS, _Z_90 = 8, 4, 1.6448536269514722


def estimate_noise_scale(values: ArrayLike) -> Interval | None:
    """Return B_noise = tr(Sigma) / |G|^2 in examples, from a run's `gradient_noise_scale` in step order.

    The estimate is a mean over the second half of the run, because the ratio grows during training (McCandlish et al.
    2018, figure 4). The mean is geometric, because the errors of a ratio are factors. The 90 % interval comes from
    means of blocks of about sqrt(n) steps, because neighbouring values share a moving average. Values that are not
    finite or not positive come from steps without a measurable signal, and are ignored. The result is None if most
    values are ignored, since the noise scale is then too high to be measured, or if there are fewer than eight values.
    """
    column = np.asarray(values, dtype=np.float64).ravel()
    tail = column[column.size // 2 :]
    usable = tail[np.isfinite(tail) & (tail > 0.0)]
    if usable.size < _MIN_VALUES or 2 * usable.size < np.count_nonzero(~np.isnan(tail)):
        return None
    logs = np.log(usable)
    num_blocks = max(_MIN_BLOCKS, round(math.sqrt(logs.size)))
    means = np.array([block.mean() for block in np.array_split(logs, num_blocks)])
    half_width = _Z_90 * float(means.std(ddof=1)) / math.sqrt(num_blocks)
    centre = float(logs.mean())
    return Interval(math.exp(centre), math.exp(centre - half_width), math.exp(centre + half_width))


@dataclass(frozen=True)
class NoiseCurve:
    """The gradient noise scale during a training run, in examples, with a value for each of `PARTS` parts of the run.

    `covered` is the fraction of the run's examples that the telemetry covers. If this fraction is too small, or if too
    few parts have a measurement, `values` is empty.
    """

    run_id: str
    covered: float
    values: tuple[float, ...] = ()


def noise_curve(
    run_id: str, steps: ArrayLike, values: ArrayLike, *, global_batch_size: int, examples: float
) -> NoiseCurve:
    """Return the noise scale during a run over `examples` examples, given the telemetry columns `steps` and `values`.

    The value of a part is the geometric mean over its steps. If most steps of a part have no signal, its noise is too
    high to be measured, and the value of the previous part is used. Parts before the first measured part have the same
    value as the first measured part.
    """
    begun = np.asarray(steps, dtype=np.float64).ravel() * global_batch_size / examples
    column = np.asarray(values, dtype=np.float64).ravel()
    begun, column = begun[~np.isnan(column)], column[~np.isnan(column)]
    covered = min(1.0, float(begun.max(initial=0.0)) + global_batch_size / examples) if begun.size else 0.0
    part = np.minimum((begun * PARTS).astype(np.int64), PARTS - 1)
    logs = np.full(PARTS, np.nan)
    for number in np.unique(part):
        seen = column[part == number]
        usable = seen[np.isfinite(seen) & (seen > 0.0)]
        if 2 * usable.size >= seen.size:
            logs[number] = np.log(usable).mean()
    measured = np.flatnonzero(~np.isnan(logs))
    if covered < LEAST_COVERED or 2 * measured.size < PARTS:
        return NoiseCurve(run_id, covered)
    nearest = np.searchsorted(measured, np.arange(PARTS), side="right") - 1
    return NoiseCurve(run_id, covered, tuple(np.exp(logs[measured[np.maximum(nearest, 0)]]).tolist()))


@dataclass(frozen=True)
class StatisticalEfficiency:
    """The statistical efficiency of a global batch B relative to the base batch B_0, at a noise scale in examples."""

    noise_scale: float
    base_batch_size: float

    def of(self, global_batch_size: float) -> float:
        """Return the progress per example, (B_noise + B_0) / (B_noise + B) (Pollux 2021, equation 7).

        The progress is 1 at B_0 and decreases with B.
        """
        return (self.noise_scale + self.base_batch_size) / (self.noise_scale + global_batch_size)

    def learning_rate_factor(self, global_batch_size: float) -> float:
        """Return the factor by which the `gain` policy increases the learning rate of the base batch, at most B / B_0.

        The factor is (1 + c N / B_0) / (1 + c N / B), where N = `noise_scale` and c = NOISE_WEIGHT. AdaScale's gain has
        c = 1.
        """
        weighted = NOISE_WEIGHT * self.noise_scale
        return (1.0 + weighted / self.base_batch_size) / (1.0 + weighted / global_batch_size)

    @property
    def max_sensible_batch_size(self) -> int:
        """Return B_noise + 2 B_0, the batch at which the progress per example is half as large as at the base batch."""
        return int(self.noise_scale + 2.0 * self.base_batch_size + 1e-9)


@dataclass(frozen=True)
class LearningRate:
    """The learning rate for a global batch of `times` the base batch, relative to the learning rate for the base batch.

    `by_noise_scale` is the gain, or None if the noise scale is unknown; as in `TulaOptimizer`, the square root of the
    gain is used for Adam. `settled` is True if the noise scale was measured in a run of at least 100 steps. `divided`
    is True if a step has several ranks or micro-steps, whose gradients `TulaOptimizer` can compare.
    """

    model: wire.ModelSpec
    base_batch_size: int
    times: float
    by_noise_scale: float | None
    settled: bool = True
    divided: bool = True

    @property
    def rule(self) -> ScalingRule | None:
        """Return the rule that scales the learning rate.

        The result is None for the base batch, for a single rank with one micro-step, and for optimizers that our
        experiments did not include.
        """
        return "gain" if self.times > 1.0 and self.divided and self.model.optimizer in _MEASURED_OPTIMIZERS else None

    @property
    def factor(self) -> float | None:
        """Return the learning rate divided by the base batch's learning rate, or None if the noise scale is unknown."""
        if self.times <= 1.0 or not self.divided:
            return 1.0
        gain = self.by_noise_scale
        return math.sqrt(gain) if gain and self.model.optimizer == "adam" else gain

    @property
    def advice(self) -> str:
        """Return a sentence on how to scale the base batch's learning rate, or an empty string for the base batch."""
        if self.times <= 1.0:
            return ""
        start = f"Multiply the learning rate of a batch of {self.base_batch_size} by"
        if not self.divided:
            said = f"{UNDIVIDED[0].upper()}{UNDIVIDED[1:]}."
        elif self.factor is not None:
            seen = "" if self.settled else " of short runs and may be wrong by a large factor"
            said = f"{start} {multiple(self.factor)}, which follows from the gradient noise scale{seen}. "
            said += "`TulaOptimizer` increases the rate step by step; without it, use a warm-up."
        else:
            most = math.sqrt(self.times) if self.model.optimizer == "adam" else self.times
            said = (
                f"{start} 1 to {multiple(most)}, depending on the gradient noise scale, which `TulaOptimizer` measures."
            )
        if self.times > MOST_TIMES:
            said += f" Our experiments used at most {MOST_TIMES:g} times the base batch"
            said += "; also try LARS." if self.model.batch_normalization and self.model.optimizer != "adam" else "."
        return said


@dataclass(frozen=True)
class Outcome:
    """The result of a training run: its global batch, its training loss, and its validation accuracy in per cent."""

    global_batch_size: int
    loss: float
    validation_accuracy: float


def lost_regularisation(outcomes: Sequence[Outcome]) -> str | None:
    """Return advice if a larger batch reaches the same training loss as a smaller one but a lower validation accuracy.

    Too few steps cannot be the cause of this difference, so no learning-rate rule can remove it. The best of the runs
    with the smallest batch is compared with each larger batch; the tolerances are 5 % of the loss and one percentage
    point of accuracy. If there is no such difference, the result is None.
    """
    if not outcomes:
        return None
    base = min(outcomes, key=lambda outcome: (outcome.global_batch_size, -outcome.validation_accuracy))
    for other in sorted(outcomes, key=lambda outcome: outcome.global_batch_size):
        lost = base.validation_accuracy - other.validation_accuracy
        if (
            other.global_batch_size > base.global_batch_size
            and other.loss <= _AS_LOW * base.loss
            and lost > _LOST_POINTS
        ):
            return (
                f"The training loss ends at {other.loss:.3g} with a global batch of {other.global_batch_size} and at "
                f"{base.loss:.3g} with {base.global_batch_size}, but the validation accuracy is {lost:.1f} points "
                "lower with the larger batch, which lacks regularisation, not steps. No learning-rate rule can "
                "compensate for this. Use more augmentation or weight decay, a smaller batch, or micro-steps of the "
                "smaller local batch."
            )
    return None
