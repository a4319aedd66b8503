"""Gradient scaling as the papers write it, one tensor and one number at a time: the oracle of the tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tula_agent.scaling.noise_math import EPS
from tula_agent.scaling.thresholds import Granularity


def variability(gradients: Sequence[torch.Tensor], previous: Sequence[torch.Tensor]) -> float:
    """Equation 5 over the global gradient, given as one tensor per parameter."""
    now = sum(float((g.double() ** 2).sum()) for g in gradients)
    before = sum(float((g.double() ** 2).sum()) for g in previous)
    return abs((now - before) / before)


def ags_factor(
    small: torch.Tensor, large: torch.Tensor, *, granularity: Granularity, s_min: float, s_max: float
) -> torch.Tensor:
    """Algorithm 1's factor for one parameter, broadcastable over it: min(|g_small| / (|g_large| + eps), s_max).

    The paper divides by g_large + eps and takes the magnitude last; a negative g_large near -eps then gives infinity
    or NaN, which a clamp lets through, so the magnitude is taken first. Lemma 1 wants s >= s_min > 0. Where both are
    zero this gives s_min, the fast version 1.
    """
    by_element = granularity == "element"
    ratio = small.abs() / (large.abs() + EPS) if by_element else small.norm() / (large.norm() + EPS)
    return ratio.clamp(min=s_min, max=s_max)


def ags_step(
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    factors: Sequence[torch.Tensor],
    *,
    learning_rate: float,
    variability: float,
    delta: float,
) -> list[torch.Tensor]:
    """One step of Algorithm 1 with plain SGD: w - eta s g where the step is not sensitive, w - eta g where it is."""
    if variability >= delta:
        return [w - learning_rate * g for w, g in zip(weights, gradients, strict=True)]
    return [w - learning_rate * s * g for w, g, s in zip(weights, gradients, factors, strict=True)]


def gain_of_parts(parts: Sequence[torch.Tensor], *, batch_ratio: float) -> float:
    """AdaScale's gain of one step, from the flat gradients of n equal parts of a batch, capped at B/b.

    Sigma is the sample covariance of the parts; |G|^2 is |mean|^2 less the noise in it.
    """
    count = len(parts)
    mean = torch.stack([part.double() for part in parts]).mean(dim=0)
    spread = sum(float(((part.double() - mean) ** 2).sum()) for part in parts) / (count - 1)
    noise = spread / count
    signal = max(0.0, float((mean**2).sum()) - noise)
    return min((signal + noise * batch_ratio) / (signal + noise), batch_ratio)
