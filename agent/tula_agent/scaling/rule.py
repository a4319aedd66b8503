"""Implements the `gain` policy, which multiplies the learning rate by a noise gain measured in earlier steps.

    r = (|G|^2 + c S/b) / (|G|^2 + c S/B),   c = 4,   in [1, B/b]

The learning rate is multiplied by r or, under Adam, by the square root of r; this factor is at most 1.1 times the
previous step's factor. Under torch's SGD, in a network with batch normalization and B/b below 4, the factor grows by
at most (B/b)^(B/(88 b)) per step, so that it reaches B/b after 88 base batches at the earliest. With c = 1, r is
AdaScale's gain (Johnson et al. 2020, equation 6). `Measure` performs the same measurement with a factor of 1.
`SpikeClip` clips gradients whose norm is suddenly much larger than earlier norms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tula_agent.scaling.direction import NORMALIZED_UP_TO, Directions
from tula_agent.scaling.noise import NoiseAverage, gradient_variability, is_usable
from tula_agent.scaling.policies import Gain, Numbers
from tula_agent.scaling.ranks import AsyncReduction
from tula_agent.scaling.statistics import DISTURBED, NO_SMALL_BATCH, GradientStatistics
from tula_agent.scaling.taps import TapMode
from tula_agent.torch_private import foreach_mul_, norm_squared, wide_dtype

STATE_SIZE = 13  # length of `GainRule.state` without the numbers for the parameters
DENSE_STEPS = 512  # each of the first steps is measured, then every eighth
MEASURE_DENSE_STEPS = 128  # for policy `measure`; a launch of three batch sizes has at most 105 steps
SPARSE_EVERY = 8
NORMALIZED_RAMP = 88.0
"""Number of base batches of examples before the factor may reach B / b, with batch normalization and B / b below 4.

On one of seven development cases at twice the base batch, a growth of 1.1 cost 1.6 points, and no other difference was
significant. At 4 times the base batch, a slower growth made no difference on development cases.
"""

PLAIN = (torch.optim.SGD, torch.optim.ASGD)
"""Optimizers whose update is proportional to the gradient; other optimizers, such as Adam, divide by its size."""

CLIPPED_OFTEN = (
    "in more than one step in ten, the gradient norm is far above its usual value (for example, because tasks "
    "alternate), so gradients are clipped: to turn clipping off, use policy=tula_agent.scaling.Gain(spike_limit=None)"
)
LEFT_OUT = (
    "the steps of the largest matrices keep the direction of the gradient, because turning all steps would take more "
    "than a twentieth of a step's operations; with a larger batch, more steps can be turned"
)

_KEEP = 0.9  # decay of the average norm, per step, and of a matrix's average noise, per measurement
_OFTEN_CLIPPED = (20, 200)  # clipped steps, and the steps in which they occur: one in ten
_WHOLE = 2**14  # number of elements up to which a whole tensor is read
_SHARE = 64
"""Of a larger tensor, only the first rows are read, which contain _WHOLE elements or a 64th of the tensor.

Reading the whole tensor would take several per cent of a step.
"""


def is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if updates are proportional to the gradient, even if the optimizer has a wrapper such as ZeRO."""
    inner: object = optimizer
    while not isinstance(inner, PLAIN):
        inner = getattr(inner, "optim", None) or getattr(inner, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            return False
    return True


@dataclass
class GainState:
    """Averages and readings of past steps, equal on all ranks.

    `samples`, `norm`: B / b and |G| of the last reading, which was taken in step `measured_at`. `variability`: the
    gradient variability (equation 5).
    """

    noise: NoiseAverage
    factor: float = 1.0
    samples: float = 1.0
    norm: float = math.nan
    measured_at: int = -2
    variability: float = math.nan


class GainRule:
    """Computes a factor from past steps only, so that the factor does not depend on the batch that it scales.

    No step waits for the factor. `matrix_noise`: V of each matrix, the average noise of its gradient (decay 0.9 per
    measurement) in the optimizer's unit. `turn` turns the step that was taken with the factor.
    """

    def __init__(self, statistics: GradientStatistics, policy: Gain) -> None:
        self._statistics, self._policy = statistics, policy
        self._clip = None if policy.spike_limit is None else SpikeClip(policy.spike_limit)
        self._scales = policy.name == "gain"
        self._directions: Directions | None = None
        if self._scales and policy.damping is not None:
            self._directions = Directions(statistics.inner, statistics.ranks, policy.damping)
        self._state = GainState(NoiseAverage())
        self._reduction: AsyncReduction | None = None
        self._sent_at = -2
        self._clippable = self._clippable_at_send = 0  # steps in which a long gradient would be clipped
        self._clips_before: tuple[float, int] | None = None  # clipped and clippable steps at the last check
        self.matrix_noise: list[float] = []
        self._keeps = False  # directions in this step

    def next_epoch(self, step: int) -> None:
        """Do nothing, since a gain does not depend on epochs."""

    def wants(self, step: int) -> TapMode | None:
        """Return the sums that the taps must collect during step number `step`."""
        dense = DENSE_STEPS if self._scales else MEASURE_DENSE_STEPS
        return None if step % (self._policy.measure_every or (1 if step < dense else SPARSE_EVERY)) else "tensor"

    def factors(self, step: int, numbers: Numbers) -> float:
        """Return the learning-rate factor computed from earlier steps; measure this step, and clip gradient spikes."""
        self._receive()
        if self._directions is not None:
            self._directions.search()
            self._keeps = self._directions.keeps(self._ratio(numbers))
        measurement = self._measure(numbers)
        factor = self._state.factor = self._factor(numbers)
        if self._clip is not None and self._scales and (measurement is not None or self._state.noise.count):
            self._clip(self._statistics.gradients(), clip=factor > 1.0)
            self._clippable += factor > 1.0
        if measurement is not None:
            clipped = None if self._clip is None else self._clip.clipped
            last = measurement.new_zeros(1) if clipped is None else clipped.to(measurement).reshape(1)
            self._reduction = self._statistics.ranks.send(torch.cat([measurement, last]))
            self._sent_at, self._clippable_at_send = step, self._clippable
        return factor

    def turn(self, factor: float) -> None:
        """Turn the step that was taken with `factor`, if the noise of the matrices is known and B / b is large
        enough.
        """
        if self._directions is None or self._keeps or factor <= 1.0 or not self.matrix_noise:
            return
        noise = dict(zip(self._statistics.matrices, self.matrix_noise, strict=True))
        self._directions.turn(factor, noise, self._statistics.batch_size)
        if self._directions.left_out:
            self._statistics.warn(LEFT_OUT)

    def _factor(self, numbers: Numbers) -> float:
        """Return r^power, limited by s_max and by its growth in a step; 1 before the first measurement.

        s_max is at most B / b_small.
        """
        policy, state = self._policy, self._state
        if not self._scales or not state.noise.count:
            return 1.0
        ratio = self._ratio(numbers)
        power = 1.0 if is_plain(self._statistics.inner) else policy.adaptive_power
        gain: float = state.noise.gain(ratio, policy.noise_weight) ** power
        growth = policy.growth
        if growth is not None:
            if self._keeps and ratio < NORMALIZED_UP_TO:
                growth = min(growth, ratio ** (ratio / NORMALIZED_RAMP))
            gain = min(gain, state.factor * growth)
        return min(max(gain, 1.0), ratio if numbers.s_max is None else min(numbers.s_max, ratio))

    def _ratio(self, numbers: Numbers) -> float:
        """Return B / b, or the ratio of the last reading if a batch size is unknown."""
        return self._statistics.batch_ratio(numbers.small_batch_size) or self._state.samples

    def _receive(self) -> None:
        """Add the reading that was sent in an earlier step to the averages."""
        if self._reduction is None:
            return
        (*values, clipped), self._reduction = self._reduction.values(), None
        statistics, state = self._statistics, self._state
        self._judge_clips(clipped / statistics.ranks.size)
        reading = statistics.reading(torch.tensor(values, dtype=torch.float64, device="cpu"))
        statistics.take_served(reading.served.tolist())
        if reading.disturbed:
            statistics.warn(DISTURBED)
            return
        moments, noise = reading.moments(), reading.matrix_noise()
        if not is_usable(*moments):
            return  # leave out a step that a GradScaler skipped
        before = statistics.batch_size
        statistics.count(reading.examples)
        now = statistics.batch_size
        if before and now and now != before:  # as in a launch of several batch sizes
            self._change_batch(now / before)
        state.noise.update(*moments)  # `_change_batch` has converted the averages to this batch size
        kept = self.matrix_noise if len(self.matrix_noise) == len(noise) else noise
        self.matrix_noise = [_KEEP * old + (1.0 - _KEEP) * new for old, new in zip(kept, noise, strict=True)]
        # Equation 5 compares consecutive steps, so its result is unknown while only every eighth step is measured.
        norm, follows = math.sqrt(float(reading.norm_sq)), self._sent_at == state.measured_at + 1
        state.variability = gradient_variability(norm**2, state.norm**2) if follows else math.nan
        state.samples, state.norm, state.measured_at = moments[2], norm, self._sent_at

    def _judge_clips(self, clipped: float) -> None:
        """Warn if gradients are clipped regularly, since clipping then suppresses a part of training.

        The first 200 steps are ignored: without normalization layers, one in five of them is a spike, which should be
        clipped.
        """
        most, steps = _OFTEN_CLIPPED
        before = self._clips_before
        if self._clippable_at_send < (steps if before is None else before[1] + steps):
            return
        if before is not None and clipped - before[0] > most:
            self._statistics.warn(CLIPPED_OFTEN)
        self._clips_before = clipped, self._clippable_at_send

    def _change_batch(self, factor: float) -> None:
        self._state.noise.change_batch(factor)
        self.matrix_noise = [noise / factor for noise in self.matrix_noise]

    def _measure(self, numbers: Numbers) -> torch.Tensor | None:
        """Return this rank's measurement of the step, which must be summed over ranks."""
        statistics = self._statistics
        if statistics.tap.mode is None:
            return None
        if statistics.ranks.size > 1 or statistics.tap.parts >= 2:
            places = () if self._directions is None else self._directions.plan(statistics.batch_size)
            if places != statistics.matrices:  # no measurement is in flight, so none is for other matrices
                statistics.matrices, self.matrix_noise = places, []
            return statistics.measure()
        # Without measurements, ranks share neither the service's values nor batch sizes, so this rank's are used.
        small = numbers.small_batch_size or statistics.pulled.small_batch_size
        larger = small is not None and (statistics.batch_size or statistics.observed) > small
        if self._scales and statistics.tap.parts and larger:  # at the base batch there is nothing to scale
            statistics.warn(NO_SMALL_BATCH)
        return None

    def telemetry(self, numbers: Numbers) -> dict[str, float]:  # noqa: ARG002 - as in `ags`
        """Return the values of the last measured step; the noise scale is in examples if B is known, or else in
        batches.
        """
        state = self._state
        return {
            "grad_norm": state.norm,
            "gradient_variability": state.variability,
            "scale": state.factor,
            "scaled_share": float(state.factor != 1.0),
            "directions": float(self._directions is not None and self._directions.acts),
            "gradient_noise_scale": state.noise.noise_scale_over_batch * float(self._statistics.batch_size or 1),
        }

    def state(self) -> list[float]:
        """Return the averages for a checkpoint, after adding the measurement that is in flight."""
        self._receive()
        state, clip = self._state, self._clip
        usual = math.nan if clip is None or clip.usual is None else float(clip.usual)
        own = [state.factor, state.samples, state.norm, float(state.measured_at), state.variability]
        noise = [float(x) for x in vars(state.noise).values()]
        size = self._statistics.batch_size or math.nan
        by_place = dict(zip(self._statistics.matrices, self.matrix_noise, strict=False))
        by_parameter = [by_place.get(place, math.nan) for place in range(len(self._statistics.parameters()))]
        return [*own, *noise, size, float(self._sent_at), usual, *by_parameter]

    def load(self, saved: Sequence[float]) -> None:
        """Restore the state that `state` returned."""
        numbers = iter(saved)
        factor, samples, norm, measured_at, variability = (next(numbers) for _ in range(5))
        signal, noise, slow, fast, count = (next(numbers) for _ in range(5))
        before, sent_at, usual = (next(numbers) for _ in range(3))
        average = NoiseAverage(signal, noise, slow, fast, int(count))
        self._state = GainState(average, factor, samples, norm, int(measured_at), variability)
        by_parameter = enumerate(() if self._directions is None else numbers)
        by_place = {place: noise for place, noise in by_parameter if not math.isnan(noise)}
        # The saved numbers show which matrices are measured, so the ranks agree without a collective, and one rank can
        # load the state alone, for example when its optimizer is copied.
        self._statistics.matrices, self.matrix_noise = tuple(by_place), list(by_place.values())
        self._reduction, self._sent_at = None, int(sent_at)
        statistics = self._statistics
        now = statistics.batch_size
        if now is None:
            statistics.counted_batch_size = None if math.isnan(before) else before
        elif not math.isnan(before):  # S/B depends on B, and S does not change when a job is resumed
            self._change_batch(now / before)
        if self._clip is not None:
            device = statistics.device
            kept = None if math.isnan(usual) else torch.full((), usual, dtype=wide_dtype(device), device=device)
            self._clip.usual = kept


class SpikeClip:
    """Clips spikes: g <- g * min(1, limit * usual / |g|), where `usual` is the moving average (decay 0.9) of clipped
    |g|.

    |g| is computed from a fixed part of each large tensor, since it is compared only with earlier values of |g|.

    A gain above 1 makes a bad step worse. Without normalization layers, the norm can grow a hundredfold within three
    steps. An average of past steps cannot predict this growth, but a limit on the step itself prevents it. All ranks
    have the same bits after the all-reduce, so all compute the same factor, as with torch's `clip_grad_norm_`.
    `clipped`: the number of clipped steps, as a tensor on the device; None before the first step that could be clipped.
    A gradient that contains NaN or infinity, or only zeros, is not changed and is not included in the average.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.usual: torch.Tensor | None = None
        self.clipped: torch.Tensor | None = None

    def __call__(self, gradients: Sequence[torch.Tensor | None], *, clip: bool) -> None:
        """Update the average norm and, if `clip` is True, clip in place; ignore sparse gradients."""
        dense = [g for g in gradients if g is not None and not g.is_sparse]
        if not dense:
            return
        norm = norm_squared([_part_read(g) for g in dense]).sqrt()
        usual = torch.zeros_like(norm) if self.usual is None else self.usual.to(norm.device)
        finite, begun = torch.isfinite(norm), usual > 0.0
        counts = finite & (norm > 0.0)  # zero gradients would reduce the average to 0 and block later steps
        allowed = torch.where(begun, self._limit * usual, norm) if clip else norm
        taken = torch.minimum(norm, allowed)
        blended = torch.where(begun, _KEEP * usual + (1.0 - _KEEP) * taken, taken)
        self.usual = torch.where(counts, blended, usual)
        too_long = finite & (norm > allowed)
        if clip:
            self.clipped = too_long.to(norm.dtype) if self.clipped is None else self.clipped.to(norm.device) + too_long
        if not clip or (norm.is_cpu and not bool(too_long)):
            return  # on a CPU, reading the flag costs nothing, but multiplying by 1 does
        factor = torch.where(too_long, allowed / norm, torch.ones_like(norm))
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for gradient in dense:
            by_device.setdefault(gradient.device, []).append(gradient)
        for device, group in by_device.items():
            foreach_mul_(group, factor.to(device, torch.float32))


def _part_read(gradient: torch.Tensor) -> torch.Tensor:
    """Return the whole gradient if it is small, or else a view of its first rows, in any memory format."""
    elements = gradient.numel()
    if elements <= _WHOLE:
        return gradient
    rows = gradient.shape[0]
    return gradient.narrow(0, 0, min(rows, -(-rows * max(_WHOLE, elements // _SHARE) // elements)))
