"""Stores probes of the links between ranks, by project and instance type."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

import sqlalchemy as sa

from tula_service.domain import JsonObject
from tula_service.store._base import Repository
from tula_service.store.tables import fabrics, jobs

_KEPT_OF_A_TYPE = 50
_AFFECTED = ("planning", "ready")


class Fabrics(Repository):
    """The table of fabric probes; `tula_wire.FabricProbe` defines the content of a probe."""

    def add(self, project_id: str, instance_type: str, probe: JsonObject, *, job_id: str | None = None) -> datetime:
        """Store a probe, mark the plans that it affects as stale, and return the time at which it was stored.

        If a run measured the probe, `job_id` is the run's job, and only this job's plan is marked as stale; otherwise,
        the plans of all open jobs of the project are marked as stale. Only the newest 50 probes with the same project,
        instance type and job are kept.
        """
        now = self._now()
        values = {"project_id": project_id, "instance_type": instance_type, "job_id": job_id}
        self._connection.execute(sa.insert(fabrics).values(**values, probe=probe, created_at=now))
        same = [fabrics.c[name].is_not_distinct_from(value) for name, value in values.items()]
        newest = sa.select(fabrics.c.key).where(*same).order_by(fabrics.c.key.desc()).limit(_KEPT_OF_A_TYPE)
        self._connection.execute(sa.delete(fabrics).where(*same, fabrics.c.key.not_in(newest.scalar_subquery())))
        self._connection.execute(
            sa.update(jobs)
            .where(jobs.c.project_id == project_id, jobs.c.state.in_(_AFFECTED))
            .where(sa.true() if job_id is None else jobs.c.id == job_id)
            .values(
                data_version=jobs.c.data_version + 1,
                plan_state=sa.case((jobs.c.plan_state == "current", "stale"), else_=jobs.c.plan_state),
            )
        )
        return now

    def list(
        self, project_id: str | None, *, instance_types: Collection[str] | None = None, limit: int
    ) -> list[tuple[JsonObject, datetime, str | None]]:
        """Return the newest probes of a project or of all projects, newest first, each with its time and job id."""
        columns = (fabrics.c.probe, fabrics.c.created_at, fabrics.c.job_id)
        statement = sa.select(*columns).order_by(fabrics.c.key.desc()).limit(limit)
        if project_id is not None:
            statement = statement.where(fabrics.c.project_id == project_id)
        if instance_types is not None:
            statement = statement.where(fabrics.c.instance_type.in_(instance_types))
        return [(probe, at, job_id) for probe, at, job_id in self._connection.execute(statement)]
