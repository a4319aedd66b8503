"""Moving averages of gradient signal and noise, and the gain that follows from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tula_agent.scaling.policy import noise_gain, noise_moments

__all__ = ["NoiseAverage"]


@dataclass
class NoiseAverage:
    """Exponential averages of |G|^2 and S/B over measured steps; plain floats, equal on all ranks.

    Both share one decay, so their ratio needs no correction for the empty start.
    """

    decay: float = 0.9
    signal: float = 0.0
    noise: float = 0.0
    count: int = 0

    def update(self, small_norm_sq: float, large_norm_sq: float, samples: float) -> bool:
        """Take in one measured step; False when its numbers are unusable (infinite, empty, a single part)."""
        if samples <= 1.0 or not math.isfinite(small_norm_sq + large_norm_sq) or large_norm_sq <= 0.0:
            return False
        signal, noise = noise_moments(small_norm_sq, large_norm_sq, samples)
        keep = self.decay if self.count else 0.0
        self.signal = keep * self.signal + (1.0 - keep) * signal
        self.noise = keep * self.noise + (1.0 - keep) * noise
        self.count += 1
        return True

    def gain(self, batch_ratio: float, noise_weight: float = 1.0) -> float:
        """AdaScale's gain for `batch_ratio` = B / b_small, the noise counted `noise_weight` times; 1 with no data."""
        return noise_gain(self.signal, noise_weight * self.noise, batch_ratio) if self.count else 1.0

    @property
    def noise_scale_over_batch(self) -> float:
        """tr(Sigma) / |G|^2 in units of the global batch B; infinite when no signal stands out of the noise."""
        if not self.count:
            return math.nan
        return max(self.noise, 0.0) / self.signal if self.signal > 0.0 else math.inf

    def state(self) -> dict[str, float]:
        """For a checkpoint."""
        return {"signal": self.signal, "noise": self.noise, "count": self.count}

    def load(self, state: dict[str, float]) -> None:
        """Inverse of `state`."""
        self.signal, self.noise, self.count = float(state["signal"]), float(state["noise"]), int(state["count"])
