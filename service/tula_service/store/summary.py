"""From the last measuring steps of a run to the few robust figures that a fit uses; pure, no database."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tula_service.store.records import FloatArray, SampleColumns

TRIM = 0.1
"""Share cut from each end: a stray checkpoint or collector pause must not move a step time."""


@dataclass(frozen=True)
class StepTimeSummary:
    """Figures of `RunSummary` that come from step samples; None where nothing was measured."""

    num_steps: int
    step_time_s: float | None
    relative_sd: float | None
    compute_time_s: float | None
    comm_time_s: float | None
    exposed_comm_time_s: float | None
    input_time_s: float | None
    skew_s: float | None
    straggler_rank: int | None


def summarise(samples: SampleColumns) -> StepTimeSummary:
    """Average each step over its ranks, then take the trimmed mean over steps; components are medians.

    Ranks of one step wait for each other, so only steps count as independent in the standard error.
    """
    per_step = _by_step(samples)
    mean, error = trimmed_mean(per_step)
    named = samples.straggler_rank
    ranks = named[named >= 0] if named is not None else np.zeros(0, np.int64)
    slowest = np.bincount(ranks) if ranks.size else np.zeros(0)
    return StepTimeSummary(
        num_steps=int(per_step.size),
        step_time_s=mean,
        relative_sd=None if mean is None or error is None else error / mean,
        compute_time_s=_median(samples.compute_time_s),
        comm_time_s=_median(samples.comm_time_s),
        exposed_comm_time_s=_median(samples.exposed_comm_time_s),
        input_time_s=_median(samples.input_time_s),
        skew_s=_median(samples.skew_s),
        straggler_rank=int(slowest.argmax()) if slowest.size and 2 * slowest.max() > ranks.size else None,
    )


def trimmed_mean(values: FloatArray) -> tuple[float | None, float | None]:
    """The 10 % trimmed mean and its standard error from the winsorised variance (Tukey and McLaughlin, 1963)."""
    count = values.size
    if count == 0:
        return None, None
    ordered = np.sort(values)
    cut = int(TRIM * count)
    mean = float(ordered[cut : count - cut].mean())
    if count < 2:
        return mean, None
    winsorised = np.clip(ordered, ordered[cut], ordered[count - cut - 1])
    return mean, float(winsorised.std(ddof=1) / ((1 - 2 * cut / count) * np.sqrt(count)))


def _by_step(samples: SampleColumns) -> FloatArray:
    steps, which = np.unique(samples.step, return_inverse=True)
    sums = np.bincount(which, weights=samples.step_time_s, minlength=steps.size)
    return np.asarray(sums / np.maximum(np.bincount(which, minlength=steps.size), 1), dtype=np.float64)


def _median(column: FloatArray | None) -> float | None:
    if column is None:
        return None
    known = column[~np.isnan(column)]
    return float(np.median(known)) if known.size else None
