"""Clips gradients that are suddenly much longer than those before them, on the device and without waiting."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tula_agent.scaling.noise_math import norm_squared
from tula_agent.torch_private import foreach_mul_

_KEEP = 0.9  # weight of the past in the average norm, per step
_WHOLE = 2**14  # elements up to which all of a tensor is read
_SHARE = 64
"""Of a larger tensor only the first rows are read: as many as hold _WHOLE elements or a 64th of all. Reading all would
cost percents of a step."""


class SpikeClip:
    """g <- g * min(1, limit * usual / |g|), where `usual` is the moving average (0.9) of |g| after clipping.

    |g| covers a fixed part of each large tensor: it is only compared with its own past.

    A gain above 1 makes a bad step worse: without normalization layers the norm can grow a hundredfold within three
    steps, which no average of the past predicts. A limit on the step itself prevents it. All ranks hold the bits that
    the all-reduce gave them, so all compute the same factor, as with torch's `clip_grad_norm_`.
    A gradient with NaN or infinity, or of zeros only, stays unchanged and does not enter the average.
    """

    def __init__(self, limit: float) -> None:
        if not limit > 1.0:
            raise ValueError(f"spike_limit is {limit}: give a number above 1, or None for no limit")
        self._limit = limit
        self._usual: torch.Tensor | None = None

    def __call__(self, gradients: Sequence[torch.Tensor | None], *, clip: bool) -> None:
        """Update the average norm and, with `clip`, clip in place; sparse gradients are neither read nor clipped."""
        dense = [g for g in gradients if g is not None and not g.is_sparse]
        if not dense:
            return
        norm = norm_squared([_part_read(g) for g in dense]).sqrt()
        usual = torch.zeros_like(norm) if self._usual is None else self._usual.to(norm.device)
        finite, known = torch.isfinite(norm), usual > 0.0
        counts = finite & (norm > 0.0)  # steps of zeros would drive the average to 0 and freeze the steps after them
        allowed = torch.where(known, self._limit * usual, norm) if clip else norm
        taken = torch.minimum(norm, allowed)
        blended = torch.where(known, _KEEP * usual + (1.0 - _KEEP) * taken, taken)
        self._usual = torch.where(counts, blended, usual)
        too_long = finite & (norm > allowed)
        if not clip or (norm.is_cpu and not bool(too_long)):
            return  # on the CPU reading the flag is free, multiplying by 1 is not
        factor = torch.where(too_long, allowed / norm, torch.ones_like(norm))
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for gradient in dense:
            by_device.setdefault(gradient.device, []).append(gradient)
        for device, group in by_device.items():
            foreach_mul_(group, factor.to(device, torch.float32))

    def state(self) -> torch.Tensor | None:
        """For a checkpoint."""
        return self._usual

    def load(self, usual: torch.Tensor | None) -> None:
        """Inverse of `state`."""
        self._usual = usual


def _part_read(gradient: torch.Tensor) -> torch.Tensor:
    """The first rows of `gradient`: a view in any memory format."""
    elements = gradient.numel()
    if elements <= _WHOLE:
        return gradient
    rows = gradient.shape[0]
    return gradient.narrow(0, 0, min(rows, -(-rows * max(_WHOLE, elements // _SHARE) // elements)))
