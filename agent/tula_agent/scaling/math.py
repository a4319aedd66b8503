"""The arithmetic of gradient scaling, without any state of a training job: norms, noise, gains and factors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tula_agent.scaling.thresholds import Granularity

EPS = 1e-8  # of Algorithm 1
MAX_RESIDUAL = 0.01
"""Relative error of `common_factor` above which gradients were changed by more than one factor."""
_SLOW, _FAST = 0.9, 0.5


def squares(gradient: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """Sum of squares of a tensor (0-d), or the square of each element (the shape of `gradient`).

    In float32; in float64 for float64 gradients.
    """
    wide = torch.promote_types(gradient.dtype, torch.float32)
    if granularity == "element":
        return gradient.to(wide).square()
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=wide)
    return norm.square()


def gradient_variability(norm_sq: float, previous_norm_sq: float) -> float:
    """Delta(G_i) = | (|G_i|^2 - |G_{i-1}|^2) / |G_{i-1}|^2 | (equation 5); infinite when the last gradient was zero."""
    if previous_norm_sq <= 0.0:
        return math.inf if norm_sq > 0.0 else 0.0
    return abs((norm_sq - previous_norm_sq) / previous_norm_sq)


def common_factor(before: torch.Tensor, after: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(f, |after - f before| / |after|) by least squares, 0-d, from projections of shape (n,); NaN where undetermined.

    f is the number by which gradients were multiplied between backward and step: AMP's loss scale, clipping by global
    norm, averaging over micro-steps. None of them is mistaken for noise, and the script need not report them.
    """
    factor = torch.dot(before, after) / torch.dot(before, before)
    factor = torch.where(factor > 0.0, factor, math.nan)
    return factor, torch.linalg.vector_norm(after - factor * before) / torch.linalg.vector_norm(after)


def factor_from_squares(small: torch.Tensor, large: torch.Tensor, *, s_min: float, s_max: float) -> torch.Tensor:
    """min(|g_small| / (|g_large| + eps), s_max), at least s_min (Algorithm 1, Lemma 1), from squared magnitudes.

    A ratio that is not finite (overflow) becomes 1, so that one bad probe never spoils a weight. So does the ratio of
    two zeros, which holds no information.
    """
    ratio = small.clamp(min=0.0).sqrt() / (large.clamp(min=0.0).sqrt() + EPS)
    usable = torch.isfinite(ratio) & ((small > 0.0) | (large > 0.0))
    return torch.where(usable, ratio.clamp(min=s_min, max=s_max), torch.ones_like(ratio))


def paper_s_max(batch_ratio: float) -> float:
    """s_max = sqrt(B / b_small) (Algorithm 1), from `batch_ratio` = B / b_small >= 1."""
    return math.sqrt(max(1.0, batch_ratio))


def noise_moments(small_norm_sq: float, large_norm_sq: float, samples: float) -> tuple[float, float]:
    """|G|^2 and tr(Sigma)/B without bias, from gradients of two sizes (McCandlish et al. 2018, appendix A.1).

    `small_norm_sq`: mean of |g_i|^2 over `samples` parts of the batch; `large_norm_sq`: |mean of g_i|^2.
    Either may be negative on one step: average over steps before taking a ratio.
    """
    noise = (small_norm_sq - large_norm_sq) / (samples - 1.0)
    return large_norm_sq - noise, noise


def noise_gain(signal: float, noise: float, batch_ratio: float) -> float:
    """AdaScale's gain r = (|G|^2 + S/b) / (|G|^2 + S/B), in [1, B/b] (Johnson et al. 2020, equation 6).

    `signal` = |G|^2, `noise` = S/B, `batch_ratio` = B/b; negative estimates count as zero.
    """
    signal, noise = max(signal, 0.0), max(noise, 0.0)
    if signal + noise <= 0.0 or not math.isfinite(signal + noise):
        return 1.0
    gain = (signal + noise * batch_ratio) / (signal + noise)
    return min(max(gain, 1.0), batch_ratio)  # rounding of subnormal estimates may step outside


@dataclass
class NoiseAverage:
    """Exponential averages over measured steps; plain floats, equal on all ranks.

    `signal`, `noise`: |G|^2 and S/B with decay 0.9, for the noise scale. `slow`, `fast`: the share of noise in a step's
    |g|^2, with decays 0.9 and 0.5, for the gain. Every step has the same weight in an average of shares. A ratio of
    averaged norms depends on the few longest gradients, for dozens of steps after a spike or a decay of the learning
    rate.
    """

    signal: float = 0.0
    noise: float = 0.0
    slow: float = 0.0
    fast: float = 0.0
    count: int = 0

    def update(self, small_norm_sq: float, large_norm_sq: float, samples: float) -> bool:
        """Add one measured step; False when its numbers are unusable (infinite, empty, a single part)."""
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
        """AdaScale's gain for `batch_ratio` = B / b_small, with the noise times `noise_weight`; 1 without data.

        Uses the lower of the two shares: the gain falls as soon as gradients begin to agree, and rises slowly.
        """
        share = min(self.slow, self.fast)
        return noise_gain(1.0 - share, noise_weight * share, batch_ratio) if self.count else 1.0

    def change_batch(self, factor: float) -> None:
        """The global batch is now `factor` times as large: noise falls in proportion."""
        self.noise /= factor
        for name in ("slow", "fast"):
            noise = getattr(self, name) / factor
            setattr(self, name, noise / (1.0 - getattr(self, name) + noise))

    @property
    def noise_scale_over_batch(self) -> float:
        """tr(Sigma) / |G|^2 in units of the global batch B; NaN without data, infinite without a positive |G|^2."""
        if not self.count:
            return math.nan
        return max(self.noise, 0.0) / self.signal if self.signal > 0.0 else math.inf
