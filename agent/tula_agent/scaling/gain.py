"""The `gain` policy: the learning rate times a noise gain, measured at one step and used from the next.

With the policy `measure` the same measurement runs at the first 128 steps and at every eighth after them, and the
factor is 1. `SpikeClip` clips gradients that are suddenly much longer than those before them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tula_agent.scaling.meter import DISTURBED, NO_SMALL_BATCH, Meter, Reading, Tapped
from tula_agent.scaling.ranks import Arrival
from tula_agent.scaling.thresholds import ScalingThresholds
from tula_agent.torch_private import foreach_mul_, norm_squared
from tula_wire.bounds import NOISE_WEIGHT

DENSE_STEPS = 512  # every one of the first steps is measured, then one in eight
MEASURE_DENSE_STEPS = 128  # of the policy `measure`: a launch of three batches has at most 105 steps
SPARSE_EVERY = 8

PLAIN = (torch.optim.SGD, torch.optim.ASGD)
"""Optimizers whose update is proportional to the gradient; others divide by its size, as Adam."""

_KEEP = 0.9  # weight of the past in the average norm, per step
_SLOW, _FAST = 0.9, 0.5  # of averages over measured steps
_WHOLE = 2**14  # elements up to which all of a tensor is read
_SHARE = 64
"""Of a larger tensor only the first rows are read: as many as hold _WHOLE elements or a 64th of all. Reading all would
cost percents of a step."""


def gradient_variability(norm_sq: float, previous_norm_sq: float) -> float:
    """Delta(G_i) = | (|G_i|^2 - |G_{i-1}|^2) / |G_{i-1}|^2 | (equation 5); infinite when the last gradient was zero."""
    if previous_norm_sq <= 0.0:
        return math.inf if norm_sq > 0.0 else 0.0
    return abs((norm_sq - previous_norm_sq) / previous_norm_sq)


def noise_moments(small_norm_sq: float, large_norm_sq: float, samples: float) -> tuple[float, float]:
    """|G|^2 and tr(Sigma)/B without bias, from gradients of two sizes (McCandlish et al. 2018, appendix A.1).

    `small_norm_sq`: mean of |g_i|^2 over `samples` parts of the batch; `large_norm_sq`: |mean of g_i|^2.
    Either may be negative on one step: average over steps before taking a ratio.
    """
    noise = (small_norm_sq - large_norm_sq) / (samples - 1.0)
    return large_norm_sq - noise, noise


def noise_gain(signal: float, noise: float, batch_ratio: float) -> float:
    """AdaScale's gain r = (|G|^2 + S/b) / (|G|^2 + S/B), in [1, B/b] (Johnson et al. 2020, equation 6).

    `signal` = |G|^2, `noise` = S/B, `batch_ratio` = B/b; negative estimates count as zero.
    """
    signal, noise = max(signal, 0.0), max(noise, 0.0)
    if signal + noise <= 0.0 or not math.isfinite(signal + noise):
        return 1.0
    gain = (signal + noise * batch_ratio) / (signal + noise)
    return min(max(gain, 1.0), batch_ratio)  # rounding of subnormal estimates may step outside


@dataclass
class NoiseAverage:
    """Exponential averages over measured steps; plain floats, equal on all ranks.

    `signal`, `noise`: |G|^2 and S/B with decay 0.9, for the noise scale. `slow`, `fast`: the share of noise in a step's
    |g|^2, with decays 0.9 and 0.5, for the gain. Every step has the same weight in an average of shares. A ratio of
    averaged norms depends on the few longest gradients, for dozens of steps after a spike or a decay of the learning
    rate.
    """

    signal: float = 0.0
    noise: float = 0.0
    slow: float = 0.0
    fast: float = 0.0
    count: int = 0

    def update(self, small_norm_sq: float, large_norm_sq: float, samples: float) -> bool:
        """Add one measured step; False when its numbers are unusable (infinite, empty, a single part)."""
        if samples <= 1.0 or not math.isfinite(small_norm_sq + large_norm_sq) or large_norm_sq <= 0.0:
            return False
        signal, noise = noise_moments(small_norm_sq, large_norm_sq, samples)
        share = min(max(noise / large_norm_sq, 0.0), 1.0)
        slow, fast = (_SLOW, _FAST) if self.count else (0.0, 0.0)
        self.signal = slow * self.signal + (1.0 - slow) * signal
        self.noise = slow * self.noise + (1.0 - slow) * noise
        self.slow = slow * self.slow + (1.0 - slow) * share
        self.fast = fast * self.fast + (1.0 - fast) * share
        self.count += 1
        return True

    def gain(self, batch_ratio: float, noise_weight: float = 1.0) -> float:
        """AdaScale's gain for `batch_ratio` = B / b_small, with the noise times `noise_weight`; 1 without data.

        Uses the lower of the two shares: the gain falls as soon as gradients begin to agree, and rises slowly.
        """
        share = min(self.slow, self.fast)
        return noise_gain(1.0 - share, noise_weight * share, batch_ratio) if self.count else 1.0

    def change_batch(self, factor: float) -> None:
        """The global batch is now `factor` times as large: noise falls in proportion."""
        self.noise /= factor
        for name in ("slow", "fast"):
            noise = getattr(self, name) / factor
            setattr(self, name, noise / (1.0 - getattr(self, name) + noise))

    @property
    def noise_scale_over_batch(self) -> float:
        """tr(Sigma) / |G|^2 in units of the global batch B; NaN without data, infinite without a positive |G|^2."""
        if not self.count:
            return math.nan
        return max(self.noise, 0.0) / self.signal if self.signal > 0.0 else math.inf


@dataclass(frozen=True)
class GainRule:
    """The constants of the `gain` policy, which experiments vary; the defaults are the product's.

    The factor is r = (|G|^2 + c S/b) / (|G|^2 + c S/B) with c = `noise_weight`, at most B/b, to the power 1 for SGD and
    `adaptive_power` for optimizers that divide by the gradient's own size, and at most `growth` times the factor of the
    step before; it may fall at once. AdaScale's factor is c = 1 with `growth` and `spike_limit` None. Near the edge of
    stability most of |G|^2 is oscillation rather than progress, so c = 1 scales too little; c = 4 breaks fragile
    networks unless gradients longer than `spike_limit` times the usual are clipped, and a factor that grows faster than
    by a tenth a step those with batch normalization. The constants were chosen on validation data of cases that are not
    reported (experiments/generalization/README.md).

    `measure_every`: steps between measurements; None: each of the first 512, then every eighth.
    Raises ValueError for a `spike_limit` that would clip every gradient.
    """

    noise_weight: float = NOISE_WEIGHT
    growth: float | None = 1.1
    spike_limit: float | None = 2.0
    adaptive_power: float = 0.5
    measure_every: int | None = None

    def __post_init__(self) -> None:
        if self.spike_limit is not None and not self.spike_limit > 1.0:
            raise ValueError(f"spike_limit is {self.spike_limit}: give a number above 1, or None for no limit")


@dataclass
class GainState:
    """What past steps showed; equal on all ranks.

    `samples`, `norm`: B / b and |G| of the last reading, of step `measured_at`. `variability`: equation 5.
    """

    noise: NoiseAverage
    factor: float = 1.0
    samples: float = 1.0
    norm: float = math.nan
    measured_at: int = -2
    variability: float = math.nan


class GainPolicy:
    """A factor from past steps only: independent of the batch that it scales, and never waited for."""

    def __init__(self, meter: Meter, rule: GainRule) -> None:
        self._meter, self._rule = meter, rule
        self._clip = None if rule.spike_limit is None else SpikeClip(rule.spike_limit)
        self.reset()

    def reset(self) -> None:
        """The policy comes into force: drop what was measured before."""
        if self._clip is not None:
            self._clip.usual = None
        self._state = GainState(NoiseAverage())
        self._arrival: Arrival | None = None
        self._sent_at = -2

    def wants(self, step: int, thresholds: ScalingThresholds) -> Tapped | None:
        """What the taps must sum during step number `step`."""
        dense = MEASURE_DENSE_STEPS if thresholds.policy == "measure" else DENSE_STEPS
        return None if step % (self._rule.measure_every or (1 if step < dense else SPARSE_EVERY)) else "tensor"

    def factors(self, step: int, thresholds: ScalingThresholds) -> float:
        """The learning rate's factor at this step, from steps before it; measures this one and clips its spike."""
        self._receive()
        measurement = self._measure(thresholds)
        factor = self._state.factor = self._factor(thresholds)
        scales = thresholds.policy != "measure"
        if self._clip is not None and scales and (measurement is not None or self._state.noise.count):
            self._clip(self._meter.gradients(), clip=factor > 1.0)
        if measurement is not None:
            self._arrival, self._sent_at = self._meter.ranks.send(measurement), step
        return factor

    def _factor(self, thresholds: ScalingThresholds) -> float:
        """min(max(r^power, s_min), s_max), s_max = B / b_small unless given; 1 until something was measured."""
        rule, state = self._rule, self._state
        if thresholds.policy == "measure" or not state.noise.count:
            return 1.0
        ratio = self._meter.batch_ratio(thresholds.small_batch_size) or state.samples
        power = 1.0 if isinstance(self._meter.inner, PLAIN) else rule.adaptive_power
        gain: float = state.noise.gain(ratio, rule.noise_weight) ** power
        if rule.growth is not None:
            gain = min(gain, state.factor * rule.growth)
        return min(max(gain, thresholds.s_min), ratio if thresholds.s_max is None else thresholds.s_max)

    def _receive(self) -> None:
        """Take up the reading that was sent at an earlier step."""
        if self._arrival is None:
            return
        values, self._arrival = self._arrival.values(), None
        reading = Reading(torch.tensor(values, dtype=torch.float64))
        if reading.disturbed:
            self._meter.warn(DISTURBED)
            return
        state, moments, before = self._state, reading.moments(), self._meter.batch_size
        self._meter.count(reading.examples)
        now = self._meter.batch_size
        if before and now and now != before:  # as in a launch that measures several batches
            state.noise.change_batch(now / before)
        if not state.noise.update(*moments):
            return
        # Equation 5 compares a step with the one before it: unknown where only one in eight is measured.
        norm, follows = math.sqrt(float(reading.norm_sq)), self._sent_at == state.measured_at + 1
        state.variability = gradient_variability(norm**2, state.norm**2) if follows else math.nan
        state.samples, state.norm, state.measured_at = moments[2], norm, self._sent_at

    def _measure(self, thresholds: ScalingThresholds) -> torch.Tensor | None:
        """The step's measurement, to be summed over ranks."""
        meter = self._meter
        if meter.tap.tapped is None:
            return None
        if meter.ranks.size > 1 or meter.tap.parts >= 2:
            return meter.measure()
        if thresholds.policy == "gain":
            meter.warn(NO_SMALL_BATCH)
        return None

    def telemetry(self, thresholds: ScalingThresholds) -> dict[str, float]:  # noqa: ARG002 - as of `ags`
        """Of the last measured step; the noise scale in examples where B is known, else in batches."""
        state = self._state
        return {
            "grad_norm": state.norm,
            "gradient_variability": state.variability,
            "scale": state.factor,
            "scaled_share": float(state.factor != 1.0),
            "gradient_noise_scale": state.noise.noise_scale_over_batch * float(self._meter.batch_size or 1),
        }

    def state(self) -> dict[str, Any]:
        """For a checkpoint: averages, and the measurement in flight (waited for here)."""
        return {
            "seen": asdict(self._state),
            "arrival": None if self._arrival is None else self._arrival.values(),
            "sent_at": self._sent_at,
            "usual_norm": None if self._clip is None else self._clip.usual,
            "batch_size": self._meter.batch_size,
            "last_count": self._meter.last_count,
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Inverse of `state`."""
        seen, arrival = saved["seen"], saved["arrival"]
        state = self._state = GainState(**{**seen, "noise": NoiseAverage(**seen["noise"])})
        before, now = saved["batch_size"], self._meter.batch_size
        if now is None:
            self._meter.counted_batch_size, self._meter.last_count = before, saved["last_count"]
        elif before:  # S/B is kept per batch: a job resumed with another batch keeps its S
            state.noise.change_batch(now / before)
        self._arrival = None if arrival is None else Arrival(torch.tensor(arrival, dtype=torch.float64))
        self._sent_at = saved["sent_at"]
        if self._clip is not None:
            self._clip.usual = saved["usual_norm"]


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
        self.usual: torch.Tensor | None = None

    def __call__(self, gradients: Sequence[torch.Tensor | None], *, clip: bool) -> None:
        """Update the average norm and, with `clip`, clip in place; sparse gradients are neither read nor clipped."""
        dense = [g for g in gradients if g is not None and not g.is_sparse]
        if not dense:
            return
        norm = norm_squared([_part_read(g) for g in dense]).sqrt()
        usual = torch.zeros_like(norm) if self.usual is None else self.usual.to(norm.device)
        finite, known = torch.isfinite(norm), usual > 0.0
        counts = finite & (norm > 0.0)  # steps of zeros would drive the average to 0 and freeze the steps after them
        allowed = torch.where(known, self._limit * usual, norm) if clip else norm
        taken = torch.minimum(norm, allowed)
        blended = torch.where(known, _KEEP * usual + (1.0 - _KEEP) * taken, taken)
        self.usual = torch.where(counts, blended, usual)
        too_long = finite & (norm > allowed)
        if not clip or (norm.is_cpu and not bool(too_long)):
            return  # on the CPU reading the flag is free, multiplying by 1 is not
        factor = torch.where(too_long, allowed / norm, torch.ones_like(norm))
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for gradient in dense:
            by_device.setdefault(gradient.device, []).append(gradient)
        for device, group in by_device.items():
            foreach_mul_(group, factor.to(device, torch.float32))


def _part_read(gradient: torch.Tensor) -> torch.Tensor:
    """The first rows of `gradient`: a view in any memory format."""
    elements = gradient.numel()
    if elements <= _WHOLE:
        return gradient
    rows = gradient.shape[0]
    return gradient.narrow(0, 0, min(rows, -(-rows * max(_WHOLE, elements // _SHARE) // elements)))
