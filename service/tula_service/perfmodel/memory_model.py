"""Peak memory of a rank by component (equation 3), and the largest local batch that is safe to run.

    M(b) = M_static + m * b^p      M_static: parameters, gradients, optimizer state, context; m: activations and batch

p is close to 1: work space and allocator slack make the first examples cost slightly more than later ones. The
posterior is a weighted grid over the share of M that grows with the batch, and over p; the level is integrated out.
`tula_wire.memory` has the formula for p = 1, which the agent evaluates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy import special

from tula_service.perfmodel.intervals import LEVEL, WIDEST_LOG, Interval
from tula_service.perfmodel.points import FloatArray, MemoryObservations, ObservationError, column
from tula_wire.configurations import Configuration
from tula_wire.memory import usable_bytes

_ALLOCATOR_BYTES = 6.0 * 2**20  # what blocks of 20 MiB leave open
_READING_NOISE, _GROWTH_NOISE = 0.002, 0.03  # of the whole; of what grows: static memory does not fluctuate
_SHARE_CENTRE, _SHARE_SD = 0.0, 1.2  # log odds: at the smallest batch half of the memory grows, give or take a lot
_JUMPS = ((0.0, 0.8), (0.08, 0.2))  # (of the reading, chance): it jumps with the work space of another kernel
_ANALYSIS_SD = 0.15  # of log bytes per sample
_OVER_ANALYSIS = 1.1  # rounding, fragmentation and work space add to the bytes that can be counted
_POWER_CENTRE, _POWER_SD = 0.97, 0.03
_PREDICTION_NOISE, _PREDICTION_DOF = 0.03, 4.0
_LARGEST_BATCH = 2**30
_FALL = 0.05
_DEFAULT_BATCH = 32.0
# Finest where three exact readings pin a small share to within 7 %: between entries too far apart they fit neither.
_SHARES = np.concatenate(
    [
        np.geomspace(1e-4, 0.005, 10)[:-1],
        np.geomspace(0.005, 0.05, 32),
        np.linspace(0.06, 0.98, 93),
        1.0 - np.geomspace(0.01, 1e-4, 12),
    ]
)
_POWERS = np.linspace(0.88, 1.06, 7)


@dataclass(frozen=True)
class MemoryPrior:
    """Bytes that were counted before (or beside) measuring, with relative errors.

    `bytes_per_sample` counts activations and inputs of one example; the device is taken to need 10 % more.
    """

    bytes_per_sample: float | None = None
    static_bytes: float | None = None
    static_sd: float = 0.1


@dataclass(frozen=True)
class MemoryPredictions:
    """Predictions as columns of shape (n,), bytes: the median and the ends of its 90 % interval."""

    mean_bytes: FloatArray
    low_bytes: FloatArray
    high_bytes: FloatArray


@dataclass(frozen=True)
class Shards:
    """Static memory that the ranks share (ZeRO, FSDP), bytes of all shards together; curves are of `most_ranks`."""

    total_bytes: float = 0.0
    most_ranks: int = 1

    def extra_bytes(self, world_size: int) -> float:
        """What one of so many ranks holds beyond one of `most_ranks`, at least nothing."""
        return self.total_bytes * max(0.0, 1.0 / world_size - 1.0 / self.most_ranks)


@dataclass(frozen=True)
class MemoryModel:
    """A weighted grid of curves; `notes` name what the data leave open. Arrays have one entry per curve."""

    notes: tuple[str, ...]
    failed_from: float
    smallest_batch: float = field(repr=False)
    weight: FloatArray = field(repr=False)
    log_level: FloatArray = field(repr=False)
    log_level_sd: FloatArray = field(repr=False)
    share: FloatArray = field(repr=False)
    power: FloatArray = field(repr=False)
    shards: Shards = Shards()

    def predict(self, local_batch_size: Sequence[float] | FloatArray) -> MemoryPredictions:
        """Peak bytes at n local batches: the curves' own weighted quantiles, and a reading's noise around them."""
        batches = column("local_batch_size", local_batch_size, at_least=0.0)
        curves = self._curves(batches)
        order = np.argsort(curves, axis=0)
        ranked = np.take_along_axis(curves, order, axis=0)
        passed = np.cumsum(self.weight[order], axis=0)
        noise = math.sqrt(float(self.weight @ self.log_level_sd**2) + _PREDICTION_NOISE**2)
        reach = float(special.stdtrit(_PREDICTION_DOF, 0.5 + LEVEL / 2.0)) * noise
        columns = np.arange(batches.size)
        middle, low, high = (
            ranked[np.argmax(passed >= q, axis=0), columns] for q in (0.5, 0.5 - LEVEL / 2.0, 0.5 + LEVEL / 2.0)
        )
        return MemoryPredictions(
            np.exp(middle),
            np.exp(middle - np.minimum(np.hypot(middle - low, reach), WIDEST_LOG)),
            np.exp(middle + np.minimum(np.hypot(high - middle, reach), WIDEST_LOG)),
        )

    def fits(self, local_batch_size: float, capacity_bytes: float) -> float:
        """Probability that this local batch fits into the capacity; 0 from the smallest batch that did not."""
        column("capacity_bytes", [capacity_bytes], above=0.0)
        if local_batch_size >= self.failed_from:
            return 0.0
        usable = math.log(usable_bytes(capacity_bytes))
        return float(self._below(np.array([local_batch_size]), np.array([usable]))[0])

    def max_local_batch_size(self, capacity_bytes: float, *, safety_probability: float = 0.95) -> int:
        """Largest local batch that fits with at least this probability, 0 when not even one example does.

        Two per cent of the capacity stay free for the allocator. Raises ObservationError on a capacity that is not
        positive or a probability outside 0.5..1.
        """
        if not 0.5 <= safety_probability < 1.0:
            raise ObservationError(f"safety_probability is {safety_probability!r}; give at least 0.5 and below 1.")
        low, high = 0, 1
        while high < _LARGEST_BATCH and self.fits(high, capacity_bytes) >= safety_probability:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            if self.fits(middle, capacity_bytes) >= safety_probability:
                low = middle
            else:
                high = middle
        return low

    def _curves(self, batches: FloatArray) -> FloatArray:
        return self.log_level[:, None] + _log_growth(self.share, self.power, batches / self.smallest_batch)

    def _below(self, batches: FloatArray, log_bytes: FloatArray) -> FloatArray:
        """Probability that a reading at each batch is below the bytes beside it, shape (n,)."""
        sd = np.sqrt(self.log_level_sd**2 + _PREDICTION_NOISE**2)[:, None]
        scores = (log_bytes[None, :] - self._curves(batches)) / sd
        return np.asarray(self.weight @ special.stdtr(_PREDICTION_DOF, scores), dtype=np.float64)


def predict_peaks(models: Mapping[str, MemoryModel], configurations: Sequence[Configuration]) -> list[Interval | None]:
    """Peak bytes of a rank of each configuration; None where its instance type has no memory model."""
    found: dict[tuple[str, int], Interval] = {}
    for name, model in models.items():
        batches = sorted({c.local_batch_size for c in configurations if c.instance_type == name})
        predicted = model.predict([float(batch) for batch in batches])
        rows = zip(batches, predicted.mean_bytes, predicted.low_bytes, predicted.high_bytes, strict=True)
        found |= {(name, batch): Interval(float(mean), float(low), float(high)) for batch, mean, low, high in rows}
    peaks = [found.get((c.instance_type, c.local_batch_size)) for c in configurations]
    return [
        peak and _raised(peak, models[c.instance_type].shards.extra_bytes(c.world_size))
        for peak, c in zip(peaks, configurations, strict=True)
    ]


def _raised(peak: Interval, by: float) -> Interval:
    return Interval(peak.mean + by, peak.low + by, peak.high + by) if by else peak


def fit_memory(
    observations: MemoryObservations | None, *, prior: MemoryPrior | None = None, shards: Shards = Shards()
) -> MemoryModel:
    """Weigh every curve of the grid by the readings, by counted or analytic bytes, and by out-of-memory events.

    One reading, or readings at one batch, leave the growth to the prior (a tenth to nine tenths of the memory
    grow with the batch) and a note is added; two readings at different batches determine it. A batch that ran out of
    memory makes curves on which it would have fitted improbable. With `shards`, readings and counted bytes are of one
    of `shards.most_ranks`. Raises ObservationError with neither a reading nor bytes per sample.
    """
    prior = prior or MemoryPrior()
    observed = observations or MemoryObservations(np.zeros(0), np.zeros(0))
    batches, peaks, notes = _usable(observed)
    static = observed.static_bytes or prior.static_bytes
    if batches.size == 0 and prior.bytes_per_sample is None:
        raise ObservationError("no memory was measured; profile one configuration or give bytes per sample.")
    smallest = float(batches.min()) if batches.size else _DEFAULT_BATCH
    share, power = (values.ravel() for values in np.meshgrid(_SHARES, _POWERS))
    # Rows of log level = value - offset: each reading, then what analysis knows of the two parts at the smallest batch.
    growth = _log_growth(share, power, batches / smallest).T
    rows = list(np.log(peaks)[:, None] - growth)
    growing = 1.0 - (1.0 - share) / np.exp(growth)
    noise = _READING_NOISE**2 + (_ALLOCATOR_BYTES / peaks[:, None]) ** 2 + (_GROWTH_NOISE * growing) ** 2
    known = []
    if static is not None:
        rows.append(math.log(static) - np.log1p(-share))
        known.append(np.full(share.size, prior.static_sd**2))
    if prior.bytes_per_sample is not None:
        rows.append(math.log(_OVER_ANALYSIS * prior.bytes_per_sample * smallest) - np.log(share))
        known.append(np.full(share.size, _ANALYSIS_SD**2))
    parts = [_combine(np.array(rows), np.array([*(noise + jump**2), *known])) for jump, _ in _JUMPS]
    level, spread = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
    log_weight = np.concatenate(
        [_log_prior(share, power) + part[2] + math.log(chance) for part, (_, chance) in zip(parts, _JUMPS, strict=True)]
    )
    share, power = np.tile(share, len(_JUMPS)), np.tile(power, len(_JUMPS))
    failed_from = float(observed.out_of_memory_batch_sizes.min(initial=math.inf))
    if math.isfinite(failed_from) and observed.capacity_bytes is not None:
        needed = level + _log_growth(share, power, np.array([failed_from / smallest]))[:, 0]
        sd = np.sqrt(spread**2 + _PREDICTION_NOISE**2)
        usable = math.log(usable_bytes(observed.capacity_bytes))
        log_weight = log_weight + np.asarray(special.log_ndtr((needed - usable) / sd))
    order = np.lexsort((peaks, batches))
    if bool((np.diff(peaks[order]) < -_FALL * peaks[order][:-1]).any()):
        notes = (*notes, "Memory fell while the batch grew: a reading may stem from a run that ran out of memory.")
    if batches.size and float(batches.max()) >= failed_from:
        notes = (
            *notes,
            f"Batch {failed_from:g} ran out of memory, but batch {batches.max():g} was also read as fitting: one "
            "of them is wrong, or others used the device too; batches below the failed one are offered.",
        )
    if batches.size and np.unique(batches).size == 1 and prior.bytes_per_sample is None and static is None:
        notes = (*notes, "Memory was read at one batch only: how it grows with the batch rests on the prior.")
    weight = np.exp(log_weight - log_weight.max())
    kept = weight > 1e-5
    weight = weight[kept] / weight[kept].sum()
    return MemoryModel(
        notes=notes,
        failed_from=failed_from,
        smallest_batch=smallest,
        weight=weight,
        log_level=level[kept],
        log_level_sd=spread[kept],
        share=share[kept],
        power=power[kept],
        shards=shards,
    )


def _log_growth(share: FloatArray, power: FloatArray, ratio: FloatArray) -> FloatArray:
    """log of M(b) / M(smallest batch) for every curve and batch ratio, shape (curves, n)."""
    return np.asarray(np.log1p(share[:, None] * (ratio[None, :] ** power[:, None] - 1.0)), dtype=np.float64)


def _combine(rows: FloatArray, variances: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Weighted mean of each column, its standard deviation, and the log likelihood with the level integrated out."""
    precision = 1.0 / variances
    total = precision.sum(axis=0)
    level = (precision * rows).sum(axis=0) / total
    surprise = (precision * (rows - level) ** 2).sum(axis=0)
    height = 0.5 * (np.log(precision).sum(axis=0) - np.log(total))
    return np.asarray(level), np.asarray(1.0 / np.sqrt(total)), np.asarray(height - 0.5 * surprise)


def _log_prior(share: FloatArray, power: FloatArray) -> FloatArray:
    """Logit-normal in the share, normal in the power, each curve standing for the width of its grid cell."""
    width = np.log(np.tile(np.gradient(_SHARES), _POWERS.size))
    logit = special.logit(share)
    density = -0.5 * ((logit - _SHARE_CENTRE) / _SHARE_SD) ** 2 - np.log(share * (1.0 - share)) + width
    return np.asarray(density - 0.5 * ((power - _POWER_CENTRE) / _POWER_SD) ** 2, dtype=np.float64)


def _usable(observed: MemoryObservations) -> tuple[FloatArray, FloatArray, tuple[str, ...]]:
    batches, peaks = observed.local_batch_size, observed.peak_bytes
    if observed.capacity_bytes is None or not bool((peaks > observed.capacity_bytes).any()):
        return batches, peaks, ()
    above = peaks > observed.capacity_bytes
    capacity = f"the capacity of {observed.capacity_bytes / 2**30:,.3g} GiB"
    remedy = "check the capacity (cluster.memory_bytes_per_rank) and that both count bytes."
    if above.all():
        raise ObservationError(
            f"peak_bytes: every reading is above {capacity}, the least at {peaks.min() / 2**30:,.3g} GiB; {remedy}"
        )
    note = f"{int(above.sum())} memory reading(s) above {capacity} are left out; {remedy}"
    return batches[~above], peaks[~above], (note,)
