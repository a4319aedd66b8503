"""The policies with a sensitivity gate: `ags` (Algorithm 1) and `static` (equation 8).

A factor per parameter, or per element, applies to every step that is not sensitive. It multiplies the gradient of plain
SGD and the update of any other optimizer, which would divide a scaled gradient away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tula_agent.scaling.context import ScalingContext
from tula_agent.scaling.gradient_tap import GradientTap
from tula_agent.scaling.noise_math import EPS, paper_s_max, squares
from tula_agent.scaling.ranks import Arrival, Ranks, to_host
from tula_agent.scaling.step_statistics import global_factor
from tula_agent.scaling.thresholds import Granularity, ScalingThresholds
from tula_agent.torch_private import norm_squared

DEFAULT_REFRESH_STEPS = 200
"""Steps between two factors of `ags` while no epoch was reported."""


class ThresholdedPolicy:
    """Scales every step that is not sensitive, by the factors of the last refresh.

    The gate reads the current reduced gradient on the device, so nothing waits for the host.
    """

    def __init__(self, context: ScalingContext, steps_per_epoch: int | None) -> None:
        self._context = context
        self._scales_gradient = isinstance(context.inner, (torch.optim.SGD, torch.optim.ASGD))
        self.steps_per_epoch = steps_per_epoch
        self._epochs_reported, self._last_refresh = False, 0
        self._scaled = self._counted = 0.0
        self.reset()

    def reset(self) -> None:
        """The policy comes into force: drop what was measured before."""
        self._gate = SensitivityGate()
        self._arrival: Arrival | None = None
        self._known = [math.nan, math.nan, math.nan]  # squared norm, variability, gate
        self.forget_factors()

    def forget_factors(self) -> None:
        """Their bounds or their b_small changed: scale by 1 until the next refresh."""
        self._factors: list[torch.Tensor | None] | None = None
        self._mean_factor = 1.0
        self._due = True

    def next_epoch(self) -> None:
        """An epoch begins: refresh at its first step, unless a number of steps was set."""
        self._epochs_reported = True
        if self._context.thresholds.refresh_steps is None:
            self._due = True

    def wants(self, step: int) -> Granularity | None:
        """The squares of parts that the taps must sum during step number `step`: at a refresh, else None."""
        thresholds = self._context.thresholds
        if thresholds.policy != "ags":
            return None
        every = thresholds.refresh_steps or self.steps_per_epoch
        if every is None and not self._epochs_reported:
            every = DEFAULT_REFRESH_STEPS
        if every is not None and step - self._last_refresh >= every:
            self._due = True
        return thresholds.granularity if self._due and self._context.source != "probe" else None

    def run(self, step: int, inner_step: Callable[[], None]) -> None:
        """Refresh when due, decide whether the step is sensitive, scale, step."""
        self._receive()
        gradients = self._context.gradients()
        device = next((g.device for g in gradients if g is not None), None)
        if device is None:
            inner_step()
            return
        mine = [g for g, own in zip(gradients, self._context.portion(), strict=True) if g is not None and own]
        share = norm_squared(mine).to(device) if mine else torch.zeros((), dtype=torch.float64, device=device)
        norm_sq, examples = self._context.ranks.sum_(
            torch.stack([share, torch.full_like(share, self._context.observed)])
        )
        gate = self._gate(norm_sq, self._context.thresholds.delta)
        if self._context.thresholds.policy == "ags" and self._due:
            self._refresh(step, gradients, examples)
        self._scaled_step(gradients, gate, inner_step)
        variability = self._gate.variability if self._gate.variability is not None else norm_sq
        self._arrival = to_host(torch.stack([norm_sq, variability, gate]))

    def _refresh(self, step: int, gradients: list[torch.Tensor | None], examples: torch.Tensor) -> None:
        factors = self._new_factors(gradients, examples)
        if factors is None:
            return
        self._factors = factors
        self._due, self._last_refresh = False, step
        means = [factor.double().mean() for factor in factors if factor is not None]
        self._mean_factor = float(torch.stack([m.to(means[0].device) for m in means]).mean()) if means else 1.0

    def _new_factors(
        self, gradients: list[torch.Tensor | None], examples: torch.Tensor
    ) -> list[torch.Tensor | None] | None:
        """From the parts where there are any, else from a probe; None: try again at the next step."""
        context = self._context
        found = None
        if context.source != "probe":
            if not context.tap.armed:
                return None  # due since this step: the next one is tapped, which costs no second backward
            if context.global_batch_size is None:
                context.count(float(examples))
            found = factors_from_tap(
                context.tap, gradients, context.thresholds, ranks=context.ranks, batch_ratio=context.batch_ratio
            )
        if found is None and context.may_probe:
            probed = context.probe()
            if probed is not None:
                found = factors_from_probe(probed[0], gradients, context.thresholds, batch_ratio=probed[1])
        return found

    def _scaled_step(
        self, gradients: list[torch.Tensor | None], gate: torch.Tensor, inner_step: Callable[[], None]
    ) -> None:
        parameters = self._context.parameters()
        known = self._factors or [None] * len(parameters)
        if self._context.thresholds.policy == "static":
            known = [torch.full((), self._static_scale, device=gate.device)] * len(parameters)
        chosen = [
            (parameter, gradient, factor)
            for parameter, gradient, factor in zip(parameters, gradients, known, strict=False)
            if factor is not None and gradient is not None and not gradient.is_sparse
        ]
        factors = [factor for _, _, factor in chosen]
        if self._scales_gradient:
            apply_to_gradients([gradient for _, gradient, _ in chosen], factors, gate)
            inner_step()
            return
        before = [parameter.detach().clone() for parameter, _, _ in chosen]
        inner_step()
        with torch.no_grad():
            apply_to_updates([parameter for parameter, _, _ in chosen], before, factors, gate)

    @property
    def _static_scale(self) -> float:
        """Equation 8's factor within the bounds of every factor."""
        thresholds = self._context.thresholds
        scale = max(thresholds.static_scale, thresholds.s_min)
        return scale if thresholds.s_max is None else min(scale, thresholds.s_max)

    def _receive(self) -> None:
        if self._arrival is not None:
            self._known = self._arrival.values()
            self._arrival = None
            self._counted += 1.0
            self._scaled += self._known[2]

    def telemetry(self) -> dict[str, float]:
        """Of the last step but one; `scaled_share` over all steps."""
        policy = self._context.thresholds.policy
        return {
            "grad_norm": math.sqrt(max(self._known[0], 0.0)) if math.isfinite(self._known[0]) else math.nan,
            "gradient_variability": self._known[1],
            "scale": self._static_scale if policy == "static" else self._mean_factor,
            "scaled_share": self._scaled / self._counted if self._counted else 0.0,
        }

    def state(self) -> dict[str, Any]:
        """Factors, the gate's last norm and when to refresh."""
        self._receive()
        return {
            "factors": None if self._factors is None else list(self._factors),
            "previous": self._gate.previous,
            "due": self._due,
            "epochs_reported": self._epochs_reported,
            "last_refresh": self._last_refresh,
            "known": list(self._known),
            "mean_factor": self._mean_factor,
            "scaled": [self._scaled, self._counted],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Inverse of `state`."""
        factors = state["factors"]
        if factors is not None:
            parameters = self._context.parameters()
            factors = [f if f is None else f.to(p.device) for f, p in zip(factors, parameters, strict=True)]
        self._factors = factors
        self._gate.previous = state["previous"]
        self._due, self._last_refresh = state["due"], int(state["last_refresh"])
        self._epochs_reported = bool(state.get("epochs_reported", False))  # absent from older checkpoints
        self._known = list(state["known"])
        self._mean_factor = float(state["mean_factor"])
        self._scaled, self._counted = state["scaled"]


class SensitivityGate:
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
) -> list[torch.Tensor | None] | None:
    """Factor per parameter from the parts of all ranks; None when there is only one part.

    |g_small|^2 is the mean over parts. A b_small other than the size of a part is reached, by tensor, through
    E|g_b|^2 = |G|^2 + tr(Sigma)/b; by element the parts are used unchanged.
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
    return result


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


def factor_from_squares(small: torch.Tensor, large: torch.Tensor, *, s_min: float, s_max: float) -> torch.Tensor:
    """min(|g_small| / (|g_large| + eps), s_max), at least s_min (Algorithm 1, Lemma 1), from squared magnitudes.

    A ratio that is not finite (overflow) becomes 1, so that one bad probe never spoils a weight. So does the ratio of
    two zeros, which holds no information.
    """
    ratio = small.clamp(min=0.0).sqrt() / (large.clamp(min=0.0).sqrt() + EPS)
    usable = torch.isfinite(ratio) & ((small > 0.0) | (large > 0.0))
    return torch.where(usable, ratio.clamp(min=s_min, max=s_max), torch.ones_like(ratio))


def apply_to_gradients(gradients: Sequence[torch.Tensor], factors: Sequence[torch.Tensor], gate: torch.Tensor) -> None:
    """g <- g * s in place where `gate` (0-d, 1 or 0) is 1; exactly g where it is 0."""
    for gradient, factor in zip(gradients, factors, strict=True):
        gradient.mul_(_gated(factor, gate).to(gradient.device, gradient.dtype))


def apply_to_updates(
    weights: Sequence[torch.Tensor],
    before: Sequence[torch.Tensor],
    factors: Sequence[torch.Tensor],
    gate: torch.Tensor,
) -> None:
    """w <- w_before + s * (w - w_before) in place; exactly w where `gate` is 0 or s is 1."""
    for weight, old, factor in zip(weights, before, factors, strict=True):
        scale = _gated(factor, gate).to(weight.device, weight.dtype)
        torch.lerp(old, weight, scale.expand_as(weight), out=weight)


def _gated(factor: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return torch.where(gate.to(factor.device) > 0, factor, torch.ones_like(factor))
