"""Small-batch gradients at little cost: each leaf gradient as backward produces it, before any reduction.

A tensor hook on a leaf runs before the gradient is accumulated, hence before DDP averages and before AMP unscales it.
So every micro-step of every rank is a small-batch gradient. This needs no second backward and leaves DDP's one
communication hook free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.utils.hooks import RemovableHandle

from tula_agent.scaling.noise_math import squares
from tula_agent.scaling.thresholds import Granularity

CALIBRATORS = 8  # tensors whose projections give the factor between backward and step
_PROJECTED_ELEMENTS = 4096


@dataclass
class TapReading:
    """Sums on this rank since the last step, in the units of backward (loss scale included).

    `squares`: per parameter the sum over micro-steps of its squares, None where it had no dense gradient.
    `parts`: micro-steps seen. `projections`: per calibrator the sum over micro-steps of <gradient, fixed signs>.
    """

    squares: list[torch.Tensor | None]
    parts: int
    projections: list[torch.Tensor | None]


@dataclass
class _Calibrator:
    signs: torch.Tensor
    rows: int
    total: torch.Tensor | None = None

    def project(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.signs.device != gradient.device:  # the model was moved after it was wrapped
            self.signs = self.signs.to(gradient.device)
        part = gradient if gradient.ndim == 0 else gradient[: self.rows]
        return torch.dot(part.reshape(-1).float(), self.signs)


@dataclass
class GradientTap:
    """Hooks on the leaves of `parameters`; while it is not armed, each costs one Python call."""

    granularity: Granularity = "tensor"
    armed: bool = False
    _parameters: list[torch.Tensor] = field(default_factory=list)
    _squares: list[torch.Tensor | None] = field(default_factory=list)
    _counts: list[int] = field(default_factory=list)
    _handles: list[RemovableHandle | None] = field(default_factory=list)
    _calibrators: dict[int, _Calibrator] = field(default_factory=dict)

    def watches(self, parameters: Sequence[torch.Tensor]) -> bool:
        """True when the sums are in the order of `parameters`: none was added, removed or moved since `watch`."""
        known = self._parameters
        return len(known) == len(parameters) and all(a is b for a, b in zip(known, parameters, strict=True))

    def watch(self, parameters: Sequence[torch.Tensor]) -> None:
        """Hook every parameter that needs a gradient and is not hooked yet; indices follow `parameters`."""
        known = self._parameters
        if len(known) > len(parameters) or any(a is not b for a, b in zip(known, parameters, strict=False)):
            self.close()  # a hook knows its parameter by its index
            self._parameters, self._squares, self._counts, self._handles = [], [], [], []
        self._parameters = list(parameters)
        missing = len(self._parameters) - len(self._squares)
        self._squares += [None] * missing
        self._counts += [0] * missing
        self._handles += [None] * missing
        before = sum(handle is not None for handle in self._handles)
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad and self._handles[index] is None:
                handle: RemovableHandle = parameter.register_hook(self._hook(index))  # type: ignore[no-untyped-call]
                self._handles[index] = handle
        if sum(handle is not None for handle in self._handles) != before:
            self._choose_calibrators()

    def arm(self, granularity: Granularity) -> None:
        """Measure from the next backward on, from zero."""
        self.clear()
        self.granularity, self.armed = granularity, True

    def clear(self) -> None:
        """Drop all sums; called when gradients are zeroed, so that a skipped step leaves nothing in them."""
        if not any(self._counts):
            return
        self._squares = [None] * len(self._squares)
        self._counts = [0] * len(self._counts)
        for calibrator in self._calibrators.values():
            calibrator.total = None

    def read(self) -> TapReading:
        """The sums since the last `clear`."""
        projections = [self._calibrators[index].total for index in sorted(self._calibrators)]
        return TapReading(list(self._squares), self.parts, projections)

    @property
    def parts(self) -> int:
        """Micro-steps seen since the last `clear`."""
        return max(self._counts, default=0)

    def project(self) -> list[torch.Tensor | None]:
        """The calibrators' projections of the gradients as they stand now, in `read`'s order."""
        result: list[torch.Tensor | None] = []
        for index in sorted(self._calibrators):
            gradient = self._parameters[index].grad
            usable = gradient is not None and not gradient.is_sparse
            result.append(self._calibrators[index].project(gradient) if usable and gradient is not None else None)
        return result

    def close(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            if handle is not None:
                handle.remove()
        self._handles = [None] * len(self._handles)

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def observe(gradient: torch.Tensor) -> None:
            if not self.armed or gradient.is_sparse:
                return
            with torch.no_grad():
                square = squares(gradient, self.granularity)
                held = self._squares[index]
                self._squares[index] = square if held is None else held.add_(square)
                self._counts[index] += 1
                calibrator = self._calibrators.get(index)
                if calibrator is not None:
                    projection = calibrator.project(gradient)
                    calibrator.total = projection if calibrator.total is None else calibrator.total + projection

        return observe

    def _choose_calibrators(self) -> None:
        """Small and large tensors, under fixed random signs: the plain sum of a bias before a softmax is zero."""
        wanted = [
            i for i, p in enumerate(self._parameters) if p.requires_grad and p.is_floating_point() and p.numel() > 0
        ]
        wanted.sort(key=lambda i: (self._parameters[i].numel(), i))
        # The smallest are often biases before a normalisation, whose gradient is zero: take some large ones as well.
        chosen = wanted[: CALIBRATORS // 2] + wanted[-(CALIBRATORS - CALIBRATORS // 2) :]
        self._calibrators = {}
        for index in sorted(set(chosen)):
            parameter = self._parameters[index]
            row = parameter.numel() // parameter.shape[0] if parameter.ndim and parameter.shape[0] else 1
            rows = max(1, min(parameter.shape[0] if parameter.ndim else 1, _PROJECTED_ELEMENTS // max(row, 1)))
            generator = torch.Generator().manual_seed(index)
            signs = torch.randint(0, 2, (rows * row,), generator=generator, dtype=torch.float32).mul_(2).sub_(1)
            self._calibrators[index] = _Calibrator(signs.to(parameter.device), rows)
