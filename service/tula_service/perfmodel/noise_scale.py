"""What an example is worth in a larger batch: the gradient noise scale and the statistical efficiency that follows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from tula_wire.bounds import NOISE_WEIGHT

_MIN_VALUES = 8
_MIN_BLOCKS = 4
_Z_90 = 1.6448536269514722


@dataclass(frozen=True)
class NoiseScale:
    """B_noise = tr(Sigma) / |G|^2 in examples, with a 90 % interval.

    It grows during training (McCandlish et al. 2018, figure 4), so it is that of the later half of what was seen.
    """

    value: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Half the width of the interval, in examples."""
        return (self.high - self.low) / 2.0


def estimate_noise_scale(values: ArrayLike) -> NoiseScale | None:
    """From a run's telemetry column `gradient_noise_scale` (examples, in step order); None with too few values.

    The geometric mean over the later half, since a ratio errs by factors; its error from means of blocks of about
    sqrt(n) steps, because neighbouring values share a moving average. Values that are not finite or not positive
    (steps without a measurable signal) are left out; where they are the majority, the noise scale is above what the
    run can measure, and the answer is None too.
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
    return NoiseScale(math.exp(centre), math.exp(centre - half_width), math.exp(centre + half_width))


@dataclass(frozen=True)
class StatisticalEfficiency:
    """What a global batch B is worth at a noise scale, both in examples, relative to the base batch B_0."""

    noise_scale: float
    base_batch_size: float

    def of(self, global_batch_size: float) -> float:
        """Progress per example: (B_noise + B_0) / (B_noise + B) (Pollux 2021, equation 7); 1 at B_0, falling with B."""
        return (self.noise_scale + self.base_batch_size) / (self.noise_scale + global_batch_size)

    def learning_rate_factor(self, global_batch_size: float) -> float:
        """By what the learning rate of the base batch grows: as the policy `gain` does, at most B / B_0.

        (1 + c N / B_0) / (1 + c N / B) with N = `noise_scale` and c = NOISE_WEIGHT (AdaScale's gain has c = 1).
        """
        weighted = NOISE_WEIGHT * self.noise_scale
        return (1.0 + weighted / self.base_batch_size) / (1.0 + weighted / global_batch_size)

    @property
    def max_sensible_batch_size(self) -> int:
        """Largest B whose examples keep half of their worth: B_noise + 2 B_0."""
        return int(self.noise_scale + 2.0 * self.base_batch_size + 1e-9)
