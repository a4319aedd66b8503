"""Algorithm 1's arithmetic on reduced gradients: the sensitivity gate, and factors from parts or from a probe."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tula_agent.scaling.factors import factor_from_squares, squares
from tula_agent.scaling.measurement import global_factor
from tula_agent.scaling.policy import paper_s_max
from tula_agent.scaling.ranks import Ranks
from tula_agent.scaling.taps import GradientTap
from tula_agent.scaling.thresholds import Granularity, ScalingThresholds

__all__ = ["Gate", "factors_from_probe", "factors_from_tap"]


class Gate:
    """Equation 5 without leaving the device: 1 where the step may be scaled, 0 where it is sensitive."""

    def __init__(self) -> None:
        self.previous: torch.Tensor | None = None
        self.variability: torch.Tensor | None = None

    def __call__(self, norm_sq: torch.Tensor, delta: float) -> torch.Tensor:
        """Gate (0-d float64) for a step of squared gradient norm `norm_sq`; the first step counts as sensitive."""
        if self.previous is None:
            self.previous = norm_sq.clone()
            self.variability = torch.full_like(norm_sq, float("inf"))
            return torch.zeros_like(norm_sq)
        previous = self.previous.to(norm_sq.device)
        self.variability = ((norm_sq - previous) / previous).abs()
        # A gradient with NaN or infinity is never scaled and never becomes the norm to compare with.
        self.previous = torch.where(torch.isfinite(norm_sq), norm_sq, previous)
        return (self.variability < delta).to(norm_sq.dtype)


def factors_from_tap(
    tap: GradientTap,
    gradients: Sequence[torch.Tensor | None],
    thresholds: ScalingThresholds,
    *,
    ranks: Ranks,
    batch_ratio: float | None,
) -> tuple[list[torch.Tensor | None], float] | None:
    """Factor per parameter and B / b_small, from the parts that all ranks saw; None when there is only one part.

    |g_small|^2 is the mean over parts. A b_small other than the size of a part is reached, by tensor, through
    E|g_b|^2 = |G|^2 + tr(Sigma)/b; by channel and element the parts are taken as they are.
    """
    reading = tap.read()
    granularity = tap.granularity
    slots = [
        _dense_square(square, gradient, granularity)
        for square, gradient in zip(reading.squares, gradients, strict=True)
    ]
    present = [slot for slot in slots if slot is not None]
    if not present:
        return None
    device = present[0].device
    zero = torch.zeros(1, device=device)
    before = [zero if x is None else x.reshape(1).to(device) for x in reading.projections]
    after = [zero if x is None else x.reshape(1).to(device) for x in tap.project()]
    tail = [torch.full((1,), float(reading.parts), device=device), *before, *after]
    flat = ranks.sum_(torch.cat([*(slot.reshape(-1).to(device) for slot in present), *tail]))
    count = len(before)
    numbers = [float(x) for x in flat[-(1 + 2 * count) :].tolist()]
    samples = numbers[0]
    factor = global_factor(numbers[1 : 1 + count], numbers[1 + count :])
    if samples < 2 or factor is None:
        return None
    unit = (factor * samples / ranks.size) ** 2
    ratio = samples if batch_ratio is None else batch_ratio
    s_max = thresholds.s_max if thresholds.s_max is not None else paper_s_max(ratio)
    result: list[torch.Tensor | None] = []
    position = 0
    for slot, gradient in zip(slots, gradients, strict=True):
        if slot is None or gradient is None:
            result.append(None)
            continue
        small = flat[position : position + slot.numel()].view(slot.shape).to(gradient.device) / samples
        position += slot.numel()
        large = squares(gradient, granularity) / unit
        if granularity == "tensor" and batch_ratio is not None:
            signal, noise = _tensor_moments(small, large, samples)
            small = signal + noise * ratio
        result.append(factor_from_squares(small, large, s_min=thresholds.s_min, s_max=s_max))
    return result, ratio


def factors_from_probe(
    small: Sequence[torch.Tensor | None],
    gradients: Sequence[torch.Tensor | None],
    thresholds: ScalingThresholds,
    *,
    batch_ratio: float,
) -> list[torch.Tensor | None]:
    """Factor per parameter from the reduced gradient of a sub-batch: Algorithm 1 to the letter."""
    s_max = thresholds.s_max if thresholds.s_max is not None else paper_s_max(batch_ratio)
    result: list[torch.Tensor | None] = []
    for part, whole in zip(small, gradients, strict=True):
        if part is None or whole is None or part.is_sparse or whole.is_sparse:
            result.append(None)
            continue
        pair = squares(part, thresholds.granularity), squares(whole, thresholds.granularity)
        result.append(factor_from_squares(*pair, s_min=thresholds.s_min, s_max=s_max))
    return result


def _dense_square(
    square: torch.Tensor | None, gradient: torch.Tensor | None, granularity: Granularity
) -> torch.Tensor | None:
    """The slot of one parameter, of the same shape on every rank that has its reduced gradient."""
    if gradient is None or gradient.is_sparse:
        return None
    return torch.zeros_like(squares(gradient, granularity)) if square is None else square.clone()


def _tensor_moments(small: torch.Tensor, large: torch.Tensor, samples: float) -> tuple[torch.Tensor, torch.Tensor]:
    noise = ((small - large) / (samples - 1.0)).clamp(min=0.0)
    return (large - noise).clamp(min=0.0), noise
