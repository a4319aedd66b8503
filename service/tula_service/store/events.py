"""Events of a job, in the order in which they were committed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import sqlalchemy as sa

from tula_service.store._base import Repository
from tula_service.store.records import EventRecord, JsonObject
from tula_service.store.tables import events


class Events(Repository):
    """Append events, and read those after an id."""

    def append(self, job_id: str, kind: str, *, run_id: str | None = None, data: JsonObject | None = None) -> int:
        """Write an event; returns its id.

        On Postgres a lock per job, held until commit, keeps ids and commits in one order: a reader that has seen
        id 7 must never find a 6 appear behind it.
        """
        if self._postgres:
            self._connection.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtextextended(job_id, 0))))
        statement = sa.insert(events).values(job_id=job_id, run_id=run_id, kind=kind, at=self._now(), data=data or {})
        return int(self._connection.execute(statement.returning(events.c.id)).scalar_one())

    def after(self, job_id: str, last_id: int = 0, *, limit: int = 200) -> list[EventRecord]:
        """Events of the job with an id above `last_id`, oldest first."""
        rows = self._rows(
            sa.select(events).where(events.c.job_id == job_id, events.c.id > last_id).order_by(events.c.id).limit(limit)
        )
        return [
            EventRecord(row["id"], row["job_id"], row["run_id"], row["kind"], row["at"], row["data"]) for row in rows
        ]

    def recent(
        self, job_id: str, *, kinds: Sequence[str], run_id: str | None = None, limit: int = 20
    ) -> list[EventRecord]:
        """The newest events of these kinds, of one run if wanted, newest first."""
        statement = sa.select(events).where(events.c.job_id == job_id, events.c.kind.in_(kinds))
        if run_id is not None:
            statement = statement.where(events.c.run_id == run_id)
        rows = self._rows(statement.order_by(events.c.id.desc()).limit(limit))
        return [
            EventRecord(row["id"], row["job_id"], row["run_id"], row["kind"], row["at"], row["data"]) for row in rows
        ]

    def count_before(self, when: datetime) -> int:
        """The number of events older than `when`."""
        return int(
            self._connection.execute(
                sa.select(sa.func.count()).select_from(events).where(events.c.at < when)
            ).scalar_one()
        )

    def delete_before(self, when: datetime, *, limit: int) -> int:
        """Delete up to `limit` events older than `when`; returns their number."""
        chosen = sa.select(events.c.id).where(events.c.at < when).order_by(events.c.id).limit(limit)
        return int(self._connection.execute(sa.delete(events).where(events.c.id.in_(chosen))).rowcount)

    def last_id(self, job_id: str) -> int:
        """The newest event's id, 0 without any."""
        return int(
            self._connection.execute(
                sa.select(sa.func.coalesce(sa.func.max(events.c.id), 0)).where(events.c.job_id == job_id)
            ).scalar_one()
        )
