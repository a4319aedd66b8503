"""Stores each job's events, in the order in which they were committed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import sqlalchemy as sa

from tula_service.domain import JsonObject
from tula_service.store._base import Repository
from tula_service.store.tables import events
from tula_wire import Event


class Events(Repository):
    """The table of events."""

    def append(self, job_id: str, kind: str, *, run_id: str | None = None, data: JsonObject | None = None) -> int:
        """Append an event and return its id.

        On Postgres, a lock per job, held until commit, ensures that ids increase in commit order. Otherwise, a reader
        that has already received event 7 would miss event 6 if event 6 were committed later.
        """
        if self._postgres:
            self._connection.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtextextended(job_id, 0))))
        statement = sa.insert(events).values(job_id=job_id, run_id=run_id, kind=kind, at=self._now(), data=data or {})
        return int(self._scalar(statement.returning(events.c.id)))

    def after(self, job_id: str, last_id: int = 0, *, limit: int = 200) -> list[Event]:
        """Return the job's events whose ids are greater than `last_id`, oldest first."""
        newer = sa.select(events).where(events.c.job_id == job_id, events.c.id > last_id)
        return [Event(**row) for row in self._rows(newer.order_by(events.c.id).limit(limit))]

    def recent(self, job_id: str, *, kinds: Sequence[str], run_id: str | None = None, limit: int = 20) -> list[Event]:
        """Return the job's newest events of these kinds, newest first; with `run_id`, only that run's events."""
        statement = sa.select(events).where(events.c.job_id == job_id, events.c.kind.in_(kinds))
        if run_id is not None:
            statement = statement.where(events.c.run_id == run_id)
        return [Event(**row) for row in self._rows(statement.order_by(events.c.id.desc()).limit(limit))]

    def count_before(self, when: datetime) -> int:
        """Return the number of events older than `when`."""
        return int(self._scalar(sa.select(sa.func.count()).select_from(events).where(events.c.at < when)))

    def delete_before(self, when: datetime, *, limit: int) -> int:
        """Delete up to `limit` events older than `when`, and return the number of deleted events."""
        chosen = sa.select(events.c.id).where(events.c.at < when).order_by(events.c.id).limit(limit)
        return int(self._connection.execute(sa.delete(events).where(events.c.id.in_(chosen))).rowcount)

    def last_id(self, job_id: str) -> int:
        """Return the id of the job's newest event, or 0 if the job has no event."""
        return self._scalar(sa.select(sa.func.max(events.c.id)).where(events.c.job_id == job_id)) or 0
