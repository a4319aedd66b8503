"""Fast forms of Algorithm 1: squares by granularity, factors from them, and factors applied to many tensors at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tula_agent.scaling.policy import EPS
from tula_agent.scaling.thresholds import Granularity

__all__ = ["apply_to_gradients", "apply_to_updates", "factor_from_squares", "norm_squared", "squares"]

_HALVES = (torch.float16, torch.bfloat16)


def squares(gradient: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """Sum of squares per tensor (0-d), per output channel (c, 1, ...) or per element (as `gradient`).

    In float32, of float64 gradients in float64. A vector (bias, norm weight) has no channels to share, so `channel`
    treats it as one tensor.
    """
    wide = torch.promote_types(gradient.dtype, torch.float32)
    if granularity == "element":
        return gradient.to(wide).square()
    if granularity == "tensor" or gradient.ndim < 2:
        norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=wide)
        return norm.square()
    rest = tuple(range(1, gradient.ndim))
    norms: torch.Tensor = torch.linalg.vector_norm(gradient, dim=rest, keepdim=True, dtype=wide)
    return norms.square()


def norm_squared(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """|G|^2 over all tensors, float64 on the first tensor's device (0-d); `gradients` must not be empty."""
    device = gradients[0].device
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    if any(g.dtype in _HALVES for g in dense):
        # A norm in half precision would be off by up to half a percent, or infinite.
        norms: Sequence[torch.Tensor] = [
            torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) for g in dense
        ]
    else:
        norms = torch._foreach_norm(dense)
    # Stacked first: on a device, converting each norm by itself would be as many kernels.
    return torch.stack([norm if norm.device == device else norm.to(device) for norm in norms]).double().square().sum()


def factor_from_squares(small: torch.Tensor, large: torch.Tensor, *, s_min: float, s_max: float) -> torch.Tensor:
    """min(|g_small| / (|g_large| + eps), s_max), at least s_min (Algorithm 1, Lemma 1), from squared magnitudes.

    What is not finite (an overflow on the way) becomes 1, so that one bad probe never spoils a weight; so does what is
    zero in both, about which nothing is known.
    """
    ratio = small.clamp(min=0.0).sqrt() / (large.clamp(min=0.0).sqrt() + EPS)
    usable = torch.isfinite(ratio) & ((small > 0.0) | (large > 0.0))
    return torch.where(usable, ratio.clamp(min=s_min, max=s_max), torch.ones_like(ratio))


def apply_to_gradients(gradients: Sequence[torch.Tensor], factors: Sequence[torch.Tensor], gate: torch.Tensor) -> None:
    """g <- g * s in place where `gate` (0-d, 1 or 0) is 1; exactly g where it is 0."""
    for gradient, factor in zip(gradients, factors, strict=True):
        gradient.mul_(_gated(factor, gate).to(gradient.device, gradient.dtype))


def apply_to_updates(
    weights: Sequence[torch.Tensor],
    before: Sequence[torch.Tensor],
    factors: Sequence[torch.Tensor],
    gate: torch.Tensor,
) -> None:
    """w <- w_before + s * (w - w_before) in place; exactly w where `gate` is 0 or s is 1."""
    for weight, old, factor in zip(weights, before, factors, strict=True):
        scale = _gated(factor, gate).to(weight.device, weight.dtype)
        torch.lerp(old, weight, scale.expand_as(weight), out=weight)


def _gated(factor: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return torch.where(gate.to(factor.device) > 0, factor, torch.ones_like(factor))
