"""Reading telemetry back: one column of one rank, thinned so that its peaks and dips stay."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from tsdownsample import MinMaxDownsampler

from tula_service.errors import NotFound
from tula_service.store import Store
from tula_service.store.records import FloatArray, IntArray, MemoryReading
from tula_service.usecases.access import Principal, visible_run
from tula_wire import TelemetrySeries

__all__ = ["TREND_POINTS", "downsample", "memory_of", "read_series", "read_with_trend", "trend"]

TREND_POINTS = 150
_STEP_TIME = "step_time_s"
_MOST_SAMPLES = 200_000


def read_series(
    store: Store,
    principal: Principal,
    run_id: str,
    column: str,
    *,
    rank: int = 0,
    max_points: int = 2000,
    first_step: int | None = None,
    last_step: int | None = None,
) -> TelemetrySeries:
    """A column of a run; step times fall back on its samples. Raises NotFound for an unknown run or column."""
    found = _read(store, principal, run_id, column, rank, first_step, last_step)
    return found.series(*downsample(found.steps, found.values, max_points))


def read_with_trend(
    store: Store,
    principal: Principal,
    run_id: str,
    column: str,
    *,
    rank: int = 0,
    max_points: int = 2000,
    first_step: int | None = None,
    last_step: int | None = None,
) -> tuple[TelemetrySeries, TelemetrySeries | None]:
    """The same, and its `trend`: what a person sees of a noisy series at a glance. None where there are few points."""
    found = _read(store, principal, run_id, column, rank, first_step, last_step)
    smooth = trend(found.steps, found.values)
    return (
        found.series(*downsample(found.steps, found.values, max_points)),
        None if smooth is None else found.series(*smooth),
    )


def memory_of(store: Store, principal: Principal, run_id: str, *, limit: int = 16) -> dict[int, MemoryReading]:
    """Peak memory by component of the ranks that use most, by rank. Raises NotFound for an unknown run."""
    with store.reading() as tx:
        return tx.samples.memory_by_rank(visible_run(tx, principal, run_id).key, limit=limit)


@dataclass(frozen=True)
class _Column:
    """Every point of a column of a rank."""

    run_id: str
    name: str
    rank: int
    steps: IntArray
    values: FloatArray
    available: list[str]

    def series(self, steps: IntArray, values: FloatArray) -> TelemetrySeries:
        """These of its points, as the wire has them."""
        return TelemetrySeries(
            run_id=self.run_id,
            column=self.name,
            rank=self.rank,
            steps=steps.tolist(),
            values=[None if value != value else value for value in values.tolist()],
            total_points=int(self.steps.size),
            downsampled=steps.size < self.steps.size,
            available=self.available,
        )


def _read(
    store: Store,
    principal: Principal,
    run_id: str,
    column: str,
    rank: int,
    first_step: int | None,
    last_step: int | None,
) -> _Column:
    with store.reading() as tx:
        run = visible_run(tx, principal, run_id)
        available = tx.telemetry.columns(run.key)
        steps, values = tx.telemetry.read(run.key, column, rank=rank, first_step=first_step, last_step=last_step)
        if column == _STEP_TIME and column not in available and run.num_samples:
            steps, values = tx.samples.step_times(
                run.key, rank=rank, first_step=first_step, last_step=last_step, limit=_MOST_SAMPLES
            )
    names = sorted({*available, *([_STEP_TIME] if run.num_samples else [])})
    if column not in names:
        known = ", ".join(names) or "none yet"
        raise NotFound(f"Run {run_id} has no column {column!r}: it has {known}.", field="column")
    return _Column(run_id, column, rank, steps, values, names)


def trend(steps: IntArray, values: FloatArray) -> tuple[IntArray, FloatArray] | None:
    """The median of each of `TREND_POINTS` stretches of equally many points, at the middle step of each.

    A running mean would follow a single straggling step, and a mean of thinned points would follow the peaks that
    thinning keeps. None where a stretch would hold fewer than three points.
    """
    known = ~np.isnan(values)
    if not bool(known.all()):
        steps, values = steps[known], values[known]
    if steps.size < 3 * TREND_POINTS:
        return None
    edges = np.linspace(0, steps.size, TREND_POINTS + 1).astype(np.int64)
    medians = np.array([np.median(values[start:end]) for start, end in pairwise(edges)])
    return steps[(edges[:-1] + edges[1:]) // 2], medians


def downsample(steps: IntArray, values: FloatArray, max_points: int) -> tuple[IntArray, FloatArray]:
    """At most `max_points` of the points: the least and the greatest of every stretch, and the first and the last.

    Steps without a value go first: a column that is reported now and then (validation accuracy) keeps what it has.
    """
    if steps.size <= max_points:
        return steps, values
    known = ~np.isnan(values)
    if bool(known.any()) and not bool(known.all()):
        steps, values = steps[known], values[known]
    if steps.size <= max_points:
        return steps, values
    ends = np.array([0, steps.size - 1])
    if max_points < 4:
        return steps[ends], values[ends]
    kept = MinMaxDownsampler().downsample(np.ascontiguousarray(values), n_out=(max_points - 2) // 2 * 2)
    kept = np.union1d(kept.astype(np.int64), ends)
    return steps[kept], values[kept]
