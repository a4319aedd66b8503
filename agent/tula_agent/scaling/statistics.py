"""Compares the gradients of a step's small batches with that of its large batch, and counts the examples in each.

    large = |g|^2        small = mean over parts of |g_i|^2        g = f sum_i g_i / N

Each part g_i is the gradient of one micro-step on one rank (`taps.py`). f is the factor by which gradients are
multiplied between the backward pass and the optimizer's step (AMP's loss scale, clipping by global norm, averaging). f
is estimated from projections, so that a script need not report it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tula_agent.batches import infer_batch_size
from tula_agent.guard import logger
from tula_agent.scaling.policies import SERVED_SLOTS, Served
from tula_agent.scaling.ranks import Ranks
from tula_agent.scaling.taps import CALIBRATORS, Gradients, GradientTap
from tula_agent.torch_private import norm_squared, norms, to_device, wide_dtype

_MAX_RESIDUAL = 0.01  # limit of the relative error; above it, more than one factor changed the gradients
_HEAD = 7  # count of numbers before the projections in a measurement
_MATRICES_FROM = _HEAD + 2 * CALIBRATORS + SERVED_SLOTS
_SIZE_DECAY = 0.9  # decay of the average of sizes that the script gives

NO_SMALL_BATCH = (
    "steps are not scaled, because a single rank without accumulation has no small-batch gradient: accumulate two or "
    "more micro-steps, or pass model= and loss= to Ags and call observe_batch"
)
NO_PARTS = (
    "steps are not scaled, because gradients are set without a backward pass over the parameters (by torch.func, Apex "
    "or assignment to .grad), so there is no small-batch gradient"
)
DISTURBED = (
    "some steps are not measured and do not change the factors: after the backward pass, gradients were not all "
    "multiplied by the same factor (clipping by value or by group, PowerSGD), or some parameters had more backward "
    "passes than others (one for each loss, or reentrant checkpoints with a shared module)"
)


def common_factor(before: torch.Tensor, after: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return f by least squares and the residual |after - f before| / |after| (both 0-d), from projections (n,).

    Both are NaN if they cannot be determined. f is the factor by which AMP's loss scale, clipping by global norm and
    averaging over micro-steps multiply the gradients between the backward pass and the step. So these changes are not
    mistaken for noise, and the script need not report them.
    """
    factor = torch.dot(before, after) / torch.dot(before, before)
    factor = torch.where(factor > 0.0, factor, math.nan)
    return factor, torch.linalg.vector_norm(after - factor * before) / torch.linalg.vector_norm(after)


def _stack(numbers: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the 0-d tensors `numbers` as one tensor on `device`, in the widest of their types."""
    widest = max({number.dtype for number in numbers}, key=lambda dtype: dtype.itemsize)
    return torch.stack(
        [
            number if number.dtype == widest and number.device == device else number.to(device, widest)
            for number in numbers
        ]
    )


class Reading:
    """Measurement of one step, summed over ranks, on the device; converting a value to a float waits for the device.

    `norm_sq`: |G|^2 of the gradient that the optimizer uses. `norm_sq_before_clip`: |G|^2 in the unit of the backward
    pass, which is before clipping by global norm and includes AMP's loss scale. Both are 0-d; `norm_sq_before_clip` is
    NaN if the factor between them is unknown. `precision`: the relative rounding error of the gradients.
    """

    def __init__(self, vector: torch.Tensor, precision: float = 0.0) -> None:
        self._vector, self._precision = vector, precision
        before, after = vector[_HEAD : _HEAD + CALIBRATORS], vector[_HEAD + CALIBRATORS : _HEAD + 2 * CALIBRATORS]
        self._factor, self._residual = common_factor(before, after)
        self.norm_sq = vector[2]
        self.norm_sq_before_clip = self.norm_sq / self._factor.square()

    def moments(self) -> tuple[float, float, float]:
        """Return the mean of |g_i|^2 over the parts, |mean of g_i|^2, and the number of parts.

        The first two are in the unit of the backward pass, and are NaN or infinite if they cannot be computed.
        """
        small, parts, large, micro, samples = self._vector[:5].tolist()
        unit = (float(self._factor) * micro) ** 2
        return (small / parts, large / unit, samples) if parts and unit else (math.nan, math.nan, samples)

    def matrix_noise(self) -> list[float]:
        """Return the noise of each matrix's gradient, E|g - G|^2, in the optimizer's unit; at least 0."""
        _, parts, _, micro, samples = self._vector[:5].tolist()
        unit = (float(self._factor) * micro) ** 2
        by_matrix = self._vector[_MATRICES_FROM:].reshape(2, -1).tolist()
        if samples <= 1.0:
            return [0.0] * len(by_matrix[0])
        pairs = zip(*by_matrix, strict=True)
        return [max(0.0, (small / parts * unit - large) / (samples - 1.0)) for small, large in pairs]

    @property
    def served(self) -> torch.Tensor:
        """Return the first rank's `Served.to_vector()`."""
        return self._vector[_HEAD + 2 * CALIBRATORS : _MATRICES_FROM]

    @property
    def unit(self) -> float:
        """Return the factor by which a sum of micro-steps was multiplied between the backward pass and the step."""
        return float(self._factor)

    @property
    def examples(self) -> float:
        """Return the global batch size of the step; 0 if it is not given and no rank has observed its batches."""
        return float(self._vector[5])

    @property
    def disturbed(self) -> bool:
        """Return True if the parts cannot be compared with the whole, allowing for rounding in a sum of many parts."""
        rounding = 4.0 * self._precision * math.sqrt(max(float(self._vector[4]), 1.0))
        return float(self._vector[6]) > 0.0 or float(self._residual) > max(_MAX_RESIDUAL, rounding)


class GradientStatistics:
    """Stores the hooks and the batch of the current step, and computes measurements from both.

    `counted_batch_size`: the number of examples per step over all ranks, from the last reading. A rank's own batch
    cannot be used, since the last batch of an epoch may be shorter on some ranks, whose factors would then differ.
    `share`: the fraction of each batch, and so of `global_batch_size`, that the agent passes to the script.
    `matrices`: the indices of the parameters whose noise is measured separately.
    `served`: the service's values that now apply, equal on all ranks. `pulled`: the values that this rank has
    requested; those of the first rank are sent to the other ranks in the next measurement, so that all ranks apply them
    in the same step without an extra collective.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        ranks: Ranks,
        *,
        global_batch_size: int | None = None,
    ) -> None:
        self.inner, self.ranks = inner, ranks
        self.tap = GradientTap()
        self.global_batch_size = global_batch_size
        self.share = 1.0
        self.counted_batch_size: float | None = None
        self.last_count = 0.0
        self.matrices: tuple[int, ...] = ()
        self.served = self.pulled = Served()
        self.batch: Any = None
        self._sized = False  # the script gives the sizes of its batches
        self.per_row = 1.0  # tokens per row if sizes are in tokens
        self._warned: set[str] = set()
        self._observed = self._longest = 0.0
        self._without_parts = 0

    def parameters(self) -> list[torch.Tensor]:
        """Return all parameters, group by group."""
        return [p for group in self.inner.param_groups for p in group["params"]]

    def gradients(self) -> Gradients:
        """Return the current gradient of each parameter."""
        return [p.grad for p in self.parameters()]

    @property
    def device(self) -> torch.device:
        """Return the device of the first parameter, on which numbers are reduced over ranks."""
        return self.parameters()[0].device

    def warn(self, sentence: str) -> None:
        """Log `sentence` once."""
        if sentence not in self._warned:
            self._warned.add(sentence)
            logger.warning("gradient scaling: %s", sentence)

    # The batch.

    def observe(self, batch: Any, size: float | None = None) -> None:
        """Record the batch of a step or micro-step, which has `size` examples or tokens.

        Once the script has given a size, batches without a size (which the agent observes) are not counted.
        """
        self.batch = batch
        length = float(infer_batch_size(batch) or 0)
        if size is not None:
            if not self._sized:
                self._sized, self._observed, self._longest = True, 0.0, 0.0
            self.per_row, length = size / max(length, 1.0), size
        elif self._sized:
            return
        self._observed, self._longest = self._observed + length, max(self._longest, length)

    def forget_batch(self) -> None:
        """Discard the batch at the end of its step."""
        self.batch = None
        self._observed = self._longest = 0.0

    @property
    def observed(self) -> float:
        """Return the size of this step's batch on this rank, for a sum over ranks; 0 if no batch was observed.

        The size is limited by the number of micro-steps, so that a batch that was observed twice, or belongs to a step
        that a GradScaler skipped, does not count.
        """
        parts = self.tap.parts
        return min(self._observed, parts * self._longest) if parts else self._longest

    @property
    def examples(self) -> float:
        """Return this rank's contribution to B: its part of the given batch size, or else its observed examples."""
        given = self.global_batch_size
        return self.observed if given is None else given * self.share / self.ranks.size

    @property
    def batch_size(self) -> float | None:
        """Return B from the last reading or, before the first reading, the given global batch size."""
        return self.global_batch_size if self.counted_batch_size is None else self.counted_batch_size

    def count(self, examples: float) -> None:
        """Use `examples`, a sum over ranks, as B.

        A number of examples that is smaller than before is used only if it occurs twice, since the last batch of an
        epoch may be short. Sizes that the script gives, such as numbers of tokens, usually vary, so their average is
        used.
        """
        if examples <= 0:
            return
        if self._sized and self.global_batch_size is None:
            before = self.counted_batch_size or examples
            self.counted_batch_size = _SIZE_DECAY * before + (1.0 - _SIZE_DECAY) * examples
            return
        count = float(round(examples))
        short = self.global_batch_size is None and count < self.last_count
        self.counted_batch_size, self.last_count = self.last_count if short else count, count

    def batch_ratio(self, small_batch_size: int | None) -> float | None:
        """Return B / b_small, at least 1, or None if either is unknown."""
        large = self.batch_size
        return None if small_batch_size is None or large is None else max(1.0, large / small_batch_size)

    @property
    def has_gradients(self) -> bool:
        """Return True if at least one parameter has a gradient."""
        return any(p.grad is not None for p in self.parameters())

    def check_taps(self) -> None:
        """Warn once about gradients that the taps cannot observe; must be called at each step."""
        if self.tap.mode is not None:
            self._without_parts = 0 if self.tap.parts or not self.has_gradients else self._without_parts + 1
        if self._without_parts == 3:
            self.warn(NO_PARTS)

    # Measurements.

    def measure(self) -> torch.Tensor:
        """Return this rank's contribution to the step's measurement; the sum over ranks is a `Reading`.

        The contribution is zero if this rank has no measurement, so that every rank takes part in the reduction. If
        this rank does not hold a parameter's reduced gradient, the rank contributes zero for this parameter. Each rank
        contributes the squares of its portion of the reduced gradients.
        """
        gradients, size, tap, device = self.gradients(), self.ranks.size, self.tap, self.device
        dense = [g is not None and not g.is_sparse for g in gradients]
        portion = self.ranks.portion([p.numel() for p in self.parameters()])
        zero = torch.zeros((), dtype=wide_dtype(device), device=device)
        tap.sum_held()
        sums = [s.sum() if s.ndim else s for s, use in zip(tap.squares, dense, strict=True) if use and s is not None]
        mine = [g for g, use, own in zip(gradients, dense, portion, strict=True) if g is not None and use and own]
        small = _stack(sums, device).to(zero.dtype).sum() if sums else zero
        large = norm_squared(mine).to(zero) if mine else zero
        parts = float(tap.parts)
        # `full` writes on the device, whereas `tensor` would need one transfer for each number.
        slots = (small, parts, large, parts / size, parts, self.examples, float(tap.uneven))
        head = [s if isinstance(s, torch.Tensor) else torch.full_like(zero, s) for s in slots]
        single = zero.float()
        projections = _stack([single if x is None else x for x in tap.projections()], device).to(zero.dtype)
        new = self.ranks.is_first and self.pulled != self.served
        served = to_device(self.pulled.to_vector(), zero.dtype, device) if new else zero.expand(SERVED_SLOTS)
        return torch.cat([torch.stack(head), projections / size, served, *self._by_matrix(zero, portion)])

    def _by_matrix(self, zero: torch.Tensor, portion: list[bool]) -> list[torch.Tensor]:
        """Return, for each of `matrices`, the squares of its parts and, on one rank only, of its reduced gradient."""
        if not self.matrices:
            return []
        squares, gradients = self.tap.squares, self.gradients()
        usable = {i: g for i in self.matrices if (g := gradients[i]) is not None and not g.is_sparse and portion[i]}
        large = dict(zip(usable, norms([*usable.values()]), strict=True))
        # Stack in float32 first: converting the numbers one by one on a device would launch one kernel per number.
        single = zero.float()
        small = [single if (s := squares[i]) is None else s for i in self.matrices]
        return [
            _stack(small, zero.device).to(zero.dtype),
            _stack([large.get(i, single) for i in self.matrices], zero.device).to(zero.dtype).square(),
        ]

    def reading(self, vector: torch.Tensor) -> Reading:
        """Return the reading in `vector`, a sum of measurements over ranks."""
        kinds = {p.dtype for p in self.parameters() if p.is_floating_point()}
        return Reading(vector, max((torch.finfo(kind).eps for kind in kinds), default=0.0))

    def take_served(self, numbers: list[float]) -> None:
        """Apply the first rank's values, if a measurement contains any; this happens on all ranks in the same step."""
        if numbers[0] > 0.0:
            self.served = Served.from_vector(numbers)
