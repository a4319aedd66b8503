"""Decides which global batches preserve the base batch's accuracy, given the number of steps and the noise scale.

S(B) = floor(E D / B) is the number of steps in the whole training run, b is the base batch, and N is the gradient noise
scale. A batch B is allowed if

    B <= b,   or   S(B) >= S0  and  ( B <= k (N + 2 b)   if N is known,
                                      S(B) >= q B / b    if N is not known,
                                      or S(B) >= 5,000   in either case )

In 271 training runs of five small networks, the number of steps predicted a loss of more than one accuracy point far
better than the noise scale did. Of 13 combinations of a network and a number of epochs, none lost more than one point
with these bounds; without them, 12 did. The constants depend on the rule that scales the training steps. Of the six
cases that were trained at the largest allowed batch and were not used to choose the constants, two lost 1.0 ± 1.0 and
1.4 ± 1.4 points. `docs/gradient-scaling.md` has the details. Long training runs can preserve the accuracy with batches
far beyond the noise scale: ResNet-50 on ImageNet does so with a batch of 8,192 examples and 14,000 steps (Goyal et al.
2017). For long runs, a batch beyond the noise scale therefore only causes a warning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tula_wire.format import multiple

LONG_STEPS: Final = 5_000
UNDIVIDED: Final = "keep the learning rate, or take two micro-steps, without which `TulaOptimizer` cannot scale it"
"""The advice for one rank and one micro-step. The rate is kept because training diverges if it suddenly increases."""
_SMALL_FLOAT: Final = 1e-9


@dataclass(frozen=True)
class GuardConstants:
    """The constants S0, k and q of the module's equation, measured with one training rule.

    lost: pairs of a number of steps and the mean loss of accuracy, in points relative to the base batch, of training
    runs with fewer steps.
    """

    least_steps: int
    noise_factor: float
    steps_per_ratio: float
    lost: tuple[tuple[int, float], ...]


_LOST_BY_GAIN: Final = ((40, 39.0), (80, 21.0), (150, 7.5), (186, 3.9), (300, 1.5))
TURNED: Final = GuardConstants(250, 3.0, 40.0, ((40, 27.0), (80, 17.0), (150, 2.5)))
"""Constants for SGD with turned steps of matrices under the policy `gain`, which is the default of `TulaOptimizer`."""
SGD: Final = GuardConstants(250, 1.0, 100.0, _LOST_BY_GAIN)
"""Constants for SGD with a learning rate that is scaled by the gain, if not all steps of all matrices are turned."""
CAREFUL: Final = GuardConstants(500, 1.0, 150.0, _LOST_BY_GAIN)
"""Constants that were measured with AdamW and are used for all optimizers other than SGD."""


@dataclass(frozen=True)
class AccuracyGuard:
    """The guard of a training run with `examples` = E D; the noise scale is in examples, or None if it is unknown."""

    examples: float
    base_batch_size: int
    noise_scale: float | None = None
    constants: GuardConstants = CAREFUL

    def steps(self, global_batch_size: int) -> int:
        """Return the number of optimizer steps in the whole training run."""
        return int(self.examples / global_batch_size + _SMALL_FLOAT)

    @property
    def supported(self) -> float | None:
        """Return the largest batch that the noise supports, k (N + 2 b) examples, or None if the noise is unknown."""
        if self.noise_scale is None:
            return None
        return self.constants.noise_factor * (self.noise_scale + 2.0 * self.base_batch_size)

    def allows(self, global_batch_size: int) -> bool:
        """Return True if training with this many examples per step should preserve the base batch's accuracy."""
        if global_batch_size <= self.base_batch_size:
            return True
        steps = self.steps(global_batch_size)
        if steps < self.constants.least_steps:
            return False
        return steps >= LONG_STEPS or self.within_noise(global_batch_size)

    def within_noise(self, global_batch_size: int) -> bool:
        """Return True if the noise supports the batch or, when the noise is unknown, if there are enough steps."""
        if self.supported is not None:
            return global_batch_size <= self.supported
        ratio = global_batch_size / self.base_batch_size
        return self.steps(global_batch_size) >= self.constants.steps_per_ratio * ratio

    def sentence(
        self,
        global_batch_size: int,
        *,
        refused_larger: bool,
        learning_rate_factor: float | None = None,
        divided: bool = True,
    ) -> str:
        """Return the sentence about accuracy that accompanies a recommendation.

        refused_larger: True if larger batches were rejected. learning_rate_factor: the factor on the learning rate of
        the base batch, or None if unknown. divided: True if a step has several ranks or micro-steps, whose gradients
        `TulaOptimizer` can compare.
        """
        batch, base = global_batch_size, self.base_batch_size
        steps = self.steps(batch)
        if batch <= base:
            which = f"the base batch, {base}," if batch == base else f"{batch}, below the base batch of {base},"
            kept = f"{_steps(steps)} at {which} which keeps the accuracy"
            return f"{kept}; more epochs would allow a larger batch." if refused_larger else f"{kept}."
        counted = f"{_steps(steps)} (a batch of {base} would take {self.steps(base):,})"
        if self.supported is None:
            noise = "no run of 100 steps has shown the gradient noise yet"
        else:
            noise = f"{multiple(batch / self.supported)} times what the gradient noise supports ({self.supported:,.0f})"
        if self.allows(batch):
            if steps >= LONG_STEPS and not self.within_noise(batch):
                return f"{counted}; {noise}, but published training runs of this length lost no accuracy."
            train = "train with `TulaOptimizer`" if divided else UNDIVIDED
            if divided and learning_rate_factor is not None:
                train += f", rate x {multiple(learning_rate_factor)}"
            return f"{counted}; {noise}; most such training runs lost at most 1 point in our experiments; {train}."
        remedy = "Train for more epochs or use a smaller batch."
        if steps >= self.constants.least_steps:
            return f"Accuracy at risk: {counted}; {noise}. {remedy}"
        lost = self.constants.lost
        said = next(
            (
                f"networks trained for fewer than {n} steps lost {points:g} points on average"
                for n, points in lost
                if steps < n
            ),
            "",
        )
        said = said or f"fewer than {self.constants.least_steps} steps may be too few"
        return f"Accuracy at risk: only {counted}; {said}. {remedy}"


def _steps(number: int) -> str:
    return f"{number:,} step" if number == 1 else f"{number:,} steps"
