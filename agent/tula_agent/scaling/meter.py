"""Measures the gradients of a small and of the large batch in one step, and the sizes of both.

A tensor hook on a leaf runs before its gradient is accumulated, hence before DDP averages and before AMP unscales it:
every micro-step of every rank is a small-batch gradient. This needs no second backward and leaves DDP's one
communication hook free. Algorithm 1 samples its small batch instead: a probe, a second backward on part of the batch.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tula_agent.batches import batch_size_of, map_tensors
from tula_agent.scaling.ranks import Ranks
from tula_agent.torch_private import add_squares, norm_squared, norms
from tula_wire.bounds import Granularity

_LOG = logging.getLogger(__name__)

Tapped = Granularity | Literal["projections"]
"""What hooks sum: squares by tensor or element, with the projections that `common_factor` needs, or only these."""
LossFunction = Callable[[nn.Module, Any], torch.Tensor]
"""Mean loss of the bare module on a batch; enters autocast itself where training uses it."""
Gradients = list[torch.Tensor | None]

_CALIBRATORS = 8  # tensors that are projected
_PROJECTED_ELEMENTS = 4096
MAX_RESIDUAL = 0.01  # relative error of `common_factor`, above which gradients were changed by more than one factor
_HEAD = 7  # numbers of a measurement before its projections
HELD_ON, _MOST_HELD, _MOST_HELD_BYTES = ("cuda",), 32, 2**25
"""Gradients on a GPU whose squares one kernel sums. To launch kernels for each of them takes the host longer than the
backward pass of a small batch takes the device: a step of ResNet-50 on an H100 took 1.5 times as long."""

NO_SMALL_BATCH = (
    "steps are not scaled: with one rank and no accumulation there is no small-batch gradient; accumulate two or more "
    "micro-steps, or give `ags` model= and loss= and call observe_batch"
)
DISTURBED = (
    "steps are left out of the measurement, and factors stay as they were: gradients were changed by more than one "
    "common factor after backward (clipping by value or by group, PowerSGD), or some parameters had more backwards "
    "than others (a backward for each loss, reentrant checkpoints with a shared module)"
)


def squares(gradient: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """Sum of squares of a tensor (0-d), or the square of each element (the shape of `gradient`).

    In float32; in float64 for float64 gradients.
    """
    wide = torch.promote_types(gradient.dtype, torch.float32)
    if granularity == "element":
        return gradient.to(wide).square()
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=wide)
    return norm.square()


def common_factor(before: torch.Tensor, after: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(f, |after - f before| / |after|) by least squares, 0-d, from projections of shape (n,); NaN where undetermined.

    f is the number by which gradients were multiplied between backward and step: AMP's loss scale, clipping by global
    norm, averaging over micro-steps. None of them is mistaken for noise, and the script need not report them.
    """
    factor = torch.dot(before, after) / torch.dot(before, before)
    factor = torch.where(factor > 0.0, factor, math.nan)
    return factor, torch.linalg.vector_norm(after - factor * before) / torch.linalg.vector_norm(after)


class Reading:
    """One step's measurement, summed over ranks, on its device; each float waits for that device.

    `norm_sq`: |G|^2 as the optimizer sees it. `norm_sq_before_clip`: in the unit of backward, hence before a clip by
    global norm, and with the loss scale of AMP. Both 0-d; the latter is NaN where the factor between them is unknown.
    """

    def __init__(self, vector: torch.Tensor) -> None:
        self._vector = vector
        self._factor, self._residual = common_factor(vector[_HEAD : _HEAD + _CALIBRATORS], vector[-_CALIBRATORS:])
        self.norm_sq = vector[2]
        self.norm_sq_before_clip = self.norm_sq / self._factor.square()

    def moments(self) -> tuple[float, float, float]:
        """Mean |g_i|^2 over the parts and |mean of g_i|^2, both in the unit of backward, and the number of parts B / b.

        NaN or infinite where nothing can be said.
        """
        small, parts, large, micro, samples = self._vector[:5].tolist()
        unit = (float(self._factor) * micro) ** 2
        return (small / parts, large / unit, samples) if parts and unit else (math.nan, math.nan, samples)

    @property
    def unit(self) -> float:
        """By which a sum of micro-steps was multiplied between backward and step."""
        return float(self._factor)

    @property
    def examples(self) -> float:
        """Global batch size of the step; 0 where it is not given and no rank observes its batches."""
        return float(self._vector[5])

    @property
    def disturbed(self) -> bool:
        """Parts and whole cannot be compared."""
        return float(self._vector[6]) > 0.0 or float(self._residual) > MAX_RESIDUAL


class Meter:
    """Hooks, the batch of the current step, and what is measured from both.

    `counted_batch_size`: examples per step over all ranks, by the last reading. A rank's batch would not do: the last
    one of an epoch may be shorter on some ranks, and their factors would differ.
    `share`: of the batches of `global_batch_size`, how much the agent hands to this rank.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        ranks: Ranks,
        *,
        global_batch_size: int | None = None,
        model: nn.Module | None = None,
        loss: LossFunction | None = None,
    ) -> None:
        self.inner, self.ranks = inner, ranks
        self.tap = GradientTap()
        self.global_batch_size = global_batch_size
        self.share = 1.0
        self.counted_batch_size: int | None = None
        self.last_count = 0
        self._model, self._loss = model, loss
        self._sized = False  # the script gives the sizes of its batches
        self._per_row = 1.0  # tokens, where these are the sizes
        self._warned: set[str] = set()
        self._batch: Any = None
        self._observed = self._longest = 0.0

    def parameters(self) -> list[torch.Tensor]:
        """All parameters, group by group."""
        return [p for group in self.inner.param_groups for p in group["params"]]

    def gradients(self) -> Gradients:
        """The current gradient of each parameter."""
        return [p.grad for p in self.parameters()]

    @property
    def device(self) -> torch.device:
        """Of the first parameter: numbers for reductions over ranks are on it."""
        return self.parameters()[0].device

    def warn(self, sentence: str) -> None:
        """Log `sentence` once."""
        if sentence not in self._warned:
            self._warned.add(sentence)
            _LOG.warning("gradient scaling: %s", sentence)

    # The batch.

    def observe(self, batch: Any, size: float | None = None) -> None:
        """Take the batch of a step or of one of its micro-steps, of `size` examples or tokens.

        Once the script gives a size, batches without one (those that the agent observes) are not counted.
        """
        self._batch = batch
        length = float(batch_size_of(batch) or 0)
        if size is not None:
            if not self._sized:
                self._sized, self._observed, self._longest = True, 0.0, 0.0
            self._per_row, length = size / max(length, 1.0), size
        elif self._sized:
            return
        self._observed, self._longest = self._observed + length, max(self._longest, length)

    def forget_batch(self) -> None:
        """The step is over."""
        self._batch = None
        self._observed = self._longest = 0.0

    @property
    def observed(self) -> float:
        """Size of this step's batch on this rank, for a sum over ranks; 0 where none was observed.

        At most as many as micro-steps explain: a batch of a step that a GradScaler skipped, or one that came twice,
        does not count.
        """
        parts = self.tap.parts
        return min(self._observed, parts * self._longest) if parts else self._longest

    @property
    def examples(self) -> float:
        """This rank's summand of B: its part of the global batch that the script gives, else what was observed."""
        given = self.global_batch_size
        return self.observed if given is None else given * self.share / self.ranks.size

    @property
    def batch_size(self) -> int | None:
        """B, per step over all ranks, of the last reading; before the first one as given."""
        return self.global_batch_size if self.counted_batch_size is None else self.counted_batch_size

    def count(self, examples: float) -> None:
        """Take a sum of `examples` as B; a smaller count only the second time: a last batch may be short."""
        if examples > 0:
            count = round(examples)
            short = self.global_batch_size is None and count < self.last_count
            self.counted_batch_size, self.last_count = self.last_count if short else count, count

    def batch_ratio(self, small_batch_size: int | None) -> float | None:
        """B / b_small when both are known; never below 1."""
        large = self.batch_size
        return None if small_batch_size is None or large is None else max(1.0, large / small_batch_size)

    # Measurements.

    def measure(self) -> torch.Tensor:
        """This rank's summands of the step's measurement (float64), whose sum over ranks is a `Reading`.

        Zeros where it has none, so that every rank joins the reduction. A parameter without a part on this rank but
        with a reduced gradient counts as a zero part. Each rank adds the squares of its portion of reduced gradients.
        """
        gradients, size, tap = self.gradients(), self.ranks.size, self.tap
        dense = [g is not None and not g.is_sparse for g in gradients]
        portion = self.ranks.portion([p.numel() for p in self.parameters()])
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        tap.sum_held()
        sums = [s.sum() if s.ndim else s for s, use in zip(tap.squares, dense, strict=True) if use and s is not None]
        mine = [g for g, use, own in zip(gradients, dense, portion, strict=True) if g is not None and use and own]
        small = torch.stack([s.to(self.device) for s in sums]).double().sum() if sums else zero
        large = norm_squared(mine).to(self.device) if mine else zero
        parts = float(tap.parts)
        # `full` writes on the device; `tensor` would copy each number there, one transfer each.
        slots = (small, parts, large, parts / size, parts, self.examples, float(tap.uneven))
        head = [s if isinstance(s, torch.Tensor) else torch.full_like(zero, s) for s in slots]
        projections = [zero if x is None else x.to(self.device, torch.float64) for x in tap.projections()]
        return torch.cat([torch.stack(head), torch.stack(projections) / size])

    @property
    def probes(self) -> bool:
        """True when small batches are to be sampled by a second backward."""
        return self._model is not None and self._loss is not None

    def probe(self, small_batch_size: int | None) -> tuple[Gradients, float] | None:
        """Reduced gradient of a sub-batch and B / b of it; None when it would be the whole batch of any rank.

        The sub-batch is b_small over all ranks, or an eighth of the batch without one. A few numbers are reduced
        first: all ranks skip the reduction of gradients if one rank's batch is too short for it.
        """
        if self._model is None or self._loss is None:
            return None
        rows, wanted = batch_size_of(self._batch) or 0, small_batch_size
        size = rows // 8 if wanted is None else math.ceil(wanted / self.ranks.size / self._per_row)
        size = max(1, size)
        vector = torch.tensor([self.examples, size * self._per_row, size >= rows], dtype=torch.float64)
        # With several ranks the host waits for the device here, with one it does not.
        summed = vector if self.ranks.size == 1 else self.ranks.sum_(vector.to(self.device))
        examples, sizes, too_short = summed.tolist()
        if too_short:
            self.warn(
                f"a probe of {size} examples does not fit into the {rows} that a rank observes in one micro-step: "
                "steps are not measured; give a smaller small_batch_size"
            )
            return None
        tapped, self.tap.tapped = self.tap.tapped, None
        try:
            part = map_tensors(self._batch, lambda tensor: tensor[:size] if tensor.ndim else tensor)
            gradients = probe_gradients(self._model, self._loss, part, self.parameters(), ranks=self.ranks)
        finally:
            self.tap.tapped = tapped
        return gradients, examples / sizes


class GradientTap:
    """Hooks on the leaves of parameters, which sum what `tapped` says; while that is None, each costs one Python call.

    Sums on this rank since the last step, in the unit of backward (loss scale included): `squares` by parameter, None
    where it had no dense gradient; complete after `sum_held`.
    """

    def __init__(self) -> None:
        self.tapped: Tapped | None = None
        self.squares: Gradients = []
        self._parameters: list[torch.Tensor] = []
        self._counts: list[int] = []
        self._handles: list[RemovableHandle] = []
        self._calibrators: dict[int, _Calibrator] = {}
        self._held: dict[int, torch.Tensor] = {}
        self._held_bytes = 0

    def watch(self, parameters: Sequence[torch.Tensor]) -> None:
        """Hook every parameter that needs a gradient; drops sums and disarms where they are not those of before."""
        hooked = [p for p in parameters if p.requires_grad]
        same = len(hooked) == len(self._handles) and len(parameters) == len(self._parameters)
        if same and all(map(operator.is_, parameters, self._parameters)):
            return
        self.close()
        self._parameters = list(parameters)
        self.squares, self._counts = [None] * len(parameters), [0] * len(parameters)
        for index, parameter in enumerate(parameters):
            if parameter.requires_grad:
                hook = self._hook(index)
                self._handles.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]
        self._choose_calibrators()

    def arm(self, tapped: Tapped | None) -> None:
        """Sum this from the next backward on, from zero."""
        self.clear()
        self.tapped = tapped

    def clear(self) -> None:
        """Drop all sums; called when gradients are zeroed, so that a skipped step leaves nothing in them."""
        self._held, self._held_bytes = {}, 0
        if any(self._counts):
            self.squares = [None] * len(self.squares)
            self._counts = [0] * len(self._counts)
            for calibrator in self._calibrators.values():
                calibrator.total = None

    @property
    def parts(self) -> int:
        """Micro-steps seen since the last `clear`."""
        return max(self._counts, default=0)

    @property
    def uneven(self) -> bool:
        """Some leaves had more backwards than others, so that their sum is no number of micro-steps.

        Two losses with a backward each, or reentrant checkpoints with a shared module, cause it.
        """
        return len({count for count in self._counts if count}) > 1

    def projections(self) -> Gradients:
        """_CALIBRATORS sums of backward's projections, then as many of the gradients' at present; None: no gradient."""
        before: Gradients = []
        after: Gradients = []
        for index in sorted(self._calibrators):
            calibrator, gradient = self._calibrators[index], self._parameters[index].grad
            usable = gradient is not None and not gradient.is_sparse
            before.append(calibrator.total if usable else None)
            after.append(calibrator.project(gradient) if usable and gradient is not None else None)
        padding: Gradients = [None] * (_CALIBRATORS - len(before))
        return [*before, *padding, *after, *padding]

    def close(self) -> None:
        """Remove every hook, and drop all sums."""
        self.clear()
        self.tapped = None
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def observe(gradient: torch.Tensor) -> None:
            tapped = self.tapped
            if tapped is None or gradient.is_sparse:
                return
            self._counts[index] += 1
            with torch.no_grad():
                if tapped == "tensor" and gradient.device.type in HELD_ON:
                    self._hold(index, gradient)
                elif tapped != "projections":
                    square, before = squares(gradient, tapped), self.squares[index]
                    self.squares[index] = square if before is None else before.add_(square)
                calibrator = self._calibrators.get(index)
                if calibrator is not None:
                    projection = calibrator.project(gradient)
                    calibrator.total = projection if calibrator.total is None else calibrator.total + projection

        return observe

    def _hold(self, index: int, gradient: torch.Tensor) -> None:
        """Keep a gradient until the next sum. Autograd then copies it into `.grad`, since it is in use, and nothing
        changes it: neither a further micro-step nor DDP's average."""
        if index in self._held:  # of the micro-step before
            self.sum_held()
        self._held[index] = gradient
        self._held_bytes += gradient.nbytes
        if len(self._held) >= _MOST_HELD or self._held_bytes >= _MOST_HELD_BYTES:
            self.sum_held()

    def sum_held(self) -> None:
        """Add the squares of the gradients that are held."""
        held, self._held, self._held_bytes = self._held, {}, 0
        add_squares(self.squares, list(held), norms(list(held.values())))

    def _choose_calibrators(self) -> None:
        """Small and large tensors: the smallest are often biases before a normalization, whose gradient is zero."""
        wanted = [
            i for i, p in enumerate(self._parameters) if p.requires_grad and p.is_floating_point() and p.numel() > 0
        ]
        wanted.sort(key=lambda i: (self._parameters[i].numel(), i))
        half = _CALIBRATORS // 2
        chosen = {*wanted[:half], *wanted[-half:]}
        self._calibrators = {index: _Calibrator(self._parameters[index], index) for index in chosen}


class _Calibrator:
    """Projects the first rows of a tensor on fixed random signs: the plain sum of a bias before a softmax is zero."""

    def __init__(self, parameter: torch.Tensor, seed: int) -> None:
        rows = parameter.shape[0] if parameter.ndim else 1
        row = parameter.numel() // rows
        self._rows = max(1, min(rows, _PROJECTED_ELEMENTS // row))
        generator = torch.Generator().manual_seed(seed)
        signs = torch.randint(0, 2, (self._rows * row,), generator=generator, dtype=torch.float32).mul_(2).sub_(1)
        self._signs = signs.to(parameter.device)
        self.total: torch.Tensor | None = None

    def project(self, gradient: torch.Tensor) -> torch.Tensor:
        """<gradient, signs> (0-d)."""
        if self._signs.device != gradient.device:  # the model was moved after it was wrapped
            self._signs = self._signs.to(gradient.device)
        part = gradient if gradient.ndim == 0 else gradient[: self._rows]
        return torch.dot(part.reshape(-1).float(), self._signs)


def probe_gradients(
    model: nn.Module, loss: LossFunction, batch: Any, parameters: Sequence[torch.Tensor], *, ranks: Ranks
) -> Gradients:
    """Gradient of `loss` on `batch`, averaged over ranks, one tensor per parameter (None where it has no part).

    Leaves training unchanged: it does not write `.grad` (so DDP's reducer does not start), and restores random streams
    and all buffers (batch normalization's running statistics). The module stays in training mode, because evaluation
    mode would give a different, smaller gradient. Every rank must call it in the same step.
    """
    module = model.module if hasattr(model, "module") and isinstance(model.module, nn.Module) else model
    wanted = [p for p in parameters if p.requires_grad]
    devices = sorted({p.device.index for p in wanted if p.device.type == "cuda" and p.device.index is not None})
    with torch.random.fork_rng(devices=devices), _buffers_kept(module), torch.enable_grad():
        found = torch.autograd.grad(loss(module, batch), wanted, allow_unused=True)
    by_parameter = {id(p): g for p, g in zip(wanted, found, strict=True)}
    gradients = [by_parameter.get(id(p)) for p in parameters]
    if ranks.size == 1:
        return gradients
    # Not in place: autograd may return one tensor for two parameters, or one whose elements share memory.
    return [g if g is None or g.is_sparse else ranks.sum_(torch.div(g, ranks.size)) for g in gradients]


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
