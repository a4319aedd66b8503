"""What jobs teach later jobs of their project: posteriors by instance type, and predictions beside measurements."""

from __future__ import annotations

import sqlalchemy as sa

from tula_service.store._base import Repository
from tula_service.store.records import EarlierLessons, JsonObject, PredictionPairs
from tula_service.store.tables import job_lessons, jobs


class Lessons(Repository):
    """The lessons table; a job without a row has taught nothing yet."""

    def prediction_pairs(self, job_id: str) -> PredictionPairs:
        """(predicted, low, high, measured) step times of the job's trainings, newest first."""
        pairs = sa.select(job_lessons.c.prediction_pairs).where(job_lessons.c.job_id == job_id)
        return list(self._scalar(pairs) or ())

    def put_posteriors(self, job_id: str, posteriors: JsonObject) -> None:
        """Replace what the job learned, by instance type."""
        insert = self._insert(job_lessons).values(job_id=job_id, posteriors=posteriors, prediction_pairs=[])
        self._connection.execute(
            insert.on_conflict_do_update(index_elements=["job_id"], set_={"posteriors": posteriors})
        )

    def add_prediction_pair(self, job_id: str, pair: list[float], *, keep: int) -> None:
        """Prepend a pair and keep the newest `keep`; the caller holds the job's lock."""
        pairs = [pair, *self.prediction_pairs(job_id)][:keep]
        insert = self._insert(job_lessons).values(job_id=job_id, posteriors={}, prediction_pairs=pairs)
        self._connection.execute(
            insert.on_conflict_do_update(index_elements=["job_id"], set_={"prediction_pairs": pairs})
        )

    def of_earlier_jobs(self, project_id: str, *, before: int, limit: int) -> list[EarlierLessons]:
        """Lessons of those of the newest `limit` jobs before this cursor that have any, newest first.

        The number of jobs looked at is bounded, so that a large project costs no more.
        """
        newest = (
            sa.select(jobs.c.key, jobs.c.id)
            .where(jobs.c.project_id == project_id, jobs.c.key < before)
            .order_by(jobs.c.key.desc())
            .limit(limit)
            .subquery("newest")
        )
        statement = (
            sa.select(jobs.c.spec, job_lessons.c.posteriors, job_lessons.c.prediction_pairs)
            .join(newest, newest.c.key == jobs.c.key)
            .join(job_lessons, job_lessons.c.job_id == newest.c.id)
            .order_by(newest.c.key.desc())
        )
        return [EarlierLessons(**row) for row in self._rows(statement)]
