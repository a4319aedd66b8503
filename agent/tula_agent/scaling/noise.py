"""Moving averages of gradient signal and noise, and the gain that follows from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tula_agent.scaling.policy import noise_gain, noise_moments

__all__ = ["NoiseAverage"]

_SLOW, _FAST = 0.9, 0.5


@dataclass
class NoiseAverage:
    """Exponential averages over measured steps; plain floats, equal on all ranks.

    `signal`, `noise`: |G|^2 and S/B with decay 0.9, for the noise scale. `slow`, `fast`: the share of noise in a step's
    |g|^2, with decays 0.9 and 0.5, for the gain. In a share every step counts alike, while a ratio of averages hangs on
    the few steps with the longest gradients, for dozens of steps after a spike or a decay of the learning rate.
    """

    signal: float = 0.0
    noise: float = 0.0
    slow: float = 0.0
    fast: float = 0.0
    count: int = 0

    def update(self, small_norm_sq: float, large_norm_sq: float, samples: float) -> bool:
        """Take in one measured step; False when its numbers are unusable (infinite, empty, a single part)."""
        if samples <= 1.0 or not math.isfinite(small_norm_sq + large_norm_sq) or large_norm_sq <= 0.0:
            return False
        signal, noise = noise_moments(small_norm_sq, large_norm_sq, samples)
        share = min(max(noise / large_norm_sq, 0.0), 1.0)
        slow, fast = (_SLOW, _FAST) if self.count else (0.0, 0.0)
        self.signal = slow * self.signal + (1.0 - slow) * signal
        self.noise = slow * self.noise + (1.0 - slow) * noise
        self.slow = slow * self.slow + (1.0 - slow) * share
        self.fast = fast * self.fast + (1.0 - fast) * share
        self.count += 1
        return True

    def gain(self, batch_ratio: float, noise_weight: float = 1.0) -> float:
        """AdaScale's gain for `batch_ratio` = B / b_small, the noise counted `noise_weight` times; 1 with no data.

        The lower share of the two counts: a gain falls as soon as gradients begin to agree, and rises slowly.
        """
        share = min(self.slow, self.fast)
        return noise_gain(1.0 - share, noise_weight * share, batch_ratio) if self.count else 1.0

    def change_batch(self, factor: float) -> None:
        """The batch is `factor` times what it was: noise falls as it grows."""
        self.noise /= factor
        for name in ("slow", "fast"):
            noise = getattr(self, name) / factor
            setattr(self, name, noise / (1.0 - getattr(self, name) + noise))

    @property
    def noise_scale_over_batch(self) -> float:
        """tr(Sigma) / |G|^2 in units of the global batch B; infinite when no signal stands out of the noise."""
        if not self.count:
            return math.nan
        return max(self.noise, 0.0) / self.signal if self.signal > 0.0 else math.inf

    def state(self) -> dict[str, float]:
        """For a checkpoint."""
        return dict(vars(self))

    def load(self, state: dict[str, float]) -> None:
        """Inverse of `state`; a state from before shares of noise were averaged tells nothing, so it begins anew."""
        if "slow" not in state:
            state = vars(NoiseAverage())
        for name, value in state.items():
            setattr(self, name, int(value) if name == "count" else float(value))
