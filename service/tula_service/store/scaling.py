"""Versions of a job's gradient-scaling thresholds."""

from __future__ import annotations

import sqlalchemy as sa

from tula_service.domain import JsonObject
from tula_service.store._base import Repository
from tula_service.store.tables import scaling_versions


class Scaling(Repository):
    """All versions of the thresholds of a job; see `analysis/scaling.py` for their bodies."""

    def latest(self, job_id: str) -> tuple[int, JsonObject] | None:
        """The version in force and its body, None before the first."""
        row = self._row(
            sa.select(scaling_versions)
            .where(scaling_versions.c.job_id == job_id)
            .order_by(scaling_versions.c.version.desc())
            .limit(1)
        )
        return None if row is None else (row["version"], row["body"])

    def publish(self, job_id: str, body: JsonObject, *, after: int) -> bool:
        """Make `body` version `after + 1`; False if that version exists already."""
        statement = (
            self._insert(scaling_versions)
            .values(job_id=job_id, version=after + 1, body=body, created_at=self._now())
            .on_conflict_do_nothing(index_elements=["job_id", "version"])
            .returning(scaling_versions.c.version)
        )
        return self._row(statement) is not None
