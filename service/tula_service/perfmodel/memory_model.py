"""Predicts the peak memory of a rank (equation 3) and the largest local batch that is safe to run.

    M(b) = max(M_static + k b, M_2 + k_2 b)

M_static is the memory of parameters, gradients and optimizer state; k is the memory of the activations and inputs of
one example. There are two lines because memory use grows at different rates at different moments of a step, and the
peak is the maximum over these moments. The first line is a weighted fit to readings and to counted bytes. The second
line passes through two readings at large batches, and is used if these readings rise faster than the first line.
`tula_wire.memory` has the formula that the agent evaluates.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy import special

from tula_service.perfmodel.intervals import LEVEL, WIDEST_LOG, Interval
from tula_service.perfmodel.points import FloatArray, ObservationError, column
from tula_service.perfmodel.variants import believed_effect, switches
from tula_wire.configurations import Configuration, Variant
from tula_wire.format import size
from tula_wire.memory import usable_bytes
from tula_wire.options import Options

_READING_SD = 0.04
_WORK_SPACE_SD = 0.07  # share of the smallest reading, since kernels for a small batch use a different work space
_PREDICTION_SD = 0.05  # relative deviation of a reading from the line
_ANALYSIS_SD = 0.15  # relative error of bytes per sample
_OVER_ANALYSIS = 1.1  # ratio of used to counted bytes, because of rounding, fragmentation and work space
_UNCOUNTED_STATIC, _UNCOUNTED_SD = 0.7, 0.7  # shares of the smallest reading, if static bytes were not counted
_ROUNDS = 10  # rounds of reweighting; the weights converge in about five rounds
_LARGEST_BATCH = 2**30
_FALL = 0.05
_DEFAULT_BATCH = 32.0
_NORMAL_END = float(special.ndtri(0.5 + LEVEL / 2.0))


@dataclass(frozen=True)
class MemoryObservations:
    """Readings and counted bytes of one rank's memory use for one variant.

    `local_batch_size` and `peak_bytes`, shape (n,), are the readings. `out_of_memory_batch_sizes`, shape (m,), are the
    local batches that did not fit into `capacity_bytes`. `static_bytes` is the counted memory that does not grow with
    the batch (parameters, gradients, optimizer state), and `static_sd` is the relative error of this count.
    `bytes_per_sample` is the counted memory of the activations and inputs of one example; the fit assumes that the
    device needs 10 % more. None means "not counted".
    """

    local_batch_size: FloatArray | Sequence[float] = ()
    peak_bytes: FloatArray | Sequence[float] = ()
    out_of_memory_batch_sizes: FloatArray | Sequence[float] = ()
    capacity_bytes: float | None = None
    static_bytes: float | None = None
    static_sd: float = 0.1
    bytes_per_sample: float | None = None

    def __post_init__(self) -> None:
        """Raise ObservationError if a reading or a counted value is not positive and finite."""
        batches = column("local_batch_size", self.local_batch_size, at_least=1.0)
        column("peak_bytes", self.peak_bytes, batches.size, above=0.0)
        column("out_of_memory_batch_sizes", self.out_of_memory_batch_sizes, at_least=1.0)
        for name in ("capacity_bytes", "static_bytes"):
            if (value := getattr(self, name)) is not None:
                column(name, [value], above=0.0)


@dataclass(frozen=True)
class Shards:
    """The static memory that is divided among the ranks (ZeRO, FSDP), as the total size of all shards in bytes.

    The fitted lines are for `most_ranks` ranks.
    """

    total_bytes: float = 0.0
    most_ranks: int = 1

    def extra_bytes(self, world_size: int) -> float:
        """Return the additional bytes (at least 0) of a rank for `world_size` instead of `most_ranks` ranks."""
        return self.total_bytes * max(0.0, 1.0 / world_size - 1.0 / self.most_ranks)


@dataclass(frozen=True)
class Beside:
    """The device memory that is used in addition to the measured peaks.

    `context_bytes` is the memory of the device context and the communicators, which predictions include but readings
    and lines do not; `context_sd_bytes` is its standard deviation. `reserved` is the ratio of reserved to allocated
    memory when the device is full, and `reserved_sd` the standard deviation of its logarithm. This ratio is used only
    to decide whether a batch fits.
    """

    context_bytes: float = 0.0
    context_sd_bytes: float = 0.0
    reserved: float = 1.0
    reserved_sd: float = 0.0


@dataclass(frozen=True)
class MemoryModel:
    """The two fitted lines; `notes` contains warnings about doubtful or missing readings.

    The first line is `static_bytes` plus `bytes_per_sample` per example, with a (2, 2) `covariance`. `upper` is the
    second line, as (bytes, bytes per example). `failed_from` is the smallest local batch that ran out of memory.
    """

    notes: tuple[str, ...]
    failed_from: float
    static_bytes: float = field(repr=False)
    bytes_per_sample: float = field(repr=False)
    covariance: FloatArray = field(repr=False)
    shards: Shards = Shards()
    beside: Beside = Beside()
    upper: tuple[float, float] = (0.0, 0.0)

    def predict(self, local_batch_size: float) -> Interval:
        """Return the peak memory of the device in bytes at a local batch, including memory outside the allocator."""
        allocated, sd = self._allocated(local_batch_size)
        mean = allocated + self.beside.context_bytes
        width = math.exp(min(_NORMAL_END * sd / mean, WIDEST_LOG))
        return Interval(mean, mean / width, mean * width)

    def fits(self, local_batch_size: float, capacity_bytes: float) -> float:
        """Return the probability that a local batch fits into memory, or 0 if this or a smaller batch has failed."""
        if local_batch_size >= self.failed_from:
            return 0.0
        allocated, sd = self._allocated(local_batch_size)
        needed = allocated * self.beside.reserved + self.beside.context_bytes
        log_sd = math.hypot(sd / needed, self.beside.reserved_sd)
        return float(special.ndtr(math.log(usable_bytes(capacity_bytes) / needed) / log_sd))

    def max_local_batch_size(self, capacity_bytes: float, *, safety_probability: float = 0.95) -> int:
        """Return the largest local batch that fits with at least `safety_probability`, or 0 if none fits.

        Two per cent of the capacity is reserved for the allocator.
        """
        batches = range(1, _LARGEST_BATCH)
        return bisect_left(batches, True, key=lambda b: self.fits(b, capacity_bytes) < safety_probability)

    def _allocated(self, local_batch_size: float) -> tuple[float, float]:
        """Return the bytes on the higher line, and the standard deviation of the peak including the context."""
        row = np.array([1.0, local_batch_size])
        lines = (self.static_bytes, self.bytes_per_sample), self.upper
        allocated = max(1.0, *(static + slope * local_batch_size for static, slope in lines))
        variance = row @ self.covariance @ row + (_PREDICTION_SD * allocated) ** 2
        return allocated, math.sqrt(variance + self.beside.context_sd_bytes**2)


def predict_peaks(
    models: Mapping[Variant, MemoryModel], configurations: Sequence[Configuration]
) -> list[Interval | None]:
    """Return the peak bytes of a rank for each configuration, or None if the variant has no memory model."""
    peaks = {}
    for c in configurations:
        if (model := models.get(c.variant)) is not None:
            peak, more = model.predict(c.local_batch_size), model.shards.extra_bytes(c.world_size)
            peaks[c] = Interval(peak.mean + more, peak.low + more, peak.high + more)
    return [peaks.get(c) for c in configurations]


def switched(model: MemoryModel, start: Options, options: Options) -> MemoryModel:
    """Return the model of an unmeasured variant with `options`, derived from the model of the variant with `start`.

    The static bytes stay the same. The bytes per example are multiplied by the assumed effects of the switches between
    the two variants.
    """
    effects = [believed_effect(switch) for switch in switches(start, options)]
    factor = math.exp(sum(effect.memory for effect in effects))
    sd = math.hypot(*(effect.memory_sd for effect in effects))
    per_example = factor * model.bytes_per_sample
    scale = np.array([1.0, factor])
    covariance = model.covariance * np.outer(scale, scale)
    covariance[1, 1] += (sd * per_example) ** 2
    upper = (model.upper[0], factor * model.upper[1])
    return replace(
        model, notes=(), failed_from=math.inf, bytes_per_sample=per_example, covariance=covariance, upper=upper
    )


def fit_memory(observed: MemoryObservations, *, shards: Shards = Shards(), beside: Beside = Beside()) -> MemoryModel:
    """Return the lines fitted to the readings, to counted bytes, and to batches that ran out of memory.

    Counted static bytes are treated as a reading at a batch of 0. If the static bytes were not counted, they are
    assumed to be 0.7 times the reading at the smallest batch, with a standard deviation of the same size. If, in
    addition, all readings are at one batch, the growth with the batch is undetermined, and the model's notes say so. A
    batch that ran out of memory is treated as a reading of the full capacity if the line predicts less. Readings and
    counted bytes are for one of `shards.most_ranks` ranks, and do not include the context of `beside`. Raises
    ObservationError if there are no readings and the bytes per sample are unknown.
    """
    batches, peaks, notes = _usable(observed)
    static, counted = observed.static_bytes, observed.bytes_per_sample
    if batches.size == 0 and counted is None:
        raise ObservationError("no memory use was measured; profile one configuration or provide the bytes per sample.")
    read = zip(batches.tolist(), peaks.tolist(), _reading_sds(peaks).tolist(), strict=True)
    rows: list[tuple[float, float, float, float]] = [(1.0, *reading) for reading in read]
    if counted is not None:
        rows.append((0.0, 1.0, _OVER_ANALYSIS * counted, _ANALYSIS_SD * _OVER_ANALYSIS * counted))
    if static is not None:
        rows.append((1.0, 0.0, static, observed.static_sd * static))
    else:
        least = peaks[np.argmin(batches)] if batches.size else rows[0][2] * _DEFAULT_BATCH
        rows.append((1.0, 0.0, _UNCOUNTED_STATIC * least, _UNCOUNTED_SD * least))
    line, covariance = _weighted_line(rows)
    failed_from = min(observed.out_of_memory_batch_sizes, default=math.inf)
    if math.isfinite(failed_from) and observed.capacity_bytes is not None:
        room = max((usable_bytes(observed.capacity_bytes) - beside.context_bytes) / beside.reserved, 1.0)
        if line @ (1.0, failed_from) < room:
            line, covariance = _weighted_line([*rows, (1.0, failed_from, room, _READING_SD * room)])
    upper = _upper_line(batches, peaks, float(line[1]))
    ascending = peaks[np.lexsort((peaks, batches))]
    if bool((np.diff(ascending) < -_FALL * ascending[:-1]).any()):
        notes.append("Memory use fell although the batch grew; one reading may come from a run that ran out of memory.")
    if batches.size and float(batches.max()) >= failed_from:
        notes.append(
            f"Batch {failed_from:g} ran out of memory, but batch {batches.max():g} also has a measured peak. One of "
            f"them is wrong, or another process used the device. Only batches below {failed_from:g} are recommended."
        )
    if batches.size and np.unique(batches).size == 1 and counted is None and static is None:
        notes.append("Memory was measured at only one batch, so its growth with the batch is an assumption.")
    return MemoryModel(
        tuple(notes), float(failed_from), float(line[0]), float(line[1]), covariance, shards, beside, upper
    )


def _reading_sds(peaks: FloatArray) -> FloatArray:
    """Return the standard deviation of each reading, shape (n,).

    The standard deviation combines a share of the reading with a share of the smallest reading, which represents the
    kernels' workspace.
    """
    return np.hypot(_READING_SD * peaks, _WORK_SPACE_SD * peaks.min()) if peaks.size else peaks


def _upper_line(batches: FloatArray, peaks: FloatArray, slope_of_all: float) -> tuple[float, float]:
    """Return the line, as (bytes, bytes per example), through the readings at two large batches.

    The two batches are the largest batch, and the largest batch that is at most half as large. The result is (0, 0)
    unless there is a third, smaller batch and the line rises clearly faster than the line through all readings.
    """
    read = {batch: float(np.median(peaks[batches == batch])) for batch in np.unique(batches).tolist()}
    halves = [batch for batch in read if 2.0 * batch <= max(read)]
    if len(halves) < 2:
        return 0.0, 0.0
    largest, middle = max(read), max(halves)
    slope = (read[largest] - read[middle]) / (largest - middle)
    sd = float(np.hypot(*_reading_sds(np.array([read[largest], read[middle]])))) / (largest - middle)
    return (read[largest] - slope * largest, slope) if slope - sd > slope_of_all else (0.0, 0.0)


def _weighted_line(rows: Sequence[tuple[float, float, float, float]]) -> tuple[FloatArray, FloatArray]:
    """Return the non-negative pair (static bytes, bytes per example) that fits the rows best, and its covariance.

    A row is (factor of static bytes, factor of bytes per example, value, standard deviation). The weights come from
    Student's t distribution with one degree of freedom, so that an outlier among three rows receives the smallest
    weight.
    """
    from scipy.optimize import nnls  # imported here because it slows the start of the service

    table = np.array(rows, dtype=np.float64)
    scale = np.array([table[:, 2].max(), table[:, 2].max() / max(table[:, 1].max(), 1.0)])
    design, value = table[:, :2] * scale / table[:, 3:], table[:, 2] / table[:, 3]
    root = np.ones(len(table))
    for _ in range(_ROUNDS):
        weighted = design * root[:, None]
        line, _ = nnls(weighted, value * root)
        root = np.sqrt(2.0 / (1.0 + (value - design @ line) ** 2))
    inverse = np.linalg.pinv(weighted)  # the square is singular if readings differ by many orders of magnitude
    return line * scale, np.asarray(inverse @ inverse.T * np.outer(scale, scale))


def _usable(observed: MemoryObservations) -> tuple[FloatArray, FloatArray, list[str]]:
    batches, peaks = np.asarray(observed.local_batch_size), np.asarray(observed.peak_bytes)
    above = peaks > (observed.capacity_bytes or math.inf)
    if observed.capacity_bytes is None or not above.any():
        return batches, peaks, []
    capacity = f"the capacity of {size(observed.capacity_bytes)}"
    remedy = "check that the capacity (cluster.memory_bytes_per_rank) and the readings are in bytes."
    if above.all():
        raise ObservationError(
            f"peak_bytes: every reading is above {capacity}, and the smallest is {size(peaks.min())}; {remedy}"
        )
    note = f"{int(above.sum())} memory reading(s) above {capacity} were ignored; {remedy}"
    return batches[~above], peaks[~above], [note]
