"""Events of a job, in the order in which they were committed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import sqlalchemy as sa

from tula_service.domain import JsonObject
from tula_service.store._base import Repository
from tula_service.store.tables import events
from tula_wire import Event


class Events(Repository):
    """The events table: appends events, and reads events after an id."""

    def append(self, job_id: str, kind: str, *, run_id: str | None = None, data: JsonObject | None = None) -> int:
        """Write an event and return its id.

        On Postgres, a lock per job, held until commit, keeps ids in commit order: after a reader has seen id 7, no id 6
        may appear.
        """
        if self._postgres:
            self._connection.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtextextended(job_id, 0))))
        statement = sa.insert(events).values(job_id=job_id, run_id=run_id, kind=kind, at=self._now(), data=data or {})
        return int(self._scalar(statement.returning(events.c.id)))

    def after(self, job_id: str, last_id: int = 0, *, limit: int = 200) -> list[Event]:
        """Return the job's events with an id above `last_id`, oldest first."""
        newer = sa.select(events).where(events.c.job_id == job_id, events.c.id > last_id)
        return [Event(**row) for row in self._rows(newer.order_by(events.c.id).limit(limit))]

    def recent(self, job_id: str, *, kinds: Sequence[str], run_id: str | None = None, limit: int = 20) -> list[Event]:
        """Return the newest events of these kinds, newest first, optionally of a single run."""
        statement = sa.select(events).where(events.c.job_id == job_id, events.c.kind.in_(kinds))
        if run_id is not None:
            statement = statement.where(events.c.run_id == run_id)
        return [Event(**row) for row in self._rows(statement.order_by(events.c.id.desc()).limit(limit))]

    def count_before(self, when: datetime) -> int:
        """Return the number of events older than `when`."""
        return int(self._scalar(sa.select(sa.func.count()).select_from(events).where(events.c.at < when)))

    def delete_before(self, when: datetime, *, limit: int) -> int:
        """Delete up to `limit` events older than `when`; return how many were deleted."""
        chosen = sa.select(events.c.id).where(events.c.at < when).order_by(events.c.id).limit(limit)
        return int(self._connection.execute(sa.delete(events).where(events.c.id.in_(chosen))).rowcount)

    def last_id(self, job_id: str) -> int:
        """Return the newest event's id, or 0 if there is none."""
        return self._scalar(sa.select(sa.func.max(events.c.id)).where(events.c.job_id == job_id)) or 0
