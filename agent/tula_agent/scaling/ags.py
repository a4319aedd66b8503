"""The policies with a sensitivity gate: `ags` (Algorithm 1) and `static` (equation 8).

A factor per element or per tensor applies to every step that is not sensitive. Those of `ags` are found after the last
step of an epoch and used on later batches, so that they are independent of the batch that they scale (Lemma 1); they
are 1 in the first epoch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from tula_agent.scaling.meter import DISTURBED, NO_SMALL_BATCH, Gradients, Meter, Reading, Tapped, squares
from tula_agent.scaling.ranks import Arrival, to_host
from tula_agent.scaling.thresholds import ScalingThresholds

EPS = 1e-8  # of Algorithm 1
DEFAULT_REFRESH_STEPS = 200
"""Steps between two factors of `ags` while no epoch was reported."""


def factor_from_squares(small: torch.Tensor, large: torch.Tensor, *, s_min: float, s_max: float) -> torch.Tensor:
    """min(|g_small| / (|g_large| + eps), s_max), at least s_min (Algorithm 1, Lemma 1), from squared magnitudes.

    A ratio that is not finite (overflow) becomes 1, so that one bad probe never spoils a weight. So does the ratio of
    two zeros, which holds no information.
    """
    ratio = small.clamp(min=0.0).sqrt() / (large.clamp(min=0.0).sqrt() + EPS)
    usable = torch.isfinite(ratio) & ((small > 0.0) | (large > 0.0))
    return torch.where(usable, ratio.clamp(min=s_min, max=s_max), torch.ones_like(ratio))


@dataclass(frozen=True)
class GatedFactors:
    """Factor by parameter (None: 1; 0-d, or of its shape) and the gate (0-d: 1 where the step may be scaled)."""

    by_parameter: Gradients
    gate: torch.Tensor


def factors(small: Gradients, large: Gradients, thresholds: ScalingThresholds, ratio: float) -> Gradients:
    """Algorithm 1's factor of each parameter from the squares of g_small and g_large.

    `ratio` is B / b_small; its root is the largest factor, unless `s_max` is given.
    """
    s_max = math.sqrt(max(1.0, ratio)) if thresholds.s_max is None else thresholds.s_max
    return [
        None if part is None or whole is None else factor_from_squares(part, whole, s_min=thresholds.s_min, s_max=s_max)
        for part, whole in zip(small, large, strict=True)
    ]


class AgsPolicy:
    """Factors of the last refresh for `ags`, one number for `static`, and the gate.

    The gate reads the current reduced gradient on the device, so nothing waits for the host.
    """

    def __init__(self, meter: Meter, steps_per_epoch: int | None) -> None:
        self._meter, self._steps_per_epoch = meter, steps_per_epoch
        self._epochs_reported = False
        self._scaled = self._counted = 0.0
        self.reset()

    def reset(self) -> None:
        """The policy comes into force: drop what was reading before."""
        self._gate = SensitivityGate()
        self._arrival: Arrival | None = None
        self._known = [math.nan, math.nan, math.nan]  # squared norm, variability, gate
        self._factors: Gradients | None = None
        self._found_for: list[torch.Tensor] = []
        self._mean_factor = 1.0
        self._due = False

    def forget_factors(self) -> None:
        """Their bounds or their b_small changed: scale by 1 until they are found again, after the next step."""
        self._due = self._factors is not None
        self._factors, self._mean_factor = None, 1.0

    def next_epoch(self, step: int, thresholds: ScalingThresholds) -> None:
        """An epoch begins before step number `step`: find factors after that step, where no interval was set."""
        self._epochs_reported = True
        self._due = self._due or (step > 0 and self._every(thresholds) is None)

    def _every(self, thresholds: ScalingThresholds) -> int | None:
        default = None if self._epochs_reported else DEFAULT_REFRESH_STEPS
        return thresholds.refresh_steps or self._steps_per_epoch or default

    def wants(self, step: int, thresholds: ScalingThresholds) -> Tapped:
        """What the taps must sum during step number `step`."""
        every = self._every(thresholds)
        if every is not None and (step + 1) % every == 0:
            self._due = True
        parts = self._due and thresholds.policy == "ags" and not self._meter.probes
        return thresholds.granularity if parts else "projections"

    def factors(self, step: int, thresholds: ScalingThresholds) -> GatedFactors:  # noqa: ARG002 - as of `gain`
        """What scales this step; finds the factors of later ones when they are due."""
        self._receive()
        reading = Reading(self._meter.ranks.sum_(self._meter.measure()))
        gate = self._gate(reading.norm_sq_before_clip, thresholds.delta)
        self._arrival = to_host(torch.stack([reading.norm_sq, self._gate.variability, gate]))
        found = self._in_force(thresholds, gate.device)
        if thresholds.policy == "ags" and self._due:
            self._refresh(reading, thresholds)
        return GatedFactors(found, gate)

    def _in_force(self, thresholds: ScalingThresholds, device: torch.device) -> Gradients:
        parameters = self._meter.parameters()
        if thresholds.policy == "static":
            return [torch.full((), _static_scale(thresholds), device=device)] * len(parameters)
        # Groups may have been added, moved or removed since.
        by_parameter = dict(zip(map(id, self._found_for), self._factors or [], strict=False))
        return [by_parameter.get(id(parameter)) for parameter in parameters]

    def _refresh(self, reading: Reading, thresholds: ScalingThresholds) -> None:
        """UPDATEGRADSCALE of Algorithm 1: by a probe where the script allows one, else from ranks and micro-steps."""
        meter = self._meter
        meter.count(reading.examples)
        found: Gradients = []
        if meter.probes:
            probed = meter.probe(thresholds.small_batch_size)
            if probed is not None:
                part, whole = (self._squares(g, thresholds) for g in (probed[0], meter.gradients()))
                found = factors(part, whole, thresholds, probed[1])
        elif meter.tap.tapped != thresholds.granularity:
            return  # due since this step: the next one is tapped
        else:
            found = self._from_parts(reading, thresholds)
        self._due = False
        if not found:
            return
        self._factors, self._found_for = found, meter.parameters()
        means = [factor.double().mean() for factor in found if factor is not None]
        self._mean_factor = float(torch.stack([m.to(means[0].device) for m in means]).mean()) if means else 1.0

    def _squares(self, gradients: Gradients, thresholds: ScalingThresholds) -> Gradients:
        return [None if g is None or g.is_sparse else squares(g, thresholds.granularity) for g in gradients]

    def _from_parts(self, reading: Reading, thresholds: ScalingThresholds) -> Gradients:
        """Factors from the parts of all ranks; empty when there is one part, or when it differs from the whole.

        |g_small|^2 is the mean over parts. A b_small other than the size of a part is reached, by tensor, through
        E|g_b|^2 = |G|^2 + tr(Sigma)/b; by element the parts are used unchanged.
        """
        meter, samples = self._meter, reading.moments()[2]
        if samples < 2.0 or reading.disturbed:
            meter.warn(NO_SMALL_BATCH if samples < 2.0 else DISTURBED)
            return []
        unit = (reading.unit * samples / meter.ranks.size) ** 2
        large = [None if x is None else x / unit for x in self._squares(meter.gradients(), thresholds)]
        small: Gradients = []
        batch_ratio = meter.batch_ratio(thresholds.small_batch_size)
        for square, whole in zip(meter.tap.squares, large, strict=True):
            if whole is None:
                small.append(None)
                continue
            mean = meter.ranks.sum_(torch.zeros_like(whole) if square is None else square.clone()) / samples
            if thresholds.granularity == "tensor" and batch_ratio is not None:
                noise = ((mean - whole) / (samples - 1.0)).clamp(min=0.0)
                mean = (whole - noise).clamp(min=0.0) + noise * batch_ratio
            small.append(mean)
        return factors(small, large, thresholds, samples if batch_ratio is None else batch_ratio)

    def _receive(self) -> None:
        if self._arrival is not None:
            self._known, self._arrival = self._arrival.values(), None
            self._counted += 1.0
            self._scaled += self._known[2]

    def telemetry(self, thresholds: ScalingThresholds) -> dict[str, float]:
        """Of the last step but one; `scaled_share` over all steps."""
        return {
            "grad_norm": math.sqrt(max(self._known[0], 0.0)) if math.isfinite(self._known[0]) else math.nan,
            "gradient_variability": self._known[1],
            "scale": _static_scale(thresholds) if thresholds.policy == "static" else self._mean_factor,
            "scaled_share": self._scaled / self._counted if self._counted else 0.0,
        }

    def state(self) -> dict[str, Any]:
        """For a checkpoint: factors, the gate's last norm, and whether factors are due."""
        self._receive()
        return {
            "factors": None if self._factors is None else list(self._factors),
            "previous": self._gate.previous,
            "due": self._due,
            "epochs_reported": self._epochs_reported,
            "known": list(self._known),
            "mean_factor": self._mean_factor,
            "scaled": [self._scaled, self._counted],
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Inverse of `state`."""
        self._arrival, self._factors = None, saved["factors"]
        self._found_for = self._meter.parameters()
        if self._factors is not None:
            pairs = zip(self._factors, self._found_for, strict=True)
            self._factors = [f if f is None else f.to(p.device) for f, p in pairs]
        if saved["previous"] is not None:
            self._gate.previous = saved["previous"]
        self._due, self._epochs_reported = bool(saved["due"]), bool(saved["epochs_reported"])
        self._known, self._mean_factor = list(saved["known"]), float(saved["mean_factor"])
        self._scaled, self._counted = saved["scaled"]


def _static_scale(thresholds: ScalingThresholds) -> float:
    """Equation 8's factor within the bounds of every factor."""
    scale = max(thresholds.static_scale or 1.0, thresholds.s_min)
    return scale if thresholds.s_max is None else min(scale, thresholds.s_max)


class SensitivityGate:
    """Equation 5 without leaving the device: 1 where the step may be scaled, 0 where it is sensitive."""

    def __init__(self) -> None:
        self.previous = self.variability = torch.full((), math.nan, dtype=torch.float64)

    def __call__(self, norm_sq: torch.Tensor, delta: float) -> torch.Tensor:
        """Gate (0-d) for a step of squared gradient norm `norm_sq`; the first step counts as sensitive."""
        previous = self.previous.to(norm_sq.device)
        self.variability = ((norm_sq - previous) / previous).abs()
        # A gradient with NaN or infinity is never scaled and never becomes the norm to compare with.
        self.previous = torch.where(torch.isfinite(norm_sq), norm_sq, previous)
        return (self.variability < delta).to(norm_sq.dtype)
