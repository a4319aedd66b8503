"""Answers kept by the data version and model version they rest on, and versions of scaling thresholds."""

from __future__ import annotations

import sqlalchemy as sa

from tula_service.store._base import Repository
from tula_service.store.records import JsonObject, ScalingRecord
from tula_service.store.tables import fits, jobs, scaling_versions

__all__ = ["Fits", "Scaling"]


class Fits(Repository):
    """A cache that every worker and replica shares; `body` is JSON text, kept so that a hit can be sent as it is."""

    def get(self, job_id: str, name: str, *, data_version: int, model_version: str) -> str | None:
        """The kept answer called `name`, if it rests on exactly these versions."""
        body = self._connection.execute(
            sa.select(fits.c.body).where(
                fits.c.job_id == job_id,
                fits.c.name == name,
                fits.c.data_version == data_version,
                fits.c.model_version == model_version,
            )
        ).scalar()
        return None if body is None else str(body)

    def at_least(self, job_id: str, name: str, *, data_version: int, model_version: str) -> str | None:
        """The kept answer called `name`, if it rests on this version of the data or on a later one."""
        body = self._connection.execute(
            sa.select(fits.c.body).where(
                fits.c.job_id == job_id,
                fits.c.name == name,
                fits.c.data_version >= data_version,
                fits.c.model_version == model_version,
            )
        ).scalar()
        return None if body is None else str(body)

    def count(self) -> int:
        """How many answers are kept."""
        return int(self._connection.execute(sa.select(sa.func.count()).select_from(fits)).scalar_one())

    def put(self, job_id: str, name: str, *, data_version: int, model_version: str, body: str) -> None:
        """Keep an answer, unless one that rests on newer data is there already."""
        values = {
            "data_version": data_version,
            "model_version": model_version,
            "body": body,
            "created_at": self._now(),
        }
        insert = self._insert(fits).values(job_id=job_id, name=name, **values)
        self._connection.execute(
            insert.on_conflict_do_update(
                index_elements=["job_id", "name"], set_=values, where=fits.c.data_version <= data_version
            )
        )

    def of_earlier_jobs(
        self, project_id: str, name: str, *, before: int, model_version: str, limit: int = 200
    ) -> list[tuple[JsonObject, str]]:
        """(specification, answer called `name`) of those of the `limit` jobs before this cursor that keep one.

        Newest first. Looks at a bounded number of jobs, so that it costs the same in a large project.
        """
        newest = (
            sa.select(jobs.c.key, jobs.c.id)
            .where(jobs.c.project_id == project_id, jobs.c.key < before)
            .order_by(jobs.c.key.desc())
            .limit(limit)
            .subquery("newest")
        )
        statement = (
            sa.select(jobs.c.spec, fits.c.body)
            .join(newest, newest.c.key == jobs.c.key)
            .join(fits, fits.c.job_id == newest.c.id)
            .where(fits.c.name == name, fits.c.model_version == model_version)
            .order_by(newest.c.key.desc())
        )
        return [(row["spec"], row["body"]) for row in self._rows(statement)]


class Scaling(Repository):
    """Scaling thresholds of a job, each version kept."""

    def latest(self, job_id: str) -> ScalingRecord | None:
        """The version that agents get now, or None before the first."""
        row = self._row(
            sa.select(scaling_versions)
            .where(scaling_versions.c.job_id == job_id)
            .order_by(scaling_versions.c.version.desc())
            .limit(1)
        )
        return None if row is None else ScalingRecord(row["job_id"], row["version"], row["body"], row["created_at"])

    def history(self, job_id: str, *, limit: int = 200) -> list[ScalingRecord]:
        """The newest `limit` versions, oldest of them first."""
        rows = self._rows(
            sa.select(scaling_versions)
            .where(scaling_versions.c.job_id == job_id)
            .order_by(scaling_versions.c.version.desc())
            .limit(limit)
        )
        return [ScalingRecord(row["job_id"], row["version"], row["body"], row["created_at"]) for row in rows[::-1]]

    def publish(self, job_id: str, body: JsonObject, *, after: int) -> bool:
        """Make `body` version `after + 1`; False when somebody else published that version first."""
        statement = (
            self._insert(scaling_versions)
            .values(job_id=job_id, version=after + 1, body=body, created_at=self._now())
            .on_conflict_do_nothing(index_elements=["job_id", "version"])
            .returning(scaling_versions.c.version)
        )
        return self._row(statement) is not None
