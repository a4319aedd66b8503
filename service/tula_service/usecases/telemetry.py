"""Telemetry of a run: one column of one rank, downsampled so that its peaks and dips stay."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from tsdownsample import MinMaxDownsampler

from tula_service.domain import MemoryReading
from tula_service.errors import NotFound
from tula_service.store import Store
from tula_service.store.records import FloatArray, IntArray
from tula_service.usecases.access import Principal, visible_run
from tula_wire import TelemetrySeries

TREND_POINTS = 150
_STEP_TIME = "step_time_s"
_MOST_SAMPLES = 200_000


@dataclass(frozen=True)
class SeriesQuery:
    """A column of one rank of a run; both ends of the range of steps belong to it, None: no bound."""

    run_id: str
    column: str
    rank: int = 0
    max_points: int = 2000
    first_step: int | None = None
    last_step: int | None = None


def read_series(store: Store, principal: Principal, query: SeriesQuery) -> TelemetrySeries:
    """A column of a run; step times fall back on its samples. Raises NotFound for an unknown run or column."""
    found = _read(store, principal, query)
    return found.series(*downsample(found.steps, found.values, query.max_points))


def read_with_trend(
    store: Store, principal: Principal, query: SeriesQuery
) -> tuple[TelemetrySeries, TelemetrySeries | None]:
    """The same, and its `trend`, in which a person sees a noisy series at a glance; None with few points."""
    found = _read(store, principal, query)
    smooth = trend(found.steps, found.values)
    return (
        found.series(*downsample(found.steps, found.values, query.max_points)),
        None if smooth is None else found.series(*smooth),
    )


def memory_of(store: Store, principal: Principal, run_id: str, *, limit: int = 16) -> dict[int, MemoryReading]:
    """Peak memory by component of the ranks that use most, by rank. Raises NotFound for an unknown run."""
    with store.reading() as tx:
        return tx.samples.memory_by_rank(visible_run(tx, principal, run_id).key, limit=limit)


@dataclass(frozen=True)
class _Column:
    """Every point that a query asks for; `available` are the run's columns."""

    query: SeriesQuery
    steps: IntArray
    values: FloatArray
    available: list[str]

    def series(self, steps: IntArray, values: FloatArray) -> TelemetrySeries:
        """Some of its points as the wire's model."""
        return TelemetrySeries(
            run_id=self.query.run_id,
            column=self.query.column,
            rank=self.query.rank,
            steps=steps.tolist(),
            values=[None if value != value else value for value in values.tolist()],
            total_points=int(self.steps.size),
            downsampled=steps.size < self.steps.size,
            available=self.available,
        )


def _read(store: Store, principal: Principal, query: SeriesQuery) -> _Column:
    where: dict[str, Any] = {"rank": query.rank, "first_step": query.first_step, "last_step": query.last_step}
    with store.reading() as tx:
        run = visible_run(tx, principal, query.run_id)
        available = tx.telemetry.columns(run.key)
        steps, values = tx.telemetry.read(run.key, query.column, **where)
        if query.column == _STEP_TIME and _STEP_TIME not in available and run.num_samples:
            steps, values = tx.samples.step_times(run.key, **where, limit=_MOST_SAMPLES)
    names = sorted({*available, *([_STEP_TIME] if run.num_samples else [])})
    if query.column not in names:
        known = ", ".join(names) or "none yet"
        raise NotFound(f"Run {query.run_id} has no column {query.column!r}: it has {known}.", field="column")
    return _Column(query, steps, values, names)


def trend(steps: IntArray, values: FloatArray) -> tuple[IntArray, FloatArray] | None:
    """The medians of `TREND_POINTS` intervals of equally many points, each at its middle step.

    A running mean would follow a single straggling step, and a mean of downsampled points would follow the peaks that
    downsampling keeps. None if an interval would hold fewer than three points.
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
    """At most `max_points` of the points: minimum and maximum of every interval, and the first and the last point.

    Steps without a value are dropped first, so that a column with few values (validation accuracy) keeps them.
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
