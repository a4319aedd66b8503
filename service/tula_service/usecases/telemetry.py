"""Stores runs' telemetry in chunks, ignoring resent chunks, and reads and downsamples single columns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import sqlalchemy as sa

from tula_service.analysis.series import TREND_POINTS, downsample, trend
from tula_service.domain import FloatArray, IntArray, MemoryReading, NewChunk, RunRecord
from tula_service.errors import NotFound
from tula_service.store import Store, partitions
from tula_service.store.telemetry import chunk_row
from tula_service.usecases.access import KnownRuns, Principal, visible_job, visible_run
from tula_wire import Run, TelemetryAccepted, TelemetryChunk, TelemetrySeries
from tula_wire.samples import COLUMN_NAME

_NAME = re.compile(COLUMN_NAME)
_STEP_TIME = "step_time_s"
_OF_QUALITY = ("validation_accuracy", "accuracy", "loss")
_MOST_NAMED: Final = 20
"""Maximum number of columns that an error message or a response names."""
_MOST_STEPS_COMPARED: Final = 5_000_000
"""Maximum number of steps that a comparison reads, for which decompression takes about half a second."""


class TelemetryIngest:
    """Stores chunks of telemetry."""

    def __init__(self, store: Store, runs: KnownRuns) -> None:
        self._store = store
        self._runs = runs

    def store(
        self, principal: Principal, run_id: str, chunk: TelemetryChunk, lease: int | None = None
    ) -> TelemetryAccepted:
        """Store a chunk of telemetry once, omitting columns whose names are invalid or that exceed the run's limit.

        Raises NotFound, StoreUnavailable, and Conflict if `lease` is not the run's current lease.
        """
        run_key, job_id = self._runs.authorise(principal, run_id)
        columns = {name: column for name, column in chunk.columns.items() if _NAME.fullmatch(name)}
        if not columns:
            return _accepted(chunk, columns, stored=0)
        new = NewChunk(
            rank=chunk.rank,
            boot_id=chunk.boot_id,
            sequence=chunk.sequence,
            steps=np.asarray(chunk.steps, np.int64),
            names=list(columns),
            values=np.array(list(columns.values()), np.float64),  # null becomes NaN
        )
        row = chunk_row(run_key, new)
        try:
            with self._store.transaction() as tx:
                if self._runs.should_emit_event(run_id):  # before the chunk: see the lock order in store/database.py
                    tx.events.append(job_id, "samples", run_id=run_id, data={"last_step": int(new.steps[-1])})
                admitted = tx.telemetry.admitted(run_key, new.names)
                if len(admitted) < len(new.names):
                    columns = {name: columns[name] for name in admitted}
                    if not columns:
                        return _accepted(chunk, columns, stored=0)
                    new = replace(new, names=admitted, values=np.array(list(columns.values()), np.float64))
                    row = chunk_row(run_key, new)
                stored = tx.telemetry.add(run_id, new, row)
                tx.leases.check(run_id, lease)  # a claim after this check counts as later than the chunk
        except sa.exc.IntegrityError as error:
            self._runs.forget(run_id)
            raise partitions.refusal(self._store.engine, run_key, error) from None
        except NotFound:  # the run was deleted after its key was cached
            self._runs.forget(run_id)
            raise
        return _accepted(chunk, columns, stored=int(new.values.size) if stored else 0, duplicate=not stored)


def _accepted(
    chunk: TelemetryChunk, columns: Collection[str], *, stored: int, duplicate: bool = False
) -> TelemetryAccepted:
    """Return the response for a chunk of which only `columns` were stored."""
    refused = [name[:64] for name in chunk.columns if name not in columns][:_MOST_NAMED]
    return TelemetryAccepted(stored=stored, duplicate=duplicate, refused=refused)


@dataclass(frozen=True)
class SeriesQuery:
    """A query for a column of one rank; the range of steps includes both ends, and None means no bound."""

    run_id: str
    column: str
    rank: int = 0
    max_points: int = 2000
    first_step: int | None = None
    last_step: int | None = None
    trend_points: int = TREND_POINTS


def list_columns(store: Store, principal: Principal, run_id: str) -> list[str]:
    """Return the names of a run's telemetry columns, plus step time. Raises NotFound for an unknown run."""
    with store.reading() as tx:
        run = visible_run(tx, principal, run_id)
        return _names(run, tx.telemetry.columns(run.key))


def newest_values(store: Store, principal: Principal, run_id: str, columns: Iterable[str]) -> dict[str, float | None]:
    """Return the newest value of each column from the run's first rank. Raises NotFound for an unknown run."""
    with store.reading() as tx:
        run = visible_run(tx, principal, run_id)
        return tx.telemetry.newest(run.key, list(columns))


def read_with_trend(
    store: Store, principal: Principal, query: SeriesQuery
) -> tuple[TelemetrySeries, TelemetrySeries | None]:
    """Return a column of a run and its smoothed trend; the trend is None if there are too few points.

    If the step time was not sent as telemetry, it is read from the run's samples. Raises NotFound for an unknown run or
    column.
    """
    where: dict[str, Any] = {"rank": query.rank, "first_step": query.first_step, "last_step": query.last_step}
    with store.reading() as tx:
        run = visible_run(tx, principal, query.run_id)
        available = tx.telemetry.columns(run.key)
        steps, values, total = tx.telemetry.read(run.key, query.column, **where)
        if query.column == _STEP_TIME and _STEP_TIME not in available and run.num_samples:
            steps, values = tx.samples.step_times(run.key, **where)
            total = steps.size
    names = _names(run, available)
    if query.column not in names:
        listed = ", ".join(names[:_MOST_NAMED]) + (", ..." if names[_MOST_NAMED:] else "") or "none yet"
        raise NotFound(f"Run {query.run_id} has no column {query.column!r} (available: {listed}).", field="column")
    smooth = trend(steps, values, query.trend_points)
    raw = _series(query, names, total, *downsample(steps, values, query.max_points))
    return raw, None if smooth is None else _series(query, names, total, *smooth)


def compare(
    store: Store, principal: Principal, job_id: str, runs: Sequence[Run], column: str | None, query: SeriesQuery
) -> tuple[str, list[str], dict[str, TelemetrySeries]]:
    """Return the column's name, the names of all columns that rank 0 of these runs reported, and the series by run id.

    If `column` is None, it is the first of validation accuracy, accuracy, loss or any other column that a run reported.
    A long series is replaced by its trend. If all series together exceed 5 million steps, only the first runs in the
    given order are read. Raises NotFound.
    """
    series: dict[str, TelemetrySeries] = {}
    chosen: list[str] = []
    left = _MOST_STEPS_COMPARED
    with store.reading() as tx:
        visible_job(tx, principal, job_id)
        sizes = tx.telemetry.num_steps([run.id for run in runs])
        for run in runs:
            if run.num_samples:
                sizes.setdefault(run.id, {}).setdefault(_STEP_TIME, run.num_samples)
        names = sorted({name for of_run in sizes.values() for name in of_run})
        column = column or next((name for name in (*_OF_QUALITY, *names) if name in names), _OF_QUALITY[0])
        for run in runs:
            size = sizes.get(run.id, {}).get(column)
            left -= size or 0
            if size is not None and (left >= 0 or not chosen):
                chosen.append(run.id)
        sampled = (  # for runs that sent step times only as samples
            (run_id, *tx.samples.step_times(tx.runs.get(run_id).key)) for run_id in chosen if run_id not in series
        )
        for run_id, steps, values in itertools.chain(tx.telemetry.read_runs(chosen, column), sampled):
            drawn = trend(steps, values, query.trend_points) or downsample(steps, values, query.max_points)
            of_run = replace(query, run_id=run_id, column=column)
            series[run_id] = _series(of_run, sorted(sizes[run_id]), sizes[run_id][column], *drawn)
    return column, names, series


def read_memory(store: Store, principal: Principal, run_id: str, *, limit: int = 16) -> dict[int, MemoryReading]:
    """Return the peak memory by component of the ranks that use the most memory, keyed by rank.

    Raises NotFound for an unknown run.
    """
    with store.reading() as tx:
        return tx.samples.memory_by_rank(visible_run(tx, principal, run_id).key, limit=limit)


def _series(
    query: SeriesQuery, available: list[str], total: int, steps: IntArray, values: FloatArray
) -> TelemetrySeries:
    """Return the points as a wire model; `total` is the number of stored points, and `available` lists the columns."""
    return TelemetrySeries(
        run_id=query.run_id,
        column=query.column,
        rank=query.rank,
        steps=steps.tolist(),
        values=[None if value != value else value for value in values.tolist()],
        total_points=int(total),
        downsampled=steps.size < total,
        available=available,
    )


def _names(run: RunRecord, columns: Iterable[str]) -> list[str]:
    return sorted({*columns, *([_STEP_TIME] if run.num_samples else [])})
