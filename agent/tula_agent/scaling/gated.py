"""The policies with a sensitivity gate: `ags` (Algorithm 1) and `static` (equation 8)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch

from tula_agent.scaling.ags import Gate, factors_from_probe, factors_from_tap
from tula_agent.scaling.factors import apply_to_gradients, apply_to_updates, norm_squared
from tula_agent.scaling.ranks import Arrival, to_host
from tula_agent.scaling.site import Site
from tula_agent.scaling.thresholds import Granularity

__all__ = ["Gated"]

_UNTOLD_EPOCH_STEPS = 200  # refresh of `ags` while nobody says where epochs begin


class Gated:
    """Scales every step that is not sensitive, by the factors of the last refresh.

    The gate reads the current reduced gradient on the device, so nothing waits for the host.
    """

    def __init__(self, site: Site, target: Literal["gradient", "update"], steps_per_epoch: int | None) -> None:
        self._site = site
        self._target = target
        self.steps_per_epoch = steps_per_epoch
        self._told, self._last_refresh = False, 0
        self._constants: dict[tuple[float, str], torch.Tensor] = {}
        self._scaled = self._counted = 0.0
        self.begin()

    def begin(self) -> None:
        """From now on this policy is in force; what it knew of an earlier time tells nothing about this one."""
        self._gate = Gate()
        self._arrival: Arrival | None = None
        self._known = [math.nan, math.nan, math.nan]  # squared norm, variability, gate
        self.forget_factors()

    def forget_factors(self) -> None:
        """Their bounds or their b_small changed: scale by 1 until they are found anew."""
        self._factors: list[torch.Tensor | None] | None = None
        self._mean_factor = 1.0
        self._due = True

    def next_epoch(self) -> None:
        """An epoch begins: refresh at its first step, unless a number of steps was asked for."""
        self._told = True
        if self._site.thresholds.refresh_steps is None:
            self._due = True

    def wants(self, step: int) -> Granularity | None:
        """The parts' squares at a refresh."""
        thresholds = self._site.thresholds
        if thresholds.policy != "ags":
            return None
        every = thresholds.refresh_steps or self.steps_per_epoch or (None if self._told else _UNTOLD_EPOCH_STEPS)
        if every is not None and step - self._last_refresh >= every:
            self._due = True
        return thresholds.granularity if self._due and self._site.source != "probe" else None

    def run(self, step: int, inner_step: Callable[[], None]) -> None:
        """Refresh when due, decide whether the step is sensitive, scale, step."""
        self._receive()
        gradients = self._site.gradients()
        device = next((g.device for g in gradients if g is not None), None)
        if device is None:
            inner_step()
            return
        mine = [g for g, own in zip(gradients, self._site.portion(), strict=True) if g is not None and own]
        share = norm_squared(mine).to(device) if mine else torch.zeros((), dtype=torch.float64, device=device)
        norm_sq, examples = self._site.ranks.sum_(torch.stack([share, torch.full_like(share, self._site.observed)]))
        gate = self._gate(norm_sq, self._site.thresholds.delta)
        if self._site.thresholds.policy == "ags" and self._due:
            self._refresh(step, gradients, examples)
        self._scaled_step(gradients, gate, inner_step)
        variability = self._gate.variability if self._gate.variability is not None else norm_sq
        self._arrival = to_host(torch.stack([norm_sq, variability, gate]))

    def _refresh(self, step: int, gradients: list[torch.Tensor | None], examples: torch.Tensor) -> None:
        site = self._site
        found = None
        if site.source != "probe":
            if not site.tap.armed:
                return  # it has only just become due: the next step is tapped, and costs no second backward
            if site.global_batch_size is None:
                site.counted(float(examples))
            ratio = site.batch_ratio
            found = factors_from_tap(site.tap, gradients, site.thresholds, ranks=site.ranks, batch_ratio=ratio)
        if found is None and site.may_probe:
            probed = site.probe()
            if probed is not None:
                factors = factors_from_probe(probed[0], gradients, site.thresholds, batch_ratio=probed[1])
                found = factors, probed[1]
        if found is None:
            return
        self._factors = found[0]
        self._due, self._last_refresh = False, step
        means = [factor.double().mean() for factor in self._factors if factor is not None]
        self._mean_factor = float(torch.stack([m.to(means[0].device) for m in means]).mean()) if means else 1.0

    def _scaled_step(
        self, gradients: list[torch.Tensor | None], gate: torch.Tensor, inner_step: Callable[[], None]
    ) -> None:
        parameters = self._site.parameters()
        chosen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            factor = self._factor(index, parameter)
            if factor is not None and gradient is not None and not gradient.is_sparse:
                chosen.append((parameter, gradient, factor))
        factors = [factor for _, _, factor in chosen]
        if self._target == "gradient":
            apply_to_gradients([gradient for _, gradient, _ in chosen], factors, gate)
            inner_step()
            return
        before = [parameter.detach().clone() for parameter, _, _ in chosen]
        inner_step()
        with torch.no_grad():
            apply_to_updates([parameter for parameter, _, _ in chosen], before, factors, gate)

    def _factor(self, index: int, parameter: torch.Tensor) -> torch.Tensor | None:
        thresholds = self._site.thresholds
        if thresholds.policy == "static":
            return self._constant(self._static_scale, parameter.device)
        if self._factors is None or index >= len(self._factors):
            return None
        return self._factors[index]

    @property
    def _static_scale(self) -> float:
        """Equation 8's factor within the bounds of every factor."""
        thresholds = self._site.thresholds
        scale = max(thresholds.static_scale, thresholds.s_min)
        return scale if thresholds.s_max is None else min(scale, thresholds.s_max)

    def _constant(self, scale: float, device: torch.device) -> torch.Tensor:
        """`scale` on `device`, made once: a fresh tensor per parameter and step would cost as many transfers."""
        key = scale, str(device)
        if key not in self._constants:
            self._constants = {key: torch.full((), scale, device=device)} | {
                k: v for k, v in self._constants.items() if k[0] == scale
            }
        return self._constants[key]

    def _receive(self) -> None:
        if self._arrival is not None:
            self._known = self._arrival.values()
            self._arrival = None
            self._counted += 1.0
            self._scaled += self._known[2]

    def telemetry(self) -> dict[str, float]:
        """Of the last step but one; `scaled_share` over all steps."""
        policy = self._site.thresholds.policy
        return {
            "grad_norm": math.sqrt(max(self._known[0], 0.0)) if math.isfinite(self._known[0]) else math.nan,
            "gradient_variability": self._known[1],
            "scale": self._static_scale if policy == "static" else self._mean_factor,
            "scaled_share": self._scaled / self._counted if self._counted else 0.0,
        }

    def state(self) -> dict[str, Any]:
        """Factors, the gate's memory and when to refresh."""
        self._receive()
        return {
            "factors": None if self._factors is None else list(self._factors),
            "previous": self._gate.previous,
            "due": self._due,
            "told": self._told,
            "last_refresh": self._last_refresh,
            "known": list(self._known),
            "mean_factor": self._mean_factor,
            "scaled": [self._scaled, self._counted],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Inverse of `state`."""
        devices = [parameter.device for parameter in self._site.parameters()]
        factors = state["factors"]
        if factors is not None:
            factors = [f if f is None else f.to(d) for f, d in zip(factors, devices, strict=True)]
        self._factors = factors
        self._gate.previous = state["previous"]
        self._due, self._told, self._last_refresh = state["due"], state["told"], int(state["last_refresh"])
        self._known = list(state["known"])
        self._mean_factor = float(state["mean_factor"])
        self._scaled, self._counted = state["scaled"]
