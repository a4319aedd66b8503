"""Implements AGS as published: `ags` (Algorithm 1) and `static` (equation 8) scale steps that are not sensitive.

    s = min(|g_small| / (|g_large| + eps), s_max) by element, where   | |G_i|^2 - |G_{i-1}|^2 | / |G_{i-1}|^2 < delta

The factors of `ags` are computed once per epoch (in the epoch's last step if `steps_per_epoch` is set, or else in the
first step of the next epoch). They are applied to later batches, so that they do not depend on the batch that they
scale (Lemma 1). In the first epoch, all factors are 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tula_agent.batches import infer_batch_size, map_tensors
from tula_agent.scaling.policies import Ags, LossFunction, Numbers, Static
from tula_agent.scaling.ranks import AsyncReduction, Ranks, to_host
from tula_agent.scaling.statistics import DISTURBED, NO_SMALL_BATCH, GradientStatistics, Reading
from tula_agent.scaling.taps import Gradients, TapMode, squares
from tula_agent.torch_private import wide_dtype

EPS = 1e-8  # from Algorithm 1
_LONG_EPOCH = 10_000
NO_EPOCHS = (
    f"ags has computed no factors in {_LONG_EPOCH:,} steps, so nothing is scaled: use Ags(steps_per_epoch=...), or "
    "call next_epoch at the start of each epoch (run.steps calls it)"
)


def factor_from_squares(small: torch.Tensor, large: torch.Tensor, *, s_min: float, s_max: float) -> torch.Tensor:
    """Return min(|g_small| / (|g_large| + eps), s_max), at least s_min (Algorithm 1, Lemma 1), from squared magnitudes.

    A ratio that is not finite (because of overflow) becomes 1, so that a single bad probe never corrupts a weight. The
    ratio of two zeros also becomes 1, since it carries no information.
    """
    ratio = small.clamp(min=0.0).sqrt() / (large.clamp(min=0.0).sqrt() + EPS)
    usable = torch.isfinite(ratio) & ((small > 0.0) | (large > 0.0))
    return torch.where(usable, ratio.clamp(min=s_min, max=s_max), torch.ones_like(ratio))


@dataclass(frozen=True)
class GatedFactors:
    """Factors by parameter (0-d or in the parameter's shape; None means 1), and a 0-d gate (1 if the factors apply,
    else 0).
    """

    by_parameter: Gradients
    gate: torch.Tensor


class AgsRule:
    """Returns the factors (from the last refresh for `ags`, a single number for `static`), and computes the gate.

    The gate is computed on the device from the current reduced gradient, so nothing waits for the host.
    """

    def __init__(self, statistics: GradientStatistics, policy: Ags | Static) -> None:
        self._statistics, self._policy = statistics, policy
        self._ags = policy if isinstance(policy, Ags) else None
        self._scaled = self._counted = 0.0
        self._gate = SensitivityGate()
        self._reduction: AsyncReduction | None = None
        self._last = [math.nan, math.nan, math.nan]  # squared norm, variability, gate
        self._factors: Gradients | None = None
        self._found_for: list[torch.Tensor] = []
        self._found_with: Numbers | None = None
        self._mean_factor = 1.0
        self._due = False

    def next_epoch(self, step: int) -> None:
        """Request new factors in step number `step`, the first of an epoch, unless `steps_per_epoch` is set."""
        ags = self._ags
        self._due = self._due or (ags is not None and step > 0 and ags.steps_per_epoch is None)

    def wants(self, step: int) -> TapMode:
        """Return the sums that the taps must collect during step number `step`."""
        ags = self._ags
        if ags is None:
            return "projections"
        if ags.steps_per_epoch is not None:
            self._due = self._due or (step + 1) % ags.steps_per_epoch == 0
        elif step == _LONG_EPOCH and self._found_with is None:
            self._statistics.warn(NO_EPOCHS)
        return "element" if self._due and ags.model is None else "projections"

    def factors(self, step: int, numbers: Numbers) -> GatedFactors:  # noqa: ARG002 - as in `gain`
        """Return the factors for this step; if a refresh is due, compute the factors for later steps."""
        self._receive()
        if self._factors is not None and self._found_with != numbers:
            self._due, self._factors, self._mean_factor = True, None, 1.0
        reading = self._statistics.reading(self._statistics.ranks.sum_(self._statistics.measure()))
        gate = self._gate(reading.norm_sq_before_clip, numbers.delta)
        self._reduction = to_host(
            torch.cat([torch.stack([reading.norm_sq, self._gate.variability, gate]), reading.served])
        )
        factors = self._in_force(gate.device, numbers)
        if self._ags is not None and self._due:
            self._refresh(reading, self._ags, numbers)
        return GatedFactors(factors, gate)

    def _in_force(self, device: torch.device, numbers: Numbers) -> Gradients:
        if self._ags is None:
            return [torch.full((), self._static_scale(numbers), device=device)] * len(self._statistics.parameters())
        return self._by_parameter()

    def _by_parameter(self) -> Gradients:
        """Return the last factors in the order of the current parameters, since parameter groups may have changed."""
        by_parameter = dict(zip(map(id, self._found_for), self._factors or [], strict=False))
        return [by_parameter.get(id(parameter)) for parameter in self._statistics.parameters()]

    def _static_scale(self, numbers: Numbers) -> float:
        """Return the factor of equation 8; a factor from the service is limited to B / b_small."""
        ratio = self._statistics.batch_ratio(numbers.small_batch_size)
        if isinstance(self._policy, Static) and self._policy.scale is None:
            return min(numbers.static_scale, 1.0 if ratio is None else ratio)
        return numbers.static_scale

    def _refresh(self, reading: Reading, ags: Ags, numbers: Numbers) -> None:
        """Refresh the factors (UPDATEGRADSCALE of Algorithm 1).

        The factors come from a probe if the policy has a model and a loss, or else from the gradients of single ranks
        and micro-steps.
        """
        statistics = self._statistics
        statistics.count(reading.examples)
        factors: Gradients = []
        if ags.model is not None and ags.loss is not None:
            probed = _probe(statistics, ags.model, ags.loss, numbers.small_batch_size)
            if probed is not None:
                part, whole = map(_squares, (probed[0], statistics.gradients()))
                factors = self._by_element(part, whole, numbers, probed[1])
        elif statistics.tap.mode != "element":
            return  # became due in this step, so the taps read the next step
        else:
            factors = self._from_parts(reading, numbers)
        self._due = False
        if not factors:
            return
        self._factors, self._found_for, self._found_with = factors, statistics.parameters(), numbers
        means = [factor.to(torch.float32).mean() for factor in factors if factor is not None]
        self._mean_factor = float(torch.stack([m.to(means[0].device) for m in means]).mean()) if means else 1.0

    def _from_parts(self, reading: Reading, numbers: Numbers) -> Gradients:
        """Return factors computed from all ranks' parts; empty if there is only one part or the parts cannot be
        compared.

        |g_small|^2 is the mean over parts, so b_small is the size of a part, regardless of `small_batch_size`.
        """
        statistics, samples = self._statistics, reading.moments()[2]
        if samples < 2.0 or reading.disturbed:
            statistics.warn(NO_SMALL_BATCH if samples < 2.0 else DISTURBED)
            return []
        unit = (reading.unit * samples / statistics.ranks.size) ** 2
        large = [None if x is None else x / unit for x in _squares(statistics.gradients())]
        small: Gradients = []
        for square, whole in zip(statistics.tap.squares, large, strict=True):
            if whole is None:
                small.append(None)
            else:
                part = torch.zeros_like(whole) if square is None else square.clone()
                small.append(statistics.ranks.sum_(part) / samples)
        ratio = statistics.batch_ratio(numbers.small_batch_size)
        return self._by_element(small, large, numbers, samples if ratio is None else ratio)

    def _by_element(self, small: Gradients, large: Gradients, numbers: Numbers, ratio: float) -> Gradients:
        """Return Algorithm 1's factors from the squares of g_small and g_large; `ratio` is B / b_small.

        A bound from the service is limited to B / b_small.
        """
        s_max = math.sqrt(max(1.0, ratio)) if numbers.s_max is None else numbers.s_max
        if self._ags is not None and self._ags.s_max is None:
            s_max = min(s_max, max(1.0, ratio))
        s_min = min(numbers.s_min, s_max)
        return [
            None if part is None or whole is None else factor_from_squares(part, whole, s_min=s_min, s_max=s_max)
            for part, whole in zip(small, large, strict=True)
        ]

    def _receive(self) -> None:
        if self._reduction is not None:
            values, self._reduction = self._reduction.values(), None
            self._last = values[:3]
            self._statistics.take_served(values[3:])
            self._counted += 1.0
            self._scaled += self._last[2]

    def telemetry(self, numbers: Numbers) -> dict[str, float]:
        """Return the values of the second-to-last step, and the `scaled_share` of all steps."""
        return {
            "grad_norm": math.sqrt(max(self._last[0], 0.0)) if math.isfinite(self._last[0]) else math.nan,
            "gradient_variability": self._last[1],
            "scale": self._static_scale(numbers) if self._ags is None else self._mean_factor,
            "scaled_share": self._scaled / self._counted if self._counted else 0.0,
        }

    def state(self) -> list[float]:
        """Return the numbers to store in a checkpoint, such as the gate's last norm and whether new factors are due."""
        self._receive()
        return [
            float(self._gate.previous),
            float(self._due),
            self._mean_factor,
            self._scaled,
            self._counted,
            *self._last,
        ]

    def load(self, saved: Sequence[float]) -> None:
        """Restore the state that `state` returned."""
        previous, due, self._mean_factor, self._scaled, self._counted, *last = saved[:8]
        self._reduction, self._last, self._due = None, last, bool(due)
        device = self._statistics.device
        self._gate.previous = torch.full((), previous, dtype=wide_dtype(device), device=device)

    def saved_factors(self) -> Gradients:
        """Return the factors of `ags` for a checkpoint, by parameter; before the first refresh, all factors are 1.

        The factors always exist because torch.distributed.checkpoint loads only entries that also exist in the new
        optimizer's state.
        """
        if self._ags is None:
            return []
        pairs = zip(self._by_parameter(), self._statistics.parameters(), strict=True)
        return [torch.ones_like(squares(p, "element")) if f is None else f for f, p in pairs]

    def load_factors(self, factors: Gradients, numbers: Numbers) -> None:
        """Restore the factors that `saved_factors` returned; `numbers` are the values that apply now."""
        if not any(f is not None and bool((f != 1.0).any()) for f in factors):
            return
        self._found_for, self._found_with = self._statistics.parameters(), numbers
        pairs = zip(factors, self._found_for, strict=True)
        self._factors = [f if f is None else f.to(p.device) for f, p in pairs]


def _squares(gradients: Gradients) -> Gradients:
    return [None if g is None or g.is_sparse else squares(g, "element") for g in gradients]


class SensitivityGate:
    """Evaluates equation 5 on the device; the gate is 1 if the step may be scaled, and 0 if it is sensitive."""

    def __init__(self) -> None:
        self.previous = self.variability = torch.full((), math.nan, device="cpu")

    def __call__(self, norm_sq: torch.Tensor, delta: float) -> torch.Tensor:
        """Return the gate (0-d) for a step with squared gradient norm `norm_sq`; the first step counts as sensitive."""
        previous = self.previous.to(norm_sq)
        self.variability = ((norm_sq - previous) / previous).abs()
        # A gradient with NaN or infinity is never scaled, and its norm is never used for comparison.
        self.previous = torch.where(torch.isfinite(norm_sq), norm_sq, previous)
        return (self.variability < delta).to(norm_sq.dtype)


def _probe(
    statistics: GradientStatistics, model: nn.Module, loss: LossFunction, small_batch_size: int | None
) -> tuple[Gradients, float] | None:
    """Return the reduced gradient of a sub-batch and the ratio B / b; None if the sub-batch would be a rank's whole
    batch.

    The sub-batch has b_small examples over all ranks, or an eighth of the batch if b_small is unknown. The ranks first
    reduce a few numbers, so that all of them skip the gradients' reduction if one rank's batch is too short.
    """
    ranks, tap = statistics.ranks, statistics.tap
    rows = infer_batch_size(statistics.batch) or 0
    size = rows // 8 if small_batch_size is None else math.ceil(small_batch_size / ranks.size / statistics.per_row)
    size = max(1, size)
    numbers = [statistics.examples, size * statistics.per_row, float(size >= rows)]
    vector = torch.tensor(numbers, dtype=wide_dtype(statistics.device), device="cpu")
    # With several ranks, the host waits for the device here; with one rank, it does not.
    summed = vector if ranks.size == 1 else ranks.sum_(vector.to(statistics.device))
    examples, sizes, too_short = summed.tolist()
    if too_short:
        statistics.warn(
            f"steps are not measured, because a probe of {size} examples is too large for a micro-step of {rows} "
            "examples: use a smaller small_batch_size"
        )
        return None
    mode, tap.mode = tap.mode, None
    try:
        part = map_tensors(statistics.batch, lambda tensor: tensor[:size] if tensor.ndim else tensor)
        gradients = probe_gradients(model, loss, part, statistics.parameters(), ranks=ranks)
    finally:
        tap.mode = mode
    return gradients, examples / sizes


def probe_gradients(
    model: nn.Module, loss: LossFunction, batch: Any, parameters: Sequence[torch.Tensor], *, ranks: Ranks
) -> Gradients:
    """Return the gradient of `loss` on `batch`, averaged over ranks: a tensor or None for each parameter.

    The function leaves training unchanged: it does not write `.grad` (so DDP's reducer does not start), and it restores
    the random number generators and all buffers (such as batch normalization's running statistics). The module stays in
    training mode, because evaluation mode would give a different, smaller gradient. Every rank must call the function
    in the same step.
    """
    module = model.module if hasattr(model, "module") and isinstance(model.module, nn.Module) else model
    trained = [p for p in parameters if p.requires_grad]
    devices = sorted({p.device.index for p in trained if p.device.type == "cuda" and p.device.index is not None})
    with torch.random.fork_rng(devices=devices), _buffers_kept(module), torch.enable_grad():
        per_parameter = torch.autograd.grad(loss(module, batch), trained, allow_unused=True)
    by_parameter = {id(p): g for p, g in zip(trained, per_parameter, strict=True)}
    gradients = [by_parameter.get(id(p)) for p in parameters]
    if ranks.size == 1:
        return gradients
    # Do not sum in place: autograd may return one tensor for two parameters, or one whose elements share memory.
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
