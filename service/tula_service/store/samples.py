"""Step samples as rows, of a resend the first, and a summary per run, so that a fit costs the same after a million."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import sqlalchemy as sa

from tula_service.domain import BucketTimeline, MemoryReading, RunSummary
from tula_service.perfmodel.step_summary import StepTimeSummary, summarise
from tula_service.store._base import Clock, Repository, RowMap, configuration_from, same_fields
from tula_service.store.records import FloatArray, IntArray, NewSamples, SampleColumns, Stored
from tula_service.store.tables import jobs, memory_readings, run_summaries, runs, sample_sources, step_samples

_LOG = logging.getLogger("tula.service")
SUMMARY_ROWS = 4096
"""The last measuring rows (by step) that a summary reads."""

_FLOATS = ("compute_time_s", "comm_time_s", "exposed_comm_time_s", "input_time_s", "skew_s", "optimizer_time_s")
_ROW = ("source_key", "sequence", "run_key", "rank", "step", "warmup", "step_time_s", *_FLOATS, "straggler_rank")
_SQLITE = f"INSERT OR IGNORE INTO step_samples ({', '.join(_ROW)}) VALUES ({', '.join('?' * len(_ROW))})"
_POSTGRES = (
    f"INSERT INTO step_samples ({', '.join(_ROW)}) "
    "SELECT %s, sequence, %s, %s, step, %s, step_time_s, " + ", ".join(_FLOATS) + ", straggler_rank "
    "FROM unnest(%s::bigint[], %s::bigint[], %s::float8[], " + "%s::float8[], " * len(_FLOATS) + "%s::int[]) "
    "AS row(sequence, step, step_time_s, " + ", ".join(_FLOATS) + ", straggler_rank) "
    "ON CONFLICT (source_key, sequence) DO NOTHING"
)
_MEMORY = [memory_readings.c[field.name] for field in fields(MemoryReading)]
_SEEN = ("world_size", "local_batch_size", "grad_accum_steps", "timing_method")
"""What a process reports of its configuration."""


class Samples(Repository):
    """Step samples, the processes that sent them, their memory, and the summary of each run."""

    def __init__(self, connection: sa.Connection, now: Clock, *, writable: bool = True) -> None:
        super().__init__(connection, now)
        self._writable = writable

    def add(self, run_key: int, job_id: str, batch: NewSamples) -> Stored:
        """Store a batch; rows already there by (run, rank, boot id, sequence) are counted as duplicates.

        New rows move the run's sample count, and they or another memory reading the job's data version.
        """
        if self._postgres:
            # The job's row before its run's, as a deletion locks them: see the order of locks in store/database.py.
            job = sa.select(jobs.c.key).where(jobs.c.id == job_id)
            self._connection.execute(job.with_for_update(read=True, key_share=True))
        source = self._source(run_key, batch)
        columns = batch.columns
        optional = [getattr(columns, name) for name in _FLOATS]
        if self._postgres:
            # One statement for all rows; NaN means "not measured" on this side of the store and NULL on the other.
            arguments: list[Any] = [each.tolist() for each in (columns.sequence, columns.step, columns.step_time_s)]
            arguments += [_nullable(column, columns.sequence.size) for column in optional]
            arguments.append(_ranks(columns.straggler_rank, columns.sequence.size))
            stored = self._connection.exec_driver_sql(
                _POSTGRES, (source, run_key, batch.rank, batch.warmup, *arguments)
            ).rowcount
        else:
            size = columns.sequence.size
            rows = zip(
                [source] * size,
                columns.sequence.tolist(),
                [run_key] * size,
                [batch.rank] * size,
                columns.step.tolist(),
                [batch.warmup] * size,
                columns.step_time_s.tolist(),
                *(_nullable(column, size) for column in optional),
                _ranks(columns.straggler_rank, size),
                strict=True,
            )
            stored = self._connection.exec_driver_sql(_SQLITE, list(rows)).rowcount
        memory_changed = batch.memory is not None and self._store_memory(source, run_key, batch.memory)
        if stored or memory_changed:
            self._bump(job_id)  # before the run's row is changed
            self._connection.execute(
                sa.update(runs).where(runs.c.key == run_key).values(num_samples=runs.c.num_samples + stored)
            )
        return Stored(stored, int(columns.sequence.size) - stored)

    def recent(
        self, run_key: int, *, limit: int = SUMMARY_ROWS, warmup: bool = False, rank: int | None = None
    ) -> SampleColumns:
        """The last `limit` rows of a run by step, oldest first; measuring rows unless `warmup`."""
        table = step_samples.c
        floats = [table[name] for name in ("step_time_s", *_FLOATS)]
        straggler = sa.func.coalesce(table.straggler_rank, -1).label("straggler_rank")
        ints = [table.sequence, table.step, table.rank, straggler]
        statement = (
            sa.select(*floats, *ints)
            .where(table.run_key == run_key, table.warmup == warmup)
            .order_by(table.step.desc(), table.rank)
            .limit(limit)
        )
        if rank is not None:
            statement = statement.where(table.rank == rank)
        rows = self._connection.execute(statement).all()[::-1]
        columns: Sequence[Sequence[Any]] = list(zip(*rows, strict=True)) or [()] * (len(floats) + len(ints))
        kinds = [np.float64] * len(floats) + [np.int64] * len(ints)
        named = zip((*floats, *ints), columns, kinds, strict=True)
        arrays: dict[str, Any] = {column.name: np.asarray(values, kind) for column, values, kind in named}
        return SampleColumns(**arrays)

    def step_times(
        self, run_key: int, *, rank: int, first_step: int | None, last_step: int | None, limit: int
    ) -> tuple[IntArray, FloatArray]:
        """Steps and step times of one rank's measuring rows, by step: the last `limit` of them."""
        table = step_samples.c
        statement = (
            sa.select(table.step, table.step_time_s)
            .where(table.run_key == run_key, table.warmup.is_(False), table.rank == rank)
            .order_by(table.step.desc())
            .limit(limit)
        )
        if first_step is not None:
            statement = statement.where(table.step >= first_step)
        if last_step is not None:
            statement = statement.where(table.step <= last_step)
        rows = self._connection.execute(statement).all()[::-1]
        steps = np.fromiter((row[0] for row in rows), np.int64, len(rows))
        return steps, np.fromiter((row[1] for row in rows), np.float64, len(rows))

    def memory_by_rank(self, run_key: int, *, limit: int) -> dict[int, MemoryReading]:
        """The reading with the highest peak of each rank, for the `limit` ranks whose peaks are highest."""
        table, source = memory_readings.c, sample_sources.c
        statement = (
            sa.select(source.rank, *_MEMORY)
            .join(sample_sources, source.key == table.source_key)
            .where(table.run_key == run_key)
            .order_by(table.peak_bytes.desc(), source.rank)
        )
        found: dict[int, MemoryReading] = {}
        for row in self._rows(statement):
            if len(found) < limit:
                found.setdefault(row["rank"], MemoryReading(**same_fields(MemoryReading, row)))
        return found

    def summaries(self, job_id: str) -> list[RunSummary]:
        """One summary for each run of the job that has samples or ran out of memory, oldest run first.

        Stale summaries are computed again, and stored if the transaction writes; every worker computes the same.
        """
        rows = self._rows(
            sa.select(runs, *(column.label(f"summary_{column.name}") for column in run_summaries.c))
            .outerjoin(run_summaries, run_summaries.c.run_key == runs.c.key)
            .where(
                runs.c.job_id == job_id,
                (runs.c.num_samples > 0) | (runs.c.state == "out_of_memory"),
            )
            .order_by(runs.c.key)
        )
        keys = [row["key"] for row in rows]
        memory, timelines = self._highest(keys), self._timelines(keys)
        return [self._summary(row, memory.get(row["key"]), timelines.get(row["key"])) for row in rows]

    def refresh(self, run_key: int) -> None:
        """Compute and keep the summary of one run now, so that `RunRecord.step_time_s` is current."""
        row = self._row(sa.select(runs.c.key, runs.c.num_samples).where(runs.c.key == run_key))
        if row is not None and row["num_samples"]:
            self._compute(run_key, row["num_samples"])

    def count_processes(self) -> int:
        """The number of processes that have sent samples of runs that are running now."""
        joined = sample_sources.join(runs, runs.c.key == sample_sources.c.run_key)
        statement = sa.select(sa.func.count()).select_from(joined).where(runs.c.state == "running")
        return int(self._scalar(statement))

    def purge(self, job_id: str, *, limit: int) -> int:
        """Delete up to `limit` sample rows of a job, so that writers never wait long; returns their number."""
        keys = self._connection.execute(sa.select(runs.c.key).where(runs.c.job_id == job_id)).scalars().all()
        table = step_samples.c
        chosen = (
            sa.select(table.source_key, table.sequence).where(table.run_key.in_(keys)).limit(limit).subquery("chosen")
        )
        statement = sa.delete(step_samples).where(
            sa.tuple_(table.source_key, table.sequence).in_(sa.select(chosen.c.source_key, chosen.c.sequence))
        )
        return int(self._connection.execute(statement).rowcount)

    def _source(self, run_key: int, batch: NewSamples) -> int:
        facts = {name: getattr(batch, name) for name in _SEEN}
        if batch.timeline is not None:
            facts["timeline"] = {name: list(values) for name, values in asdict(batch.timeline).items()}
        table = sample_sources.c
        known = self._row(
            sa.select(sample_sources).where(
                table.run_key == run_key, table.rank == batch.rank, table.boot_id == batch.boot_id
            )
        )
        if known is not None:
            changed = {name: value for name, value in facts.items() if value not in (None, known[name])}
            if changed:
                self._connection.execute(sa.update(sample_sources).where(table.key == known["key"]).values(**changed))
            return int(known["key"])
        statement = (
            self._insert(sample_sources)
            .values(run_key=run_key, rank=batch.rank, boot_id=batch.boot_id, **facts)
            .on_conflict_do_update(
                index_elements=["run_key", "rank", "boot_id"], set_={"timing_method": batch.timing_method}
            )
            .returning(table.key)
        )
        return int(self._scalar(statement))

    def _store_memory(self, source_key: int, run_key: int, reading: MemoryReading) -> bool:
        """Keep the newest reading with the highest peak of a process; False if that is the stored one already."""
        table = memory_readings.c
        known = self._row(sa.select(*_MEMORY).where(table.source_key == source_key))
        if known is not None and (reading.peak_bytes < known["peak_bytes"] or reading == MemoryReading(**known)):
            return False
        insert = self._insert(memory_readings).values(source_key=source_key, run_key=run_key, **asdict(reading))
        values = {column.name: insert.excluded[column.name] for column in _MEMORY}
        higher = insert.excluded.peak_bytes >= memory_readings.c.peak_bytes
        self._connection.execute(insert.on_conflict_do_update(index_elements=["source_key"], set_=values, where=higher))
        return True

    def _highest(self, run_keys: Sequence[int]) -> dict[int, MemoryReading]:
        table = memory_readings.c
        statement = sa.select(table.run_key, *_MEMORY).where(table.run_key.in_(run_keys))
        rows = self._rows(statement.order_by(table.peak_bytes, table.source_key))
        return {row["run_key"]: MemoryReading(**same_fields(MemoryReading, row)) for row in rows}

    def _timelines(self, run_keys: Sequence[int]) -> dict[int, BucketTimeline]:
        """The newest of each run."""
        table = sample_sources.c
        statement = sa.select(table.run_key, table.timeline).where(table.run_key.in_(run_keys)).order_by(table.key)
        return {
            row["run_key"]: BucketTimeline(**{name: tuple(values) for name, values in row["timeline"].items()})
            for row in self._rows(statement)
            if row["timeline"] is not None
        }

    def _summary(self, row: RowMap, memory: MemoryReading | None, timeline: BucketTimeline | None) -> RunSummary:
        values: dict[str, Any]
        if row["num_samples"] == 0:
            values = {"num_samples": 0}
        elif row["summary_of_num_samples"] == row["num_samples"]:
            values = {column.name: row[f"summary_{column.name}"] for column in run_summaries.c}
        else:
            values = self._compute(row["key"], row["num_samples"])
        names = {field.name for field in fields(RunSummary)} & {column.name for column in run_summaries.c}
        figures: dict[str, Any] = {name: values.get(name) for name in names}
        return RunSummary(
            run_id=row["id"],
            state=row["state"],
            configuration=configuration_from(row),
            memory=memory,
            failed_local_batch_size=row["failed_local_batch_size"],
            timeline=timeline,
            **figures,
        )

    def _compute(self, run_key: int, of_num_samples: int) -> dict[str, Any]:
        table = step_samples.c
        measured = self._scalar(sa.select(sa.func.count()).where(table.run_key == run_key, table.warmup.is_(False)))
        figures = self._figures(run_key)
        seen = self._row(
            sa.select(sample_sources)
            .where(sample_sources.c.run_key == run_key)
            .order_by(sample_sources.c.rank, sample_sources.c.key.desc())
            .limit(1)
        )
        facts = {name: None if seen is None else seen[name] for name in _SEEN}
        values = {"of_num_samples": of_num_samples, "num_samples": measured, **asdict(figures), **facts}
        if self._writable:
            insert = self._insert(run_summaries).values(run_key=run_key, **values)
            self._connection.execute(insert.on_conflict_do_update(index_elements=["run_key"], set_=values))
        return values

    def _figures(self, run_key: int) -> StepTimeSummary:
        """Those of the newest samples; none where they cannot be computed, so that a run never fails its job."""
        try:
            recent = self.recent(run_key)
            return summarise(
                recent.step,
                recent.step_time_s,
                straggler_rank=recent.straggler_rank,
                **{name: getattr(recent, name) for name in _FLOATS},
            )
        except sa.exc.SQLAlchemyError:  # says nothing of the samples
            raise
        except Exception:
            _LOG.exception("the samples of a run cannot be summarised", extra={"run_key": run_key})
            return StepTimeSummary(num_steps=0, step_time_s=None, relative_sd=None, straggler_rank=None)


def _nullable(column: FloatArray | None, size: int) -> list[float | None]:
    if column is None:
        return [None] * size
    if not np.isnan(column).any():
        return list(column.tolist())
    return [None if value != value else value for value in column.tolist()]


def _ranks(column: IntArray | None, size: int) -> list[int | None]:
    if column is None:
        return [None] * size
    return [None if value < 0 else value for value in column.tolist()]
