"""Gradients that are suddenly much longer than those before them are shortened, on the device and without waiting."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tula_agent.scaling.factors import norm_squared

__all__ = ["SpikeLimit"]

_KEEP = 0.9  # of the average length, per step
_WHOLE = 2**14  # elements up to which a tensor counts whole
_SHARE = 64
"""Of a larger one as many first rows count as hold these or a 64th: reading all would cost percents of a step."""


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
        norm = norm_squared([_counted(g) for g in dense]).sqrt()
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


def _counted(gradient: torch.Tensor) -> torch.Tensor:
    """A view, whatever the memory format."""
    elements = gradient.numel()
    if elements <= _WHOLE:
        return gradient
    rows = gradient.shape[0]
    return gradient.narrow(0, 0, min(rows, -(-rows * max(_WHOLE, elements // _SHARE) // elements)))
