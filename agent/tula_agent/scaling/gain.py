"""The `gain` policy: the learning rate times a noise gain, measured at one step and used from the next."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch

from tula_agent.scaling.measurement import StepStatistics, decode, encode_probe, encode_tap
from tula_agent.scaling.noise import NoiseAverage
from tula_agent.scaling.policy import gradient_variability
from tula_agent.scaling.ranks import Arrival
from tula_agent.scaling.site import Site
from tula_agent.scaling.spikes import SpikeLimit
from tula_agent.scaling.thresholds import Granularity
from tula_agent.scaling.updates import scaled_learning_rate

__all__ = ["DENSE_STEPS", "PROBED_STEPS", "SPARSE_EVERY", "Gain"]

_LOG = logging.getLogger(__name__)

DENSE_STEPS = 512  # every one of the first steps is measured, then one in eight
PROBED_STEPS = 8  # the same of probes, each of which costs a second backward
SPARSE_EVERY = 8


class Gain:
    """A factor from the past only: independent of the batch it scales, and never waited for.

    r = (|G|^2 + c S/b) / (|G|^2 + c S/B), at most B/b, and at most `growth` times the factor of the step before, while
    it may fall at once. AdaScale is c = `noise_weight` = 1 without that limit. Near the edge of stability most of
    |G|^2 is oscillation rather than progress, so that c = 1 scales too little; c = 4 breaks fragile networks unless
    `spike_limit` holds back the steps that do it. Averages, c and both limits were chosen on validation data of cases
    that are not reported (experiments/generalization, docs/gradient-scaling.md).
    """

    def __init__(
        self,
        site: Site,
        measure_every: int | None,
        noise_weight: float,
        growth: float | None,
        spike_limit: float | None,
    ) -> None:
        self._site = site
        self._spikes = None if spike_limit is None else SpikeLimit(spike_limit)
        self._measure_every = measure_every
        self._noise_weight, self._growth = noise_weight, growth
        self.begin()

    def begin(self) -> None:
        """From now on this policy is in force; what it knew of an earlier time tells nothing about this one."""
        if self._spikes is not None:
            self._spikes.load(None)
        self._factor = 1.0
        self._noise = NoiseAverage()
        self._samples = 1.0
        self._arrival: Arrival | None = None
        self._last: StepStatistics | None = None
        self._measured_at = [-2, -2]  # the step of `_last`, and that of the measurement on its way
        self._variability = math.nan

    def wants(self, step: int) -> Granularity | None:
        """The whole gradient's squares at every measured step."""
        return "tensor" if self._site.source != "probe" and self._due(step, DENSE_STEPS) else None

    def _due(self, step: int, dense: int) -> bool:
        """True when step number `step` is to be measured: the first `dense` all are, unless a number was asked for."""
        return step % (self._measure_every or (1 if step < dense else SPARSE_EVERY)) == 0

    def run(self, step: int, inner_step: Callable[[], None]) -> None:
        """Take the step with the gain that the steps before it gave."""
        self._receive()
        vector = self._measure(step)
        self._factor = self._next_factor()
        if self._spikes is not None and (vector is not None or self._noise.count):
            self._spikes(self._site.gradients(), shorten=self._factor > 1.0)
        if self._factor == 1.0:
            inner_step()
        else:
            with scaled_learning_rate(self._site.inner.param_groups, self._factor):
                inner_step()
        if vector is not None:
            self._arrival = self._site.ranks.send(vector)
            self._measured_at[1] = step

    def _next_factor(self) -> float:
        """min(max(r, s_min), s_max), s_max = B / b_small unless named; 1 until something was measured."""
        if not self._noise.count:
            return 1.0
        thresholds = self._site.thresholds
        ratio = self._site.batch_ratio or self._samples
        ceiling = ratio if thresholds.s_max is None else thresholds.s_max
        gain = self._noise.gain(ratio, self._noise_weight)
        if self._growth is not None:
            gain = min(gain, self._factor * self._growth)
        return min(max(gain, thresholds.s_min), ceiling)

    def _receive(self) -> None:
        if self._arrival is None:
            return
        statistics = decode(self._arrival.values())
        self._arrival = None
        if statistics is None or not self._noise.update(
            statistics.small_norm_sq, statistics.large_norm_sq, statistics.samples
        ):
            return
        self._samples = statistics.samples
        self._site.counted(statistics.examples)
        before, now = self._measured_at
        # Equation 5 compares a step with the one before it, and most are not measured later on.
        self._variability = math.nan
        if self._last is not None and now == before + 1:
            self._variability = gradient_variability(statistics.gradient_norm**2, self._last.gradient_norm**2)
        self._last, self._measured_at[0] = statistics, now

    def _measure(self, step: int) -> torch.Tensor | None:
        site = self._site
        if site.tap.armed and (site.ranks.size > 1 or site.tap.parts >= 2):
            return encode_tap(site.tap, site.gradients(), site.portion(), site.ranks.size, site.device, site.observed)
        if site.source != "probe" and not site.tap.armed:
            return None  # between two measured steps: nothing was tapped, and nothing is to be probed instead
        if not site.may_probe:
            if step == 0 and site.ranks.size == 1:
                _LOG.warning(
                    "gradient scaling stays at 1: with one rank and no accumulation there is no small-batch gradient; "
                    "accumulate micro-steps, or give TulaOptimizer model= and loss= and call observe_batch"
                )
            return None
        if not self._due(step, PROBED_STEPS):
            return None
        probed = site.probe()
        if probed is None:
            return None
        return encode_probe(probed[0], site.gradients(), probed[1], site.ranks.size, site.observed)

    def telemetry(self) -> dict[str, float]:
        """Of the last measured step; the noise scale in examples where B is known, else in batches."""
        batch = float(self._site.batch_size or 1)
        return {
            "grad_norm": math.nan if self._last is None else self._last.gradient_norm,
            "gradient_variability": self._variability,
            "scale": self._factor,
            "scaled_share": float(self._factor != 1.0),
            "gradient_noise_scale": self._noise.noise_scale_over_batch * batch,
        }

    def state(self) -> dict[str, Any]:
        """Averages, and the measurement on its way (waited for here)."""
        arrival = None if self._arrival is None else self._arrival.values()
        last = None if self._last is None else [*vars(self._last).values()]
        return {
            "noise": self._noise.state(),
            "samples": self._samples,
            "arrival": arrival,
            "last": last,
            "measured_at": list(self._measured_at),
            "variability": self._variability,
            "factor": self._factor,
            "usual_norm": None if self._spikes is None else self._spikes.state(),
            "batch_size": self._site.batch_size,
            "last_count": self._site.last_count,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Inverse of `state`."""
        self._noise.load(state["noise"])
        before, now = state["batch_size"], self._site.batch_size
        if now is None:
            self._site.seen_batch_size = before
            self._site.last_count = int(state.get("last_count", 0))
        elif before:  # S/B is kept per batch: a job that goes on with another batch keeps its S
            self._noise.change_batch(now / before)
        self._samples = float(state["samples"])
        arrival, last = state["arrival"], state["last"]
        self._arrival = None if arrival is None else Arrival(torch.tensor(arrival, dtype=torch.float64))
        self._last = None if last is None else StepStatistics(*last)
        self._measured_at = list(state.get("measured_at", [-2, -2]))
        self._variability = float(state["variability"])
        self._factor = float(state["factor"])
        if self._spikes is not None:
            self._spikes.load(state.get("usual_norm"))
