"""Sums the squared gradients of a rank's backward passes with hooks on parameters, before gradients are averaged.

    squares_l = sum_i |g_i,l|^2        over the parts i (micro-steps) of this rank, for each parameter l

A tensor hook on a leaf runs before the leaf's gradient is accumulated, and so before DDP averages it and AMP unscales
it. So every micro-step of every rank provides a small-batch gradient without a second backward pass, and DDP's single
communication hook is not used. A reading counts only once the gradient has been accumulated, since
`torch.autograd.grad` over parameters, as in a gradient penalty, is not a micro-step.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from tula_agent.guard import logger
from tula_agent.torch_private import add_squares, norms

TapMode = Literal["tensor", "element", "projections"]
"""What the hooks sum: squares per tensor or element with projections (for `common_factor`), or only projections."""
Gradients = list[torch.Tensor | None]

CALIBRATORS = 8  # number of tensors that are projected
_PROJECTED_ELEMENTS = 4096
HELD_ON, _MOST_HELD, _MOST_HELD_BYTES = ("cuda",), 32, 2**25
"""Gradients on a GPU are kept for some time, so that one kernel can sum the squares of many gradients.

For a small batch, launching kernels for each gradient would take the host longer than the device needs for the backward
pass; a step of ResNet-50 on an H100 took 1.5 times as long.
"""

_MOST_DROPPED = 32
STEPPED_PAST = (
    f"gradient scaling: gradients were dropped {_MOST_DROPPED} times without a step of TulaOptimizer, so nothing is "
    "scaled: call its step(); an optimizer whose steps use other methods, such as SAM, must wrap the TulaOptimizer"
)


def squares(gradient: torch.Tensor, mode: Literal["tensor", "element"]) -> torch.Tensor:
    """Return the sum of squares of a tensor (0-d), or the square of each element (in the shape of `gradient`).

    The result is in float32, or in float64 for float64 gradients. For complex gradients, it contains squared
    magnitudes.
    """
    real = torch.view_as_real(gradient) if gradient.is_complex() and mode == "tensor" else gradient.abs()
    wide = real.to(torch.promote_types(real.dtype, torch.float32))
    if mode == "element":
        return wide.square()
    norm: torch.Tensor = torch.linalg.vector_norm(wide)
    return norm.square()


class _Part(NamedTuple):
    """Reading of a gradient that is not accumulated yet: the gradient's square, or the gradient to be squared later."""

    square: torch.Tensor | None
    held: torch.Tensor | None
    projection: torch.Tensor | None


class GradientTap:
    """Hooks on parameters that collect the sums of `mode`; while `mode` is None, each hook costs one Python call.

    `squares`: sums by parameter on this rank since the last step, in the unit of the backward pass (including the loss
    scale); None for a parameter without a dense gradient; complete after `sum_held`. `seen`: True if a backward pass
    has reached a parameter since the last step, even while `mode` is None. The hooks keep a weak reference to the tap
    and are removed with it.
    """

    def __init__(self) -> None:
        self.mode: TapMode | None = None
        self.squares: Gradients = []
        self.seen = False
        self._dropped = 0
        self._parameters: list[torch.Tensor] = []
        self._counts: list[int] = []
        self._pending: dict[int, _Part] = {}
        self._handles: list[RemovableHandle] = []
        self._calibrators: dict[int, _Calibrator] = {}
        self._held: dict[int, torch.Tensor] = {}
        self._held_bytes = 0
        weakref.finalize(self, _remove, self._handles)

    def watch(self, parameters: Sequence[torch.Tensor]) -> None:
        """Add hooks to parameters that need a gradient; if the parameters have changed, drop all sums and disarm."""
        hooked = [p for p in parameters if p.requires_grad]
        same = 2 * len(hooked) == len(self._handles) and len(parameters) == len(self._parameters)
        if same and all(map(operator.is_, parameters, self._parameters)):
            return
        self.close()
        self._parameters = list(parameters)
        self.squares, self._counts = [None] * len(parameters), [0] * len(parameters)
        this = weakref.ref(self)
        for index, parameter in enumerate(parameters):
            if parameter.requires_grad:
                before, after = partial(_read, this, index), partial(_count, this, index)
                self._handles.append(parameter.register_hook(before))  # type: ignore[no-untyped-call]
                self._handles.append(
                    parameter.register_post_accumulate_grad_hook(after)  # type: ignore[no-untyped-call]
                )
        self._choose_calibrators()

    def arm(self, mode: TapMode | None) -> None:
        """Collect the sums of `mode` from the next backward pass on, starting from zero."""
        self.clear()
        self._dropped = 0
        self.mode = mode

    def clear(self) -> None:
        """Drop all sums; called when gradients are zeroed, so that nothing remains of a skipped step."""
        self._held, self._held_bytes = {}, 0
        self._pending.clear()
        self.seen = False
        if any(self._counts):
            self._dropped += 1
            if self._dropped == _MOST_DROPPED:
                logger.warning(STEPPED_PAST)
            self.squares = [None] * len(self.squares)
            self._counts = [0] * len(self._counts)
            for calibrator in self._calibrators.values():
                calibrator.total = None

    @property
    def parts(self) -> int:
        """Return the number of micro-steps since the last `clear`."""
        return max(self._counts, default=0)

    @property
    def uneven(self) -> bool:
        """Return True if some leaves had more backward passes than others, so that a pass is not a micro-step.

        Causes are two losses with separate backward passes, and reentrant checkpoints with a shared module.
        """
        return len({count for count in self._counts if count}) > 1

    def projections(self) -> Gradients:
        """Return CALIBRATORS projections summed over backward passes, then the projections of the current gradients.

        A projection without a gradient is None.
        """
        before: Gradients = []
        after: Gradients = []
        for index in sorted(self._calibrators):
            calibrator, gradient = self._calibrators[index], self._parameters[index].grad
            usable = gradient is not None and not gradient.is_sparse
            before.append(calibrator.total if usable else None)
            after.append(calibrator.project(gradient) if usable and gradient is not None else None)
        padding: Gradients = [None] * (CALIBRATORS - len(before))
        return [*before, *padding, *after, *padding]

    def close(self) -> None:
        """Remove every hook, and drop all sums."""
        self.clear()
        self.mode = None
        _remove(self._handles)

    @torch.no_grad()
    def sum_held(self) -> None:
        """Add the squares of the gradients that have been kept."""
        held, self._held, self._held_bytes = self._held, {}, 0
        add_squares(self.squares, list(held), norms(list(held.values())))

    def read(self, index: int, gradient: torch.Tensor) -> None:
        """Read a gradient that the backward pass is about to accumulate."""
        if self.mode is None or gradient.is_sparse:
            self.seen = True
            return
        if self._counts[index] and self._parameters[index].grad is None:
            self.clear()  # the script dropped the gradients of a step that a GradScaler skipped
        self.seen = True
        holds = self.mode == "tensor" and gradient.device.type in HELD_ON
        calibrator = self._calibrators.get(index)
        square = projection = None
        if calibrator is not None or not holds:  # entering `no_grad` takes longer than keeping a tensor
            with torch.no_grad():
                square = None if holds or self.mode == "projections" else squares(gradient, self.mode)
                projection = None if calibrator is None else calibrator.project(gradient)
        self._pending[index] = _Part(square, gradient if holds else None, projection)

    def count(self, index: int) -> None:
        """Add the reading of the gradient that has just been accumulated."""
        part = self._pending.pop(index, None)
        if part is None:
            return
        self._counts[index] += 1
        if part.held is not None:
            self._hold(index, part.held)
        elif part.square is not None:
            before = self.squares[index]
            self.squares[index] = part.square if before is None else before.add_(part.square)
        if part.projection is not None:
            calibrator = self._calibrators[index]
            total = calibrator.total
            calibrator.total = part.projection if total is None else total + part.projection

    def _hold(self, index: int, gradient: torch.Tensor) -> None:
        """Keep a gradient until the next sum.

        Because the agent holds a reference to the gradient, autograd copies it into `.grad`, so neither a later
        micro-step nor DDP's averaging changes the gradient that is kept.
        """
        if index in self._held:  # from the previous micro-step
            self.sum_held()
        self._held[index] = gradient
        self._held_bytes += gradient.nbytes
        if len(self._held) >= _MOST_HELD or self._held_bytes >= _MOST_HELD_BYTES:
            self.sum_held()

    def _choose_calibrators(self) -> None:
        """Choose small and large tensors, since the smallest are often biases whose gradient is zero due to
        normalization.
        """
        usable = [
            i for i, p in enumerate(self._parameters) if p.requires_grad and p.is_floating_point() and p.numel() > 0
        ]
        usable.sort(key=lambda i: (self._parameters[i].numel(), i))
        half = CALIBRATORS // 2
        chosen = {*usable[:half], *usable[-half:]}
        self._calibrators = {index: _Calibrator(self._parameters[index], index) for index in chosen}


def _read(tap: weakref.ref[GradientTap], index: int, gradient: torch.Tensor) -> None:
    if (alive := tap()) is None:
        return
    if alive.mode is None:  # the usual case, in seven of eight steps
        alive.seen = True
    else:
        alive.read(index, gradient)


def _count(tap: weakref.ref[GradientTap], index: int, parameter: torch.Tensor) -> None:
    del parameter
    if (alive := tap()) is not None and alive.mode is not None:
        alive.count(index)


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


class _Calibrator:
    """Projects the first rows of a gradient onto fixed random signs.

    A plain sum may be zero, for example for a bias before softmax.
    """

    def __init__(self, parameter: torch.Tensor, seed: int) -> None:
        rows = parameter.shape[0] if parameter.ndim else 1
        row = parameter.numel() // rows
        self._rows = max(1, min(rows, _PROJECTED_ELEMENTS // row))
        generator = torch.Generator(device="cpu").manual_seed(seed)
        shape = (self._rows * row,)
        bits = torch.randint(0, 2, shape, generator=generator, dtype=torch.float32, device="cpu")
        self._signs = bits.mul_(2).sub_(1).to(parameter.device)
        self.total: torch.Tensor | None = None

    def project(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return <gradient, signs> (0-d)."""
        if self._signs.device != gradient.device:  # the model was moved after it was wrapped
            self._signs = self._signs.to(gradient.device)
        part = gradient if gradient.ndim == 0 else gradient[: self._rows]
        return torch.dot(part.reshape(-1).float(), self._signs)
