"""What an example is worth in a larger batch: gradient noise scale, critical batch size, statistical efficiency."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tula_service.perfmodel.points import ObservationError

_MIN_VALUES = 8
_MIN_BLOCKS = 4
_Z_90 = 1.6448536269514722


@dataclass(frozen=True)
class NoiseScale:
    """B_noise = tr(Sigma) / |G|^2 in examples, with a 90 % interval; `count` values went in.

    It grows during training (McCandlish et al. 2018, figure 4), so it is that of the later half of what was seen.
    """

    value: float
    low: float
    high: float
    count: int

    @property
    def error(self) -> float:
        """Half the width of the interval, in examples."""
        return (self.high - self.low) / 2.0


def estimate_noise_scale(values: ArrayLike) -> NoiseScale | None:
    """From a run's telemetry column `gradient_noise_scale` (examples, in step order); None with too little to go by.

    The geometric mean over the later half, since a ratio errs by factors; its error from means of blocks of about
    sqrt(n) steps, because neighbouring values share a moving average. Values that are not finite or not positive
    (steps on which no signal stood out of the noise) are left out; a run with more of those than others has a noise
    scale above what it can see, and None is the answer then too.
    """
    column = np.asarray(values, dtype=np.float64).ravel()
    tail = column[column.size // 2 :]
    usable = tail[np.isfinite(tail) & (tail > 0.0)]
    if usable.size < _MIN_VALUES or 2 * usable.size < np.count_nonzero(~np.isnan(tail)):
        return None
    logs = np.log(usable)
    num_blocks = max(_MIN_BLOCKS, round(math.sqrt(logs.size)))
    means = np.array([block.mean() for block in np.array_split(logs, num_blocks)])
    half_width = _Z_90 * float(means.std(ddof=1)) / math.sqrt(num_blocks)
    centre = float(logs.mean())
    return NoiseScale(math.exp(centre), math.exp(centre - half_width), math.exp(centre + half_width), int(usable.size))


def noise_scale_from_norms(
    small_norm_sq: ArrayLike, large_norm_sq: ArrayLike, *, small_batch_size: float, large_batch_size: float
) -> NoiseScale | None:
    """From squared gradient norms at two batch sizes, step by step (McCandlish et al. 2018, appendix A.1).

    |G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b), tr(Sigma) = (|g_b|^2 - |g_B|^2) / (1/b - 1/B), each averaged over steps
    before the ratio is taken, which is what keeps it unbiased; the interval is the jackknife's over blocks.
    Raises ObservationError unless 0 < b < B and the columns are equally long. None when no signal stands out.
    """
    b, large_b = float(small_batch_size), float(large_batch_size)
    if not (0.0 < b < large_b and math.isfinite(large_b)):
        raise ObservationError(f"small_batch_size is {b} and large_batch_size {large_b}: give 0 < small < large")
    small, large = (np.asarray(x, dtype=np.float64).ravel() for x in (small_norm_sq, large_norm_sq))
    if small.shape != large.shape:
        raise ObservationError(f"small_norm_sq has {small.size} steps and large_norm_sq {large.size}: give pairs")
    kept = np.isfinite(small) & np.isfinite(large)
    small, large = small[kept], large[kept]
    if small.size < _MIN_VALUES:
        return None
    signal = (large_b * large - b * small) / (large_b - b)
    noise = (small - large) / (1.0 / b - 1.0 / large_b)
    if signal.mean() <= 0.0 or noise.mean() <= 0.0:
        return None
    num_blocks = max(_MIN_BLOCKS, round(math.sqrt(small.size)))
    blocks = np.array_split(np.arange(small.size), num_blocks)
    without = [np.setdiff1d(np.arange(small.size), block) for block in blocks]
    left_out = np.array([noise[rest].mean() / max(signal[rest].mean(), 1e-300) for rest in without])
    logs = np.log(np.maximum(left_out, 1e-300))
    spread = math.sqrt((num_blocks - 1) / num_blocks * float(((logs - logs.mean()) ** 2).sum()))
    value = float(noise.mean() / signal.mean())
    factor = math.exp(min(_Z_90 * spread, 50.0))
    return NoiseScale(value, value / factor, value * factor, int(small.size))


def critical_batch_size(noise_scale: NoiseScale) -> NoiseScale:
    """B_crit = B_noise: there a step makes half the progress of a noiseless one (McCandlish et al. 2018, eq. 2.11)."""
    return noise_scale


def statistical_efficiency(
    global_batch_size: ArrayLike, noise_scale: float, *, base_batch_size: float
) -> NDArray[np.float64]:
    """Progress per example relative to the base batch: (B_noise + B_0) / (B_noise + B) (Pollux 2021, equation 7).

    1 at B_0 = `base_batch_size`, falling with B; above 1 below it. Same shape as `global_batch_size`.
    Raises ObservationError unless all are positive and finite.
    """
    batch = np.asarray(global_batch_size, dtype=np.float64)
    for name, value in (("noise_scale", noise_scale), ("base_batch_size", base_batch_size)):
        if not (math.isfinite(value) and value > 0.0):
            raise ObservationError(f"{name} is {value}: give a finite number of examples above 0")
    if not bool(np.all(np.isfinite(batch) & (batch > 0.0))):
        raise ObservationError("global_batch_size holds a value that is not a finite number above 0: give examples")
    return np.asarray((noise_scale + base_batch_size) / (noise_scale + batch), dtype=np.float64)


def goodput(
    global_batch_size: ArrayLike, step_time_s: ArrayLike, noise_scale: float, *, base_batch_size: float
) -> NDArray[np.float64]:
    """Useful examples per second: throughput B / t times statistical efficiency (Pollux 2021, equation 6)."""
    batch, step = np.asarray(global_batch_size, dtype=np.float64), np.asarray(step_time_s, dtype=np.float64)
    if not bool(np.all(np.isfinite(step) & (step > 0.0))):
        raise ObservationError("step_time_s holds a value that is not a finite time above 0: give seconds")
    return batch / step * statistical_efficiency(batch, noise_scale, base_batch_size=base_batch_size)


def time_to_quality_s(
    total_time_s: ArrayLike, global_batch_size: ArrayLike, noise_scale: float, *, base_batch_size: float
) -> NDArray[np.float64]:
    """Time to where the base batch would be after the same epochs: total time over statistical efficiency, s.

    The objective `time_to_quality` minimises it; with equal epochs its order is that of 1 / goodput.
    """
    total = np.asarray(total_time_s, dtype=np.float64)
    return total / statistical_efficiency(global_batch_size, noise_scale, base_batch_size=base_batch_size)


def max_sensible_batch_size(noise_scale: float, *, base_batch_size: float, min_efficiency: float = 0.5) -> int:
    """Largest B whose examples keep `min_efficiency` of their worth: (B_noise + B_0) / min_efficiency - B_noise.

    At 0.5 this is B_noise + 2 B_0. Never below the base batch. Raises ObservationError for a share outside (0, 1].
    """
    if not 0.0 < min_efficiency <= 1.0:
        raise ObservationError(f"min_efficiency is {min_efficiency}: give a share above 0 and at most 1")
    statistical_efficiency(base_batch_size, noise_scale, base_batch_size=base_batch_size)
    bound = (noise_scale + base_batch_size) / min_efficiency - noise_scale
    return int(max(bound, base_batch_size) + 1e-9)
