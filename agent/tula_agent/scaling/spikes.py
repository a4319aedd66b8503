"""Gradients that are suddenly much longer than those before them are shortened, on the device and without waiting."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from tula_agent.scaling.factors import norm_squared

__all__ = ["SpikeLimit", "counted"]

_KEEP = 0.9  # of the average length, per step
_WHOLE = 2**14  # elements up to which a tensor counts whole
_FEWEST, _BUDGET, _SHARE = 2**12, 2**20, 64
"""Of a larger one as many first rows count as hold a 64th or, where that is more, its equal part of the budget over all
tensors, at least _FEWEST and at most _WHOLE elements: reading all would cost percents of a step."""


class SpikeLimit:
    """g <- g * min(1, limit * usual / |g|), `usual` being the moving average (0.9) of |g| after shortening.

    Of large tensors |g| counts a fixed part only: it is compared with nothing but its own past.

    A gain above 1 turns one bad step into a worse one: without normalization layers the norm can grow a hundredfold
    within three steps, which no average of the past foresees. Only a limit on the step itself does. All ranks hold the
    bits that the all-reduce gave them, so all compute the same factor, as with torch's `clip_grad_norm_`.
    A gradient with NaN or infinity, or of zeros only, passes as it is and is not remembered.
    """

    def __init__(self, limit: float) -> None:
        if not limit > 1.0:
            raise ValueError(f"spike_limit is {limit}: give a number above 1, or None for no limit")
        self._limit = limit
        self._usual: torch.Tensor | None = None

    def __call__(self, gradients: Sequence[torch.Tensor | None], *, shorten: bool) -> None:
        """Remember the length and, with `shorten`, cut in place what is too long; sparse gradients are left alone."""
        dense = [g for g in gradients if g is not None and not g.is_sparse]
        if not dense:
            return
        norm = norm_squared(counted(dense, len(gradients))).sqrt()
        usual = torch.zeros_like(norm) if self._usual is None else self._usual.to(norm.device)
        finite, known = torch.isfinite(norm), usual > 0.0
        tells = finite & (norm > 0.0)  # steps without a gradient would wear the average away, and freeze those to come
        allowed = torch.where(known, self._limit * usual, norm) if shorten else norm
        taken = torch.minimum(norm, allowed)
        blended = torch.where(known, _KEEP * usual + (1.0 - _KEEP) * taken, taken)
        self._usual = torch.where(tells, blended, usual)
        too_long = finite & (norm > allowed)
        if not shorten or (norm.is_cpu and not bool(too_long)):
            return  # on a processor asking costs nothing, multiplying by one does
        factor = torch.where(too_long, allowed / norm, torch.ones_like(norm))
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for gradient in dense:
            by_device.setdefault(gradient.device, []).append(gradient)
        for device, group in by_device.items():
            torch._foreach_mul_(group, factor.to(device, torch.float32))

    def state(self) -> torch.Tensor | None:
        """For a checkpoint."""
        return self._usual

    def load(self, usual: torch.Tensor | None) -> None:
        """Inverse of `state`."""
        self._usual = usual


def counted(gradients: Sequence[torch.Tensor], tensors: int) -> list[torch.Tensor]:
    """What of `gradients` tells their length, the same at every step: views, whatever the memory format.

    `tensors`: how many there are with those that are missing at this step.
    """
    each = min(_WHOLE, max(_FEWEST, _BUDGET // tensors))
    parts = _rows(tuple([g.shape for g in gradients]), each)
    return [g if rows is None else g.narrow(0, 0, rows) for g, rows in zip(gradients, parts, strict=True)]


@lru_cache(maxsize=8)
def _rows(shapes: tuple[torch.Size, ...], each: int) -> tuple[int | None, ...]:
    """How many first rows count of tensors of such shapes; None: all."""
    return tuple(
        [
            min(shape[0], -(-shape[0] * max(each, shape.numel() // _SHARE) // shape.numel()))
            if shape.numel() > _WHOLE
            else None
            for shape in shapes
        ]
    )
