"""The `gain` policy: the learning rate times a noise gain, measured at one step and used from the next.

With the policy `none` the same measurement runs at every eighth step and the factor is 1. `SpikeClip` clips gradients
that are suddenly much longer than those before them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tula_agent.scaling.context import ScalingContext
from tula_agent.scaling.noise_math import NoiseAverage, gradient_variability
from tula_agent.scaling.ranks import Arrival
from tula_agent.scaling.step_statistics import StepStatistics, decode, encode_probe, encode_tap
from tula_agent.scaling.thresholds import Granularity
from tula_agent.torch_private import foreach_mul_, norm_squared

_LOG = logging.getLogger(__name__)

DENSE_STEPS = 512  # every one of the first steps is measured, then one in eight
PROBED_STEPS = 8  # the same for probes, each of which costs a second backward
SPARSE_EVERY = 8

_KEEP = 0.9  # weight of the past in the average norm, per step
_WHOLE = 2**14  # elements up to which all of a tensor is read
_SHARE = 64
"""Of a larger tensor only the first rows are read: as many as hold _WHOLE elements or a 64th of all. Reading all would
cost percents of a step."""


@dataclass(frozen=True)
class GainRule:
    """The constants of the `gain` policy, which experiments vary; the defaults are the product's.

    The factor is r = (|G|^2 + c S/b) / (|G|^2 + c S/B) with c = `noise_weight`, at most B/b, and at most `growth` times
    the factor of the step before; it may fall at once. AdaScale is c = 1 with `growth` and `spike_limit` None. Near the
    edge of stability most of |G|^2 is oscillation rather than progress, so c = 1 scales too little; c = 4 breaks
    fragile networks unless gradients longer than `spike_limit` times the usual are clipped. The constants were chosen
    on validation data of cases that are not reported (experiments/generalization, docs/gradient-scaling.md).

    `measure_every`: steps between measurements; None: each of the first 512 (8 by a probe), then every eighth.
    Raises ValueError for a `spike_limit` that would clip every gradient.
    """

    noise_weight: float = 4.0
    growth: float | None = 1.4
    spike_limit: float | None = 2.0
    measure_every: int | None = None

    def __post_init__(self) -> None:
        if self.spike_limit is not None and not self.spike_limit > 1.0:
            raise ValueError(f"spike_limit is {self.spike_limit}: give a number above 1, or None for no limit")


class GainPolicy:
    """A factor from past steps only: independent of the batch that it scales, and never waited for."""

    def __init__(self, context: ScalingContext, rule: GainRule) -> None:
        self._context = context
        self._rule = rule
        self._spike_clip = None if rule.spike_limit is None else SpikeClip(rule.spike_limit)
        self.reset()

    def reset(self) -> None:
        """The policy comes into force: drop what was measured before."""
        if self._spike_clip is not None:
            self._spike_clip.load(None)
        self._factor = 1.0
        self._noise = NoiseAverage()
        self._samples = 1.0
        self._arrival: Arrival | None = None
        self._last: StepStatistics | None = None
        self._measured_at = [-2, -2]  # the step of `_last`, and that of the measurement in flight
        self._variability = math.nan

    @property
    def _scales(self) -> bool:
        return self._context.thresholds.policy != "none"

    def wants(self, step: int) -> Granularity | None:
        """The squares that the taps must sum during step number `step`: by tensor where it is measured, else None."""
        dense = DENSE_STEPS if self._scales else 0
        return "tensor" if self._context.source != "probe" and self._due(step, dense) else None

    def _due(self, step: int, dense: int) -> bool:
        """True when step number `step` is measured: each of the first `dense`, unless the rule names an interval."""
        return step % (self._rule.measure_every or (1 if step < dense else SPARSE_EVERY)) == 0

    def run(self, step: int, inner_step: Callable[[], None]) -> None:
        """Take the step with the gain that past steps gave."""
        self._receive()
        vector = self._measure(step)
        self._factor = self._next_factor()
        if self._spike_clip is not None and self._scales and (vector is not None or self._noise.count):
            self._spike_clip(self._context.gradients(), clip=self._factor > 1.0)
        if self._factor == 1.0:
            inner_step()
        else:
            with scaled_learning_rate(self._context.inner.param_groups, self._factor):
                inner_step()
        if vector is not None:
            self._arrival = self._context.ranks.send(vector)
            self._measured_at[1] = step

    def _next_factor(self) -> float:
        """min(max(r, s_min), s_max), s_max = B / b_small unless given; 1 until something was measured."""
        if not self._scales or not self._noise.count:
            return 1.0
        thresholds = self._context.thresholds
        ratio = self._context.batch_ratio or self._samples
        ceiling = ratio if thresholds.s_max is None else thresholds.s_max
        gain = self._noise.gain(ratio, self._rule.noise_weight)
        if self._rule.growth is not None:
            gain = min(gain, self._factor * self._rule.growth)
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
        self._context.count(statistics.examples)
        before, now = self._measured_at
        # Equation 5 compares a step with the one before it: unknown where only one in eight is measured.
        self._variability = math.nan
        if self._last is not None and now == before + 1:
            self._variability = gradient_variability(statistics.gradient_norm**2, self._last.gradient_norm**2)
        self._last, self._measured_at[0] = statistics, now

    def _measure(self, step: int) -> torch.Tensor | None:
        context = self._context
        if context.tap.armed and (context.ranks.size > 1 or context.tap.parts >= 2):
            return encode_tap(
                context.tap,
                context.gradients(),
                context.portion(),
                context.ranks.size,
                context.device,
                context.observed,
            )
        if not self._scales or (context.source != "probe" and not context.tap.armed):
            return None  # between two measured steps a probe would cost a second backward
        if not context.may_probe:
            if step == 0 and context.ranks.size == 1:
                _LOG.warning(
                    "gradient scaling stays at 1: with one rank and no accumulation there is no small-batch gradient; "
                    "accumulate micro-steps, or give TulaOptimizer model= and loss= and call observe_batch"
                )
            return None
        if not self._due(step, PROBED_STEPS):
            return None
        probed = context.probe()
        if probed is None:
            return None
        return encode_probe(probed[0], context.gradients(), probed[1], context.ranks.size, context.observed)

    def telemetry(self) -> dict[str, float]:
        """Of the last measured step; the noise scale in examples where B is known, else in batches."""
        batch = float(self._context.batch_size or 1)
        return {
            "grad_norm": math.nan if self._last is None else self._last.gradient_norm,
            "gradient_variability": self._variability,
            "scale": self._factor,
            "scaled_share": float(self._factor != 1.0),
            "gradient_noise_scale": self._noise.noise_scale_over_batch * batch,
        }

    def state(self) -> dict[str, Any]:
        """For a checkpoint: averages, and the measurement in flight (waited for here)."""
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
            "usual_norm": None if self._spike_clip is None else self._spike_clip.state(),
            "batch_size": self._context.batch_size,
            "last_count": self._context.last_count,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Inverse of `state`."""
        self._noise.load(state["noise"])
        before, now = state["batch_size"], self._context.batch_size
        if now is None:
            self._context.counted_batch_size = before
            self._context.last_count = int(state.get("last_count", 0))
        elif before:  # S/B is kept per batch: a job resumed with another batch keeps its S
            self._noise.change_batch(now / before)
        self._samples = float(state["samples"])
        arrival, last = state["arrival"], state["last"]
        self._arrival = None if arrival is None else Arrival(torch.tensor(arrival, dtype=torch.float64))
        self._last = None if last is None else StepStatistics(*last)
        self._measured_at = list(state.get("measured_at", [-2, -2]))
        self._variability = float(state["variability"])
        self._factor = float(state["factor"])
        if self._spike_clip is not None:
            self._spike_clip.load(state.get("usual_norm"))


@contextmanager
def scaled_learning_rate(groups: list[dict[str, Any]], factor: float) -> Iterator[None]:
    """Every group's learning rate times `factor` inside the block; restored exactly even if the step raises.

    For SGD, Adam and their variants the update is linear in the learning rate, so this scales the update, decoupled
    weight decay included, without touching a tensor.
    """
    kept = [group["lr"] for group in groups]
    # One tensor given to an optimizer becomes the rate of every group without its own.
    tensors = {id(rate): rate for rate in kept if isinstance(rate, torch.Tensor)}
    values = {key: rate.clone() for key, rate in tensors.items()}
    try:
        for rate in tensors.values():
            rate.mul_(factor)
        for group in groups:
            if not isinstance(group["lr"], torch.Tensor):
                group["lr"] = group["lr"] * factor
        yield
    finally:
        for key, rate in tensors.items():
            rate.copy_(values[key])
        for group, rate in zip(groups, kept, strict=True):
            group["lr"] = rate


class SpikeClip:
    """g <- g * min(1, limit * usual / |g|), where `usual` is the moving average (0.9) of |g| after clipping.

    |g| covers a fixed part of each large tensor: it is only compared with its own past.

    A gain above 1 makes a bad step worse: without normalization layers the norm can grow a hundredfold within three
    steps, which no average of the past predicts. A limit on the step itself prevents it. All ranks hold the bits that
    the all-reduce gave them, so all compute the same factor, as with torch's `clip_grad_norm_`.
    A gradient with NaN or infinity, or of zeros only, stays unchanged and does not enter the average.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._usual: torch.Tensor | None = None

    def __call__(self, gradients: Sequence[torch.Tensor | None], *, clip: bool) -> None:
        """Update the average norm and, with `clip`, clip in place; sparse gradients are neither read nor clipped."""
        dense = [g for g in gradients if g is not None and not g.is_sparse]
        if not dense:
            return
        norm = norm_squared([_part_read(g) for g in dense]).sqrt()
        usual = torch.zeros_like(norm) if self._usual is None else self._usual.to(norm.device)
        finite, known = torch.isfinite(norm), usual > 0.0
        counts = finite & (norm > 0.0)  # steps of zeros would drive the average to 0 and freeze the steps after them
        allowed = torch.where(known, self._limit * usual, norm) if clip else norm
        taken = torch.minimum(norm, allowed)
        blended = torch.where(known, _KEEP * usual + (1.0 - _KEEP) * taken, taken)
        self._usual = torch.where(counts, blended, usual)
        too_long = finite & (norm > allowed)
        if not clip or (norm.is_cpu and not bool(too_long)):
            return  # on the CPU reading the flag is free, multiplying by 1 is not
        factor = torch.where(too_long, allowed / norm, torch.ones_like(norm))
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for gradient in dense:
            by_device.setdefault(gradient.device, []).append(gradient)
        for device, group in by_device.items():
            foreach_mul_(group, factor.to(device, torch.float32))

    def state(self) -> torch.Tensor | None:
        """For a checkpoint."""
        return self._usual

    def load(self, usual: torch.Tensor | None) -> None:
        """Inverse of `state`."""
        self._usual = usual


def _part_read(gradient: torch.Tensor) -> torch.Tensor:
    """The first rows of `gradient`: a view in any memory format."""
    elements = gradient.numel()
    if elements <= _WHOLE:
        return gradient
    rows = gradient.shape[0]
    return gradient.narrow(0, 0, min(rows, -(-rows * max(_WHOLE, elements // _SHARE) // elements)))
