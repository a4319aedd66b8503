"""The statistics of one measured step: encoded as a short vector that is summed over ranks, and decoded from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tula_agent.scaling.gradient_tap import CALIBRATORS, GradientTap, TapReading
from tula_agent.torch_private import norm_squared

_HEAD = 6


@dataclass(frozen=True)
class StepStatistics:
    """Reduced numbers of one step, the same on every rank.

    `small_norm_sq`, `large_norm_sq`: mean |g_i|^2 over the parts and |mean g_i|^2, in one common unit.
    `samples`: parts per global batch, B / b. `gradient_norm`: |G| as the optimizer saw it. `examples`: observed over
    all ranks, 0 when they observe none.
    """

    small_norm_sq: float
    large_norm_sq: float
    samples: float
    gradient_norm: float
    examples: float = 0.0


def encode_tap(
    tap: GradientTap,
    gradients: Sequence[torch.Tensor | None],
    portion: Sequence[bool],
    world_size: int,
    device: torch.device,
    examples: float = 0.0,
) -> torch.Tensor:
    """This rank's summands (float64 on `device`); zeros where it has none, so that every rank joins the reduction.

    A parameter that had no part on this rank but has a reduced gradient counts as a zero part. `portion`: by gradient,
    whether this rank contributes its square. `examples`: observed on this rank.
    """
    reading = tap.read()
    usable = [g is not None and not g.is_sparse for g in gradients]
    sums = [s.sum() if s.ndim else s for s, use in zip(reading.squares, usable, strict=True) if use and s is not None]
    mine = [g for g, use, own in zip(gradients, usable, portion, strict=True) if g is not None and use and own]
    zero = torch.zeros((), dtype=torch.float64, device=device)
    small = torch.stack([s if s.device == device else s.to(device) for s in sums]).double().sum() if sums else zero
    large = norm_squared(mine).to(device) if mine else zero
    micro = float(reading.parts)
    head = _head(small, micro, large, micro / world_size, micro, examples)
    return torch.cat([head, _projections(tap, reading, device, world_size)])


def encode_probe(
    small: Sequence[torch.Tensor | None],
    gradients: Sequence[torch.Tensor | None],
    samples: float,
    world_size: int,
    examples: float = 0.0,
) -> torch.Tensor | None:
    """As `encode_tap`, from the reduced gradient of a sub-batch that is `samples` times smaller than the batch.

    None when no parameter has both gradients.
    """
    pairs = [
        (part, whole)
        for part, whole in zip(small, gradients, strict=True)
        if part is not None and whole is not None and not (part.is_sparse or whole.is_sparse)
    ]
    if not pairs:
        return None
    share = 1.0 / world_size
    part_sq, whole_sq = norm_squared([part for part, _ in pairs]), norm_squared([whole for _, whole in pairs])
    head = _head(part_sq * share, share, whole_sq * share, share, samples * share, examples)
    ones = torch.full((2 * CALIBRATORS,), share, dtype=torch.float64, device=head.device)
    return torch.cat([head, ones])


def decode(values: Sequence[float]) -> StepStatistics | None:
    """The step's numbers from the vector summed over ranks; None when they cannot be used."""
    if len(values) != _HEAD + 2 * CALIBRATORS:
        return None  # from an older checkpoint
    small_total, parts, large, micro, samples, examples = values[:_HEAD]
    factor = global_factor(values[_HEAD : _HEAD + CALIBRATORS], values[_HEAD + CALIBRATORS :])
    if factor is None or parts <= 0.0 or micro <= 0.0 or not math.isfinite(small_total + large):
        return None
    return StepStatistics(
        small_norm_sq=small_total / parts,
        large_norm_sq=large / (factor * micro) ** 2,
        samples=samples,
        gradient_norm=math.sqrt(max(large, 0.0)),
        examples=examples,
    )


def global_factor(before: Sequence[float], after: Sequence[float]) -> float | None:
    """The one number by which gradients were multiplied between backward and step, by least squares.

    It covers the AMP loss scale, clipping by global norm and averaging over micro-steps: none of them is mistaken for
    noise, and the script need not report them. None when the projections do not determine it.
    """
    norm = math.fsum(x * x for x in before)
    if not math.isfinite(norm) or norm <= 0.0:
        return None
    factor = math.fsum(x * y for x, y in zip(before, after, strict=True)) / norm
    return factor if math.isfinite(factor) and factor > 0.0 else None


def _head(*slots: torch.Tensor | float) -> torch.Tensor:
    device = next(slot.device for slot in slots if isinstance(slot, torch.Tensor))
    # `full` writes on the device; `tensor` would copy each number there, one transfer each.
    return torch.stack(
        [
            slot if isinstance(slot, torch.Tensor) else torch.full((), slot, dtype=torch.float64, device=device)
            for slot in slots
        ]
    )


def _projections(tap: GradientTap, reading: TapReading, device: torch.device, world_size: int) -> torch.Tensor:
    before, after = list(reading.projections), tap.project()
    zero = torch.zeros((), dtype=torch.float64, device=device)
    for index, (a, b) in enumerate(zip(before, after, strict=True)):
        if a is None or b is None:
            before[index] = after[index] = None
    padding: list[torch.Tensor | None] = [None] * (CALIBRATORS - len(before))
    slots = [*before, *padding, *after, *padding]
    vector = torch.stack([zero if x is None else x.to(device, torch.float64) for x in slots])
    return vector / world_size
