"""The decisions of gradient scaling as pure functions of plain numbers."""

from __future__ import annotations

import math

__all__ = ["EPS", "gradient_variability", "noise_gain", "noise_moments", "paper_s_max"]

EPS = 1e-8  # of Algorithm 1


def gradient_variability(norm_sq: float, previous_norm_sq: float) -> float:
    """Delta(G_i) = | (|G_i|^2 - |G_{i-1}|^2) / |G_{i-1}|^2 | (equation 5); infinite when the last gradient was zero."""
    if previous_norm_sq <= 0.0:
        return math.inf if norm_sq > 0.0 else 0.0
    return abs((norm_sq - previous_norm_sq) / previous_norm_sq)


def paper_s_max(batch_ratio: float) -> float:
    """s_max = sqrt(B / b_small) (Algorithm 1), from `batch_ratio` = B / b_small >= 1."""
    return math.sqrt(max(1.0, batch_ratio))


def noise_moments(small_norm_sq: float, large_norm_sq: float, samples: float) -> tuple[float, float]:
    """|G|^2 and tr(Sigma)/B without bias, from gradients of two sizes (McCandlish et al. 2018, appendix A.1).

    `small_norm_sq`: mean of |g_i|^2 over `samples` parts of the batch; `large_norm_sq`: |mean of g_i|^2.
    Either may come out negative on one step: average over steps before taking a ratio.
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
