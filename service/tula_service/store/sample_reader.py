"""Step samples of a job as stored, in pages that cost the same however many samples it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import sqlalchemy as sa

from tula_service.store._base import Repository, RowMap
from tula_service.store.tables import runs, sample_sources, step_samples

SampleCursor: TypeAlias = tuple[int, int]
"""The last row of a page: its process and its sequence number, the primary key of the table."""

MOST_READ: Final = 20_000
"""Rows that a page may read for a filter that few of them match: some tens of milliseconds."""

MOST_PROCESSES: Final = 64
"""Processes that a page reads; each costs a query."""

_WHOLE: Final = 10**18 - 1
"""In a cursor: all rows of the process; no sequence number is so large."""


@dataclass(frozen=True)
class SampleFilter:
    """Selects samples of a job; None selects all. The range of steps includes both ends."""

    run_id: str | None = None
    rank: int | None = None
    warmup: bool | None = None
    first_step: int | None = None
    last_step: int | None = None

    @property
    def of_rows(self) -> list[sa.ColumnElement[bool]]:
        """The conditions on rows, without those on processes."""
        table = step_samples.c
        found: list[sa.ColumnElement[bool]] = []
        if self.warmup is not None:
            found.append(table.warmup == self.warmup)
        if self.first_step is not None:
            found.append(table.step >= self.first_step)
        if self.last_step is not None:
            found.append(table.step <= self.last_step)
        return found


class SampleReader(Repository):
    """Rows of `step_samples` with their run and process."""

    def page(
        self,
        job_id: str,
        wanted: SampleFilter,
        *,
        cursor: SampleCursor | None = None,
        limit: int = 500,
    ) -> tuple[list[RowMap], SampleCursor | None]:
        """Rows of a job ordered by process and sequence; and the cursor of the next page, None on the last.

        Every page is read along the primary key, one process at a time, and so costs the same as the first. `warmup`
        and the steps are not in that key: a page ends after MOST_READ rows or MOST_PROCESSES processes with the rows
        that matched, even none, and the next page continues there.
        """
        found: list[RowMap] = []
        unread = MOST_READ
        sources = self._sources(job_id, wanted, cursor)
        table = step_samples.c
        for source, after in sources[:MOST_PROCESSES]:
            rows = [table.source_key == source, table.sequence > after]
            reached = after
            if wanted.of_rows:
                read, reached = self._reach(source, after, unread)
                unread -= read
                rows += [table.sequence <= reached, *wanted.of_rows]
            statement = (
                sa.select(step_samples, runs.c.id.label("run_id"), sample_sources.c.boot_id)
                .join(sample_sources, sample_sources.c.key == table.source_key)
                .join(runs, runs.c.key == table.run_key)
                .where(*rows)
                .order_by(table.sequence)
                .limit(limit + 1 - len(found))
            )
            found += self._rows(statement)
            if len(found) > limit:
                last = found[limit - 1]
                return found[:limit], (int(last["source_key"]), int(last["sequence"]))
            if unread <= 0:
                return found, (source, reached)
        if len(sources) > MOST_PROCESSES:
            return found, (sources[MOST_PROCESSES - 1][0], _WHOLE)
        return found, None

    def _reach(self, source: int, after: int, most: int) -> tuple[int, int]:
        """The number of rows of a process after `after`, up to `most`, and the last one's sequence number."""
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

    def _sources(self, job_id: str, wanted: SampleFilter, cursor: SampleCursor | None) -> list[SampleCursor]:
        """The next processes of the job, one more than a page reads, each with the sequence number to read after."""
        key = sample_sources.c.key
        statement = (
            sa.select(key)
            .join(runs, runs.c.key == sample_sources.c.run_key)
            .where(runs.c.job_id == job_id)
            .order_by(key)
            .limit(MOST_PROCESSES + 1)
        )
        if wanted.run_id is not None:
            statement = statement.where(runs.c.id == wanted.run_id)
        if wanted.rank is not None:
            statement = statement.where(sample_sources.c.rank == wanted.rank)
        if cursor is not None:
            statement = statement.where(key >= cursor[0] if cursor[1] < _WHOLE else key > cursor[0])
        keys = self._connection.execute(statement).scalars().all()
        return [(int(one), cursor[1] if cursor is not None and one == cursor[0] else -1) for one in keys]
