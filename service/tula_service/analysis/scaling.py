"""Gradient scaling: the noise scale, the worth of an example in a larger batch, and the rule for a batch. Pure.

The rule for the learning rate of a larger batch is the best one in our experiments on such networks
(`experiments/generalization/results/quick.json`).
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
"""The largest ratio of batches in the experiments; beyond it, the advice says so."""
PARTS = 20
"""Number of equal parts of a training run's examples; a `NoiseCurve` has a value for each part."""
LEAST_COVERED = 0.9
"""Share of a training run's examples that its telemetry must cover for the run to count as measured throughout."""
_AS_LOW, _LOST_POINTS = 1.05, 1.0
_MEASURED_OPTIMIZERS = ("sgd", "momentum", "adam")
_MIN_VALUES, _MIN_BLOCKS, _Z_90 = 8, 4, 1.6448536269514722


def estimate_noise_scale(values: ArrayLike) -> Interval | None:
    """Return B_noise = tr(Sigma) / |G|^2 in examples, from a run's `gradient_noise_scale` in step order.

    The estimate is the geometric mean over the later half of the run, since errors of a ratio are factors and the ratio
    grows during training (McCandlish et al. 2018, figure 4). The 90 % interval comes from means of blocks of about
    sqrt(n) steps, because neighbouring values share a moving average. Values that are not finite or not positive (steps
    without a measurable signal) are left out. The result is None if they are the majority, since the noise scale is
    then too high for the run to measure, and with fewer than eight values.
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
    """The gradient noise scale over a training run, in examples: one value for each of `PARTS` parts of its examples.

    `values` is empty if too few parts have a measurement, or if `covered`, the share of the examples that the telemetry
    covers, is too small.
    """

    run_id: str
    covered: float
    values: tuple[float, ...] = ()


def noise_curve(
    run_id: str, steps: ArrayLike, values: ArrayLike, *, global_batch_size: int, examples: float
) -> NoiseCurve:
    """Return the noise scale over a training run of `examples` examples from its telemetry, both columns of shape (n,).

    The value of a part is the geometric mean of its steps. If most steps of a part show no signal, its noise is too
    high for the run to measure, and it gets the value of the previous part; parts before the first measured value get
    that value.
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
    """The worth of a global batch B at a noise scale, both in examples, relative to the base batch B_0."""

    noise_scale: float
    base_batch_size: float

    def of(self, global_batch_size: float) -> float:
        """Return the progress per example, which is 1 at B_0 and decreases with B.

        It is (B_noise + B_0) / (B_noise + B) (Pollux 2021, equation 7).
        """
        return (self.noise_scale + self.base_batch_size) / (self.noise_scale + global_batch_size)

    def learning_rate_factor(self, global_batch_size: float) -> float:
        """Return the factor by which the policy `gain` raises the learning rate of the base batch, at most B / B_0.

        It is (1 + c N / B_0) / (1 + c N / B) with N = `noise_scale` and c = NOISE_WEIGHT (AdaScale's gain has c = 1).
        """
        weighted = NOISE_WEIGHT * self.noise_scale
        return (1.0 + weighted / self.base_batch_size) / (1.0 + weighted / global_batch_size)

    @property
    def max_sensible_batch_size(self) -> int:
        """Return the largest batch B at which an example has half its worth at the base batch: B_noise + 2 B_0."""
        return int(self.noise_scale + 2.0 * self.base_batch_size + 1e-9)


@dataclass(frozen=True)
class LearningRate:
    """The learning rate of a global batch that is `times` the base batch, against the rate of the base batch.

    `by_noise_scale` is the gain, whose square root applies under Adam, as in `TulaOptimizer`; None while the noise
    scale, on which the gain depends, is unknown. `settled` is True if the noise scale comes from a run of at least 100
    steps rather than from the start of one. `divided` is True if several ranks or micro-steps share a step, so that
    `TulaOptimizer` can compare their gradients.
    """

    model: wire.ModelSpec
    base_batch_size: int
    times: float
    by_noise_scale: float | None
    settled: bool = True
    divided: bool = True

    @property
    def rule(self) -> ScalingRule | None:
        """Return the rule by which to scale the rate.

        Returns None at the base batch, if a single rank takes one micro-step per step, and for optimizers without
        experiments.
        """
        return "gain" if self.times > 1.0 and self.divided and self.model.optimizer in _MEASURED_OPTIMIZERS else None

    @property
    def factor(self) -> float | None:
        """Return the rate relative to the base batch's rate, or None if the noise scale is unknown."""
        if self.times <= 1.0 or not self.divided:
            return 1.0
        gain = self.by_noise_scale
        return math.sqrt(gain) if gain and self.model.optimizer == "adam" else gain

    @property
    def advice(self) -> str:
        """Return advice on how to scale the base batch's learning rate, in words; empty at the base batch."""
        if self.times <= 1.0:
            return ""
        start = f"Multiply the learning rate of a batch of {self.base_batch_size} by"
        if not self.divided:
            said = f"{UNDIVIDED[0].upper()}{UNDIVIDED[1:]}."
        elif self.factor is not None:
            seen = "" if self.settled else " of short runs, which may be several times off"
            said = f"{start} {multiple(self.factor)}, which follows from the gradient noise scale{seen}: "
            said += "`TulaOptimizer` raises it step by step; by hand, warm up."
        else:
            most = math.sqrt(self.times) if self.model.optimizer == "adam" else self.times
            said = f"{start} 1 to {multiple(most)}: the gradient noise scale decides, which `TulaOptimizer` measures."
        if self.times > MOST_TIMES:
            said += f" No experiment went beyond {MOST_TIMES:g} times the batch"
            said += (
                "; try LARS there too." if self.model.batch_normalization and self.model.optimizer != "adam" else "."
            )
        return said


@dataclass(frozen=True)
class Outcome:
    """The result of a training run: global batch, training loss, and accuracy on validation data in per cent."""

    global_batch_size: int
    loss: float
    validation_accuracy: float


def lost_regularisation(outcomes: Sequence[Outcome]) -> str | None:
    """Return advice if a larger batch fits the training data as well as a smaller one but validates worse, else None.

    Too few steps cannot explain such a gap, and a rule for the learning rate only makes up for too few steps. The best
    of the runs with the smallest batch is compared with each larger batch; the tolerances are 5 % of the loss and one
    percentage point of accuracy.
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
                f"At a global batch of {other.global_batch_size} the training loss ends at {other.loss:.3g}, at "
                f"{base.global_batch_size} at {base.loss:.3g}, but validation is {lost:.1f} points worse: what is "
                "missing is regularisation, not steps, and no rule for the step brings it back. More augmentation or "
                "weight decay, a smaller batch, or micro-steps of the smaller batch for a larger local batch do."
            )
    return None
