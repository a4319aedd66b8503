"""Stores step samples as rows, and a summary of each run, so that fits do not slow down as rows are added."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any, Final, TypeAlias

import numpy as np
import sqlalchemy as sa
from pydantic import BaseModel, Field

from tula_service.domain import BucketTimeline, FloatArray, IntArray, MemoryReading, RunSummary, SampleColumns
from tula_service.errors import InvalidInput
from tula_service.store._base import WRITES, Repository, RowMap, same_fields
from tula_service.store.tables import jobs, memory_readings, run_summaries, runs, sample_sources, step_samples
from tula_wire import Configuration, HostFacts, SampleBatch, read

_LOG = logging.getLogger("tula.service")
_MOST_STEP_TIMES = 200_000
SUMMARY_ROWS = 4096
"""Number of measured rows from which a summary is computed; the rows with the highest steps are used."""

_FLOATS = ("compute_time_s", "comm_time_s", "exposed_comm_time_s", "input_time_s", "skew_s", "optimizer_time_s")
_COLUMNS = ("sequence", "step", "step_time_s", *_FLOATS, "straggler_rank")
_INSERT = f"INTO step_samples (source_key, run_key, rank, warmup, {', '.join(_COLUMNS)})"
_SQLITE = f"INSERT OR IGNORE {_INSERT} VALUES ({', '.join('?' * (4 + len(_COLUMNS)))})"
_POSTGRES = (
    f"INSERT {_INSERT} SELECT %s, %s, %s, %s, row.* FROM unnest(%s::bigint[], %s::bigint[], "
    + "%s::float8[], " * (1 + len(_FLOATS))
    + "%s::int[]) AS row ON CONFLICT (source_key, sequence) DO NOTHING"
)
_MEMORY = [memory_readings.c[field.name] for field in fields(MemoryReading)]
_SEEN = ("world_size", "local_batch_size", "grad_accum_steps", "timing_method", "energy_per_step_j")
"""The columns with a process's configuration, timing method and energy per step, as the process reported them."""
_FIGURES = [field.name for field in fields(RunSummary) if field.name in run_summaries.c]
_LOCK_JOB = sa.select(jobs.c.key).where(jobs.c.id == sa.bindparam("job")).with_for_update(read=True, key_share=True)
_COUNT = (
    sa.update(runs)
    .where(runs.c.key == sa.bindparam("run"))
    .values(
        num_samples=runs.c.num_samples + sa.bindparam("stored"),
        num_measured=runs.c.num_measured + sa.bindparam("measured"),
    )
)
_SOURCE = sa.select(sample_sources).where(
    sample_sources.c.run_key == sa.bindparam("run"),
    sample_sources.c.rank == sa.bindparam("sender"),
    sample_sources.c.boot_id == sa.bindparam("boot"),
)
_READING = sa.select(*_MEMORY).where(memory_readings.c.source_key == sa.bindparam("source"))


Summarise: TypeAlias = Callable[[SampleColumns], dict[str, Any]]
"""A function that computes the values in `run_summaries` from samples, like `perfmodel.step_summary.summarise`."""

SampleCursor: TypeAlias = tuple[int, int]
"""The primary key of the last row of a page, which consists of the key of its process and a sequence number."""

MOST_READ: Final = 20_000
"""Maximum number of rows to read for a page if few rows match the filter; this takes tens of milliseconds."""

MAX_PROCESSES: Final = 8_192
"""Maximum number of processes per run, counting every restart of a rank."""

MOST_PROCESSES: Final = 64
"""Maximum number of processes whose rows are read for a page, with one query for each."""

_WHOLE: Final = 10**18 - 1
"""The sequence number with which a cursor marks that all rows of a process were read; others are smaller."""


class SampleFilter(BaseModel):
    """A filter for a job's samples; fields that are None impose no restriction."""

    run_id: str | None = Field(None, max_length=200, pattern=r"^[!-~]*$", description="Only samples of this run.")
    rank: int | None = Field(None, ge=0, le=2**20, description="Only samples of this rank.")
    warmup: bool | None = Field(None, description="If true, only warm-up samples; if false, only measured ones.")
    first_step: int | None = Field(None, ge=0, le=2**53, description="Only samples of this step and later steps.")
    last_step: int | None = Field(None, ge=0, le=2**53, description="Only samples of this step and earlier steps.")

    @property
    def of_rows(self) -> list[sa.ColumnElement[bool]]:
        """Return the conditions on individual rows, excluding the conditions on runs and ranks."""
        table = step_samples.c
        conditions: list[sa.ColumnElement[bool]] = []
        if self.warmup is not None:
            conditions.append(table.warmup == self.warmup)
        if self.first_step is not None:
            conditions.append(table.step >= self.first_step)
        if self.last_step is not None:
            conditions.append(table.step <= self.last_step)
        return conditions


class Samples(Repository):
    """The tables of step samples, of the processes that sent them, of their memory use, and of run summaries."""

    def add(self, run_key: int, job_id: str, batch: SampleBatch) -> int:
        """Store a batch and return the number of new rows; rows that were already stored keep their values.

        A row is identified by run, rank, boot id and sequence number. New rows increase the run's counts, and both new
        rows and changed memory readings increment the job's data version. The values that a process reports about
        itself are taken from its newest batch.
        """
        if self._postgres:
            # Lock the job's row before the run's row, like a deletion; see the lock order in store/database.py.
            self._connection.execute(_LOCK_JOB, {"job": job_id})
        source = self._source(run_key, batch)
        size = len(batch.sequence)
        optional = [getattr(batch, name) or [None] * size for name in (*_FLOATS, "straggler_rank")]
        columns = (batch.sequence, batch.step, batch.step_time_s, *optional)
        if self._postgres:  # one statement for all rows
            arguments = (source, run_key, batch.rank, batch.warmup, *columns)
            stored = self._connection.exec_driver_sql(_POSTGRES, arguments).rowcount
        else:
            rows = [(source, run_key, batch.rank, batch.warmup, *row) for row in zip(*columns, strict=True)]
            stored = self._connection.exec_driver_sql(_SQLITE, rows).rowcount
        memory_changed = batch.memory is not None and self._store_memory(source, run_key, batch.memory)
        if stored or memory_changed:
            self.bump(job_id)  # must precede the change of the run's row
            measured = 0 if batch.warmup else stored
            self._connection.execute(_COUNT, {"run": run_key, "stored": stored, "measured": measured})
        return stored

    def recent(self, run_key: int, *, limit: int = SUMMARY_ROWS, rank: int | None = None) -> SampleColumns:
        """Return the `limit` measured rows of a run that have the highest step numbers, in ascending order of steps."""
        names = ("step", "step_time_s", *_FLOATS, "straggler_rank")
        return SampleColumns(**self._measured(run_key, names, SampleFilter(rank=rank), limit))

    def step_times(
        self, run_key: int, *, rank: int = 0, first_step: int | None = None, last_step: int | None = None
    ) -> tuple[IntArray, FloatArray]:
        """Return the step numbers and step times of a rank's last measured rows (at most 200,000), in step order."""
        rows = SampleFilter(rank=rank, first_step=first_step, last_step=last_step)
        columns = self._measured(run_key, ("step", "step_time_s"), rows, _MOST_STEP_TIMES)
        return columns["step"], columns["step_time_s"]

    def memory_by_rank(self, run_key: int, *, limit: int) -> dict[int, MemoryReading]:
        """Return the memory reading with the highest peak for each of the `limit` ranks with the highest peaks."""
        table, source = memory_readings.c, sample_sources.c
        statement = (
            sa.select(source.rank, *_MEMORY)
            .join(sample_sources, source.key == table.source_key)
            .where(table.run_key == run_key)
            .order_by(table.peak_bytes.desc(), source.rank)
        )
        by_rank: dict[int, MemoryReading] = {}
        for row in self._rows(statement):
            if len(by_rank) < limit:
                by_rank.setdefault(row["rank"], MemoryReading(**same_fields(MemoryReading, row)))
        return by_rank

    def host_facts(self, run_key: int) -> HostFacts | None:
        """Return the facts about script and host that the newest process of the run's first rank reported, or None."""
        table = sample_sources.c
        statement = sa.select(table.machine).where(
            table.run_key == run_key, table.rank == 0, table.machine.is_not(sa.null())
        )
        row = self._row(statement.order_by(table.key.desc()).limit(1))
        return None if row is None else read(HostFacts, row["machine"])

    def summaries(self, job_id: str, summarise: Summarise) -> list[RunSummary]:
        """Return a summary of each run of the job that has samples or ran out of memory, oldest run first.

        Stale summaries are recomputed with `summarise`, and stored if the transaction may write; all workers compute
        the same result.
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
        return [self._summary(row, memory.get(row["key"]), timelines.get(row["key"]), summarise) for row in rows]

    def refresh(self, run_key: int, summarise: Summarise) -> None:
        """Compute and store the summary of a run, so that `RunRecord.step_time_s` is up to date."""
        row = self._row(sa.select(runs.c.key, runs.c.num_samples, runs.c.num_measured).where(runs.c.key == run_key))
        if row is not None and row["num_samples"]:
            self._compute(row, summarise)

    def page(
        self,
        job_id: str,
        only: SampleFilter,
        *,
        cursor: SampleCursor | None = None,
        limit: int = 500,
    ) -> tuple[list[RowMap], SampleCursor | None]:
        """Return a page of a job's rows, ordered by process and sequence number, and the next page's cursor, if any.

        Rows are read in the order of the primary key, one process at a time, so all pages cost the same. `warmup` and
        the step are not part of this key. Therefore, a page ends once MOST_READ rows or MOST_PROCESSES processes have
        been read, even if few rows or none matched, and the next page continues from there.
        """
        page: list[RowMap] = []
        unread = MOST_READ
        sources = self._processes(job_id, only, cursor)
        table = step_samples.c
        for source, after in sources[:MOST_PROCESSES]:
            rows = [table.source_key == source, table.sequence > after]
            reached = after
            if only.of_rows:
                read, reached = self._reach(source, after, unread)
                unread -= read
                rows += [table.sequence <= reached, *only.of_rows]
            statement = (
                sa.select(step_samples, runs.c.id.label("run_id"), sample_sources.c.boot_id)
                .join(sample_sources, sample_sources.c.key == table.source_key)
                .join(runs, runs.c.key == table.run_key)
                .where(*rows)
                .order_by(table.sequence)
                .limit(limit + 1 - len(page))
            )
            page += self._rows(statement)
            if len(page) > limit:
                last = page[limit - 1]
                return page[:limit], (int(last["source_key"]), int(last["sequence"]))
            if unread <= 0:
                return page, (source, reached)
        if len(sources) > MOST_PROCESSES:
            return page, (sources[MOST_PROCESSES - 1][0], _WHOLE)
        return page, None

    def count_processes(self) -> int:
        """Return the number of processes that have sent samples of running runs."""
        joined = sample_sources.join(runs, runs.c.key == sample_sources.c.run_key)
        statement = sa.select(sa.func.count()).select_from(joined).where(runs.c.state == "running")
        return int(self._scalar(statement))

    def purge(self, job_id: str, *, limit: int) -> int:
        """Delete up to `limit` sample rows of a job, and return the number of deleted rows."""
        return self._purge(step_samples, job_id, limit)

    def _measured(self, run_key: int, names: Sequence[str], only: SampleFilter, limit: int) -> dict[str, Any]:
        """Return the columns of the last measured rows that match the filter `only`.

        Since the index does not contain the rank, the rows of a rank are selected from the last rows of all ranks.
        """
        table = step_samples.c
        statement = sa.select(*(table[name] for name in names), table.rank.label("sender")).where(
            table.run_key == run_key, table.warmup.is_(False), *only.of_rows
        )
        newest = statement.order_by(table.step.desc(), table.rank)
        if only.rank is not None:  # without a limit, the rows of all ranks would be read
            some = newest.limit(max(limit, MOST_READ)).subquery("some")
            newest = sa.select(some).where(some.c.sender == only.rank)  # keeps the order of the subquery
        rows = self._connection.execute(newest.limit(limit)).all()[::-1]
        columns: Sequence[Sequence[Any]] = list(zip(*rows, strict=True)) or [()] * (len(names) + 1)
        arrays: dict[str, Any] = {}
        for name, values in zip(names, columns[:-1], strict=True):
            if name.endswith("_s"):
                arrays[name] = np.array(values, np.float64)  # NULL becomes NaN
            else:
                arrays[name] = np.array([-1 if value is None else value for value in values], np.int64)
        return arrays

    def _source(self, run_key: int, batch: SampleBatch) -> int:
        facts = {name: getattr(batch, name) for name in _SEEN}
        if batch.timeline is not None:
            facts["timeline"] = batch.timeline.model_dump()
        if batch.machine is not None:
            facts["machine"] = batch.machine.model_dump(exclude_none=True)
        table = sample_sources.c
        source = self._row(_SOURCE, run=run_key, sender=batch.rank, boot=batch.boot_id)
        if source is not None:
            changed = {name: value for name, value in facts.items() if value not in (None, source[name])}
            if changed:
                self._connection.execute(sa.update(sample_sources).where(table.key == source["key"]).values(**changed))
            return int(source["key"])
        if int(self._scalar(sa.select(sa.func.count()).where(table.run_key == run_key))) >= MAX_PROCESSES:
            raise InvalidInput(
                f"This run already has samples from {MAX_PROCESSES} processes, which is the maximum: create a new "
                "boot_id only when a process starts.",
                field="boot_id",
            )
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
        """Store a process's memory reading if its peak is at least the stored peak; return True if a value changed."""
        table = memory_readings.c
        stored = self._row(_READING, source=source_key)
        if stored is not None and (reading.peak_bytes < stored["peak_bytes"] or reading == MemoryReading(**stored)):
            return False
        higher = table.peak_bytes <= reading.peak_bytes
        self._put(memory_readings, {"source_key": source_key}, asdict(reading), where=higher, run_key=run_key)
        return True

    def _highest(self, run_keys: Sequence[int]) -> dict[int, MemoryReading]:
        """Return each run's memory reading with the highest peak or, in a tie, the reading of the newest process."""
        table = memory_readings.c
        place = sa.func.row_number().over(
            partition_by=table.run_key, order_by=(table.peak_bytes.desc(), table.source_key.desc())
        )
        ranked = sa.select(table.run_key, *_MEMORY, place.label("place")).where(table.run_key.in_(run_keys)).subquery()
        rows = self._rows(sa.select(ranked).where(ranked.c.place == 1))
        return {row["run_key"]: MemoryReading(**same_fields(MemoryReading, row)) for row in rows}

    def _timelines(self, run_keys: Sequence[int]) -> dict[int, BucketTimeline]:
        """Return the newest timeline of gradient buckets for each run that has one."""
        table = sample_sources.c
        sent = (table.run_key.in_(run_keys), table.timeline.is_not(sa.null()))
        newest = sa.select(sa.func.max(table.key)).where(*sent).group_by(table.run_key)
        statement = sa.select(table.run_key, table.timeline).where(table.key.in_(newest))
        return {
            row["run_key"]: BucketTimeline(**{name: tuple(values) for name, values in row["timeline"].items()})
            for row in self._rows(statement)
        }

    def _summary(
        self, row: RowMap, memory: MemoryReading | None, timeline: BucketTimeline | None, summarise: Summarise
    ) -> RunSummary:
        figures: dict[str, Any] = {name: row[f"summary_{name}"] for name in _FIGURES}
        if row["num_samples"] and row["summary_of_num_samples"] != row["num_samples"]:
            figures = self._compute(row, summarise)
        return RunSummary(
            run_id=row["id"],
            state=row["state"],
            configuration=Configuration.from_json(same_fields(Configuration, row)),
            memory=memory,
            failed_local_batch_size=row["failed_local_batch_size"],
            timeline=timeline,
            **{name: figures[name] for name in _FIGURES if name != "num_samples"},
            num_samples=figures["num_samples"] or 0,
        )

    def _compute(self, run: RowMap, summarise: Summarise) -> dict[str, Any]:
        run_key = int(run["key"])
        recent = self.recent(run_key)
        try:
            figures = summarise(recent)
        except Exception:  # one bad run must not make its job's requests fail
            _LOG.exception("Could not summarise the samples of a run.", extra={"run_key": run_key})
            names = ("step_time_s", "relative_sd", *_FLOATS, "straggler_rank")
            figures = {"num_steps": 0, **dict.fromkeys(names)}
        seen = self._row(
            sa.select(sample_sources)
            .where(sample_sources.c.run_key == run_key)
            .order_by(sample_sources.c.rank, sample_sources.c.key.desc())
            .limit(1)
        )
        facts = {name: None if seen is None else seen[name] for name in _SEEN}
        values = {"of_num_samples": run["num_samples"], "num_samples": run["num_measured"], **figures, **facts}
        if self._connection.get_execution_options()[WRITES]:
            self._put(run_summaries, {"run_key": run_key}, values)
        return values

    def _reach(self, source: int, after: int, most: int) -> tuple[int, int]:
        """Return the number of rows after `after`, counting at most `most`, and the last counted sequence number."""
        table = step_samples.c
        some = (
            sa.select(table.sequence)
            .where(table.source_key == source, table.sequence > after)
            .order_by(table.sequence)
            .limit(most)
            .subquery("some")
        )
        count, last = self._connection.execute(sa.select(sa.func.count(), sa.func.max(some.c.sequence))).one()
        return int(count), after if last is None else int(last)

    def _processes(self, job_id: str, only: SampleFilter, cursor: SampleCursor | None) -> list[SampleCursor]:
        """Return the job's next processes, each with the sequence number after which to read its rows.

        The result contains at most one process more than a page reads.
        """
        key = sample_sources.c.key
        statement = (
            sa.select(key)
            .join(runs, runs.c.key == sample_sources.c.run_key)
            .where(runs.c.job_id == job_id)
            .order_by(key)
            .limit(MOST_PROCESSES + 1)
        )
        if only.run_id is not None:
            statement = statement.where(runs.c.id == only.run_id)
        if only.rank is not None:
            statement = statement.where(sample_sources.c.rank == only.rank)
        if cursor is not None:
            statement = statement.where(key >= cursor[0] if cursor[1] < _WHOLE else key > cursor[0])
        keys = self._connection.execute(statement).scalars().all()
        return [(int(key), cursor[1] if cursor is not None and key == cursor[0] else -1) for key in keys]
