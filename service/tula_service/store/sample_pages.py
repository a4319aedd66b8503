"""Step samples of a job as they were stored, a page at a time, however many there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import sqlalchemy as sa

from tula_service.store._base import Repository, RowMap
from tula_service.store.tables import runs, sample_sources, step_samples

__all__ = ["SampleCursor", "SampleFilter", "SamplePages"]

SampleCursor: TypeAlias = tuple[int, int]
"""The last row of a page: its process and its sequence number, which is the order of the table itself."""


@dataclass(frozen=True)
class SampleFilter:
    """Which of a job's samples are asked for; None takes all. Both ends of the range of steps belong to it."""

    run_id: str | None = None
    rank: int | None = None
    warmup: bool | None = None
    first_step: int | None = None
    last_step: int | None = None


class SamplePages(Repository):
    """Rows of `step_samples` with the run and the process that they came from."""

    def page(
        self,
        job_id: str,
        wanted: SampleFilter,
        *,
        cursor: SampleCursor | None = None,
        limit: int = 500,
    ) -> tuple[list[RowMap], SampleCursor | None]:
        """Rows of a job, process after process, each in its order; and the cursor of the next page, None on the last.

        Every page is read along the primary key, one process at a time, and so costs the same as the first; `warmup`
        and the steps are no part of that key, so rows that they leave out are read too.
        """
        found: list[RowMap] = []
        for source, sequence in self._sources(job_id, wanted, cursor):
            table = step_samples.c
            statement = (
                sa.select(step_samples, runs.c.id.label("run_id"), sample_sources.c.boot_id)
                .join(sample_sources, sample_sources.c.key == table.source_key)
                .join(runs, runs.c.key == table.run_key)
                .where(table.source_key == source, table.sequence > sequence)
                .order_by(table.sequence)
                .limit(limit + 1 - len(found))
            )
            if wanted.warmup is not None:
                statement = statement.where(table.warmup == wanted.warmup)
            if wanted.first_step is not None:
                statement = statement.where(table.step >= wanted.first_step)
            if wanted.last_step is not None:
                statement = statement.where(table.step <= wanted.last_step)
            found += self._rows(statement)
            if len(found) > limit:
                last = found[limit - 1]
                return found[:limit], (int(last["source_key"]), int(last["sequence"]))
        return found, None

    def _sources(self, job_id: str, wanted: SampleFilter, cursor: SampleCursor | None) -> list[SampleCursor]:
        """Processes of the job from the cursor's on, each with the sequence number after which to read."""
        key = sample_sources.c.key
        statement = (
            sa.select(key)
            .join(runs, runs.c.key == sample_sources.c.run_key)
            .where(runs.c.job_id == job_id)
            .order_by(key)
        )
        if wanted.run_id is not None:
            statement = statement.where(runs.c.id == wanted.run_id)
        if wanted.rank is not None:
            statement = statement.where(sample_sources.c.rank == wanted.rank)
        if cursor is not None:
            statement = statement.where(key >= cursor[0])
        keys = self._connection.execute(statement).scalars().all()
        return [(int(one), cursor[1] if cursor is not None and one == cursor[0] else -1) for one in keys]
