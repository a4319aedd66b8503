"""Implements gradient scaling as in the papers, one tensor at a time, as a reference for the tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tula_agent.scaling.ags import EPS

Batch = Any


def variability(gradients: Sequence[torch.Tensor], previous: Sequence[torch.Tensor]) -> float:
    """Return the variability of equation 5 for the global gradient, which has one tensor per parameter."""
    now = sum(float((g.double() ** 2).sum()) for g in gradients)
    before = sum(float((g.double() ** 2).sum()) for g in previous)
    return abs((now - before) / before)


def ags_factor(small: torch.Tensor, large: torch.Tensor, *, s_min: float, s_max: float) -> torch.Tensor:
    """Return Algorithm 1's factors for one parameter, element by element: min(|g_small| / (|g_large| + eps), s_max).

    The paper divides by g_large + eps and then takes the magnitude. A negative g_large near -eps would then give
    infinity or NaN, which a clamp does not remove, so this function takes the magnitudes first. Lemma 1 requires s >=
    s_min > 0. If both gradients are zero, this function returns s_min; the fast version returns 1.
    """
    ratio = small.abs() / (large.abs() + EPS)
    return ratio.clamp(min=s_min, max=s_max)


def algorithm_1(
    weights: list[torch.Tensor],
    epochs: Sequence[Sequence[Batch]],
    gradient: Callable[[Sequence[torch.Tensor], Batch], list[torch.Tensor]],
    *,
    sample: Callable[[Batch], Batch],
    b_small: int,
    b_large: int,
    eta: float,
    delta: float,
) -> list[torch.Tensor]:
    """Run Algorithm 1 line by line with plain SGD; return the weights after the last step.

    `gradient(w, batch)` returns the gradient of f, and `sample(batch)` the sub-batch of size b_small. This function
    differs from the paper in two points: s_min is 1e-3, since Lemma 1 requires s_min > 0, and the first step, which has
    no predecessor, counts as sensitive.
    """
    gradscale = [torch.ones_like(w) for w in weights]
    before = None
    for epoch in epochs:
        for batch in epoch:
            g_large = gradient(weights, batch)
            sensitive = before is None or variability(g_large, before) >= delta
            scaled = g_large if sensitive else [s * g for s, g in zip(gradscale, g_large, strict=True)]
            at = weights
            weights = [w - eta * g for w, g in zip(weights, scaled, strict=True)]
            before = g_large
        # UPDATEGRADSCALE, after the last step of the epoch, at the weights where g_large was taken.
        s_max = (b_large / b_small) ** 0.5
        g_small = gradient(at, sample(batch))
        gradscale = [
            ags_factor(small, large, s_min=1e-3, s_max=s_max) for small, large in zip(g_small, g_large, strict=True)
        ]
    return weights


def gain_of_parts(parts: Sequence[torch.Tensor], *, batch_ratio: float) -> float:
    """Return AdaScale's gain of one step, at most B/b, from the flat gradients of n equal parts of a batch.

    Sigma is the sample covariance of the parts; |G|^2 is |mean|^2 minus the variance of the mean.
    """
    count = len(parts)
    mean = torch.stack([part.double() for part in parts]).mean(dim=0)
    spread = sum(float(((part.double() - mean) ** 2).sum()) for part in parts) / (count - 1)
    noise = spread / count
    signal = max(0.0, float((mean**2).sum()) - noise)
    return min((signal + noise * batch_ratio) / (signal + noise), batch_ratio)
