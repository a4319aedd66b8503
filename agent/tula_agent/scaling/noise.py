"""Estimates the noise in a gradient from gradients of two batch sizes in the same step.

    noise  = S / B   = (small - large) / (n - 1)        small: mean of |g_i|^2 over n parts of the batch
    signal = |G|^2   = large - noise                    large: |mean of g_i|^2

S = tr(Sigma) is the variance of one example's gradient (McCandlish et al. 2018, appendix A.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_SLOW, _FAST = 0.9, 0.5  # decays of the averages over measured steps


def gradient_variability(norm_sq: float, previous_norm_sq: float) -> float:
    """Return Delta(G_i) = | (|G_i|^2 - |G_{i-1}|^2) / |G_{i-1}|^2 | (equation 5), infinite after a zero gradient."""
    if previous_norm_sq <= 0.0:
        return math.inf if norm_sq > 0.0 else 0.0
    return abs((norm_sq - previous_norm_sq) / previous_norm_sq)


def noise_moments(small_norm_sq: float, large_norm_sq: float, samples: float) -> tuple[float, float]:
    """Return unbiased estimates of |G|^2 and tr(Sigma)/B (McCandlish et al. 2018, appendix A.1).

    `small_norm_sq`: mean of |g_i|^2 over `samples` parts of the batch; `large_norm_sq`: |mean of g_i|^2. Either result
    may be negative in a single step, so average over steps before computing a ratio.
    """
    noise = (small_norm_sq - large_norm_sq) / (samples - 1.0)
    return large_norm_sq - noise, noise


def is_usable(small_norm_sq: float, large_norm_sq: float, samples: float) -> bool:
    """Return False if a step's norms are infinite or zero, or its batch has only one part."""
    return samples > 1.0 and math.isfinite(small_norm_sq + large_norm_sq) and large_norm_sq > 0.0


def noise_gain(signal: float, noise: float, batch_ratio: float) -> float:
    """Return AdaScale's gain r = (|G|^2 + S/b) / (|G|^2 + S/B), in [1, B/b] (Johnson et al. 2020, equation 6).

    `signal` = |G|^2, `noise` = S/B, `batch_ratio` = B/b; negative estimates count as zero.
    """
    signal, noise = max(signal, 0.0), max(noise, 0.0)
    if signal + noise <= 0.0 or not math.isfinite(signal + noise):
        return 1.0
    gain = (signal + noise * batch_ratio) / (signal + noise)
    return min(max(gain, 1.0), batch_ratio)  # rounding of subnormal estimates may exceed the bounds


@dataclass
class NoiseAverage:
    """Exponential averages over measured steps, as floats that are equal on all ranks.

    `signal`, `noise`: |G|^2 and S/B with decay 0.9, for the noise scale. `slow`, `fast`: the share of noise in a step's
    |g|^2, with decays 0.9 and 0.5, for the gain. In an average of shares, every step has the same weight, whereas after
    a spike or a decay of the learning rate, a ratio of averaged norms depends for dozens of steps on the few largest
    gradients.
    """

    signal: float = 0.0
    noise: float = 0.0
    slow: float = 0.0
    fast: float = 0.0
    count: int = 0

    def update(self, small_norm_sq: float, large_norm_sq: float, samples: float) -> None:
        """Add one measured step, whose numbers are usable (`is_usable`)."""
        signal, noise = noise_moments(small_norm_sq, large_norm_sq, samples)
        share = min(max(noise / large_norm_sq, 0.0), 1.0)
        slow, fast = (_SLOW, _FAST) if self.count else (0.0, 0.0)
        self.signal = slow * self.signal + (1.0 - slow) * signal
        self.noise = slow * self.noise + (1.0 - slow) * noise
        self.slow = slow * self.slow + (1.0 - slow) * share
        self.fast = fast * self.fast + (1.0 - fast) * share
        self.count += 1

    def gain(self, batch_ratio: float, noise_weight: float = 1.0) -> float:
        """Return AdaScale's gain for `batch_ratio` = B / b_small, with noise weighted by `noise_weight`; 1 without
        data.

        The lower of the two shares is used, so the gain falls as soon as gradients begin to agree, and rises slowly.
        """
        share = min(self.slow, self.fast)
        return noise_gain(1.0 - share, noise_weight * share, batch_ratio) if self.count else 1.0

    def change_batch(self, factor: float) -> None:
        """Convert the averages to a global batch `factor` times as large, in which noise is `factor` times lower."""
        self.noise /= factor
        for name in ("slow", "fast"):
            noise = getattr(self, name) / factor
            setattr(self, name, noise / (1.0 - getattr(self, name) + noise))

    @property
    def noise_scale_over_batch(self) -> float:
        """Return tr(Sigma) / |G|^2 in units of the global batch B; NaN without data, infinite unless |G|^2 > 0."""
        if not self.count:
            return math.nan
        return max(self.noise, 0.0) / self.signal if self.signal > 0.0 else math.inf
