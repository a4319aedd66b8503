"""Jobs: registration once per idempotency key, pages in constant time, and the version that keys every fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tula_service.domain import PlanState, RunKind, RunState
from tula_service.errors import Conflict, NotFound
from tula_service.store._base import Repository, RowMap, new_id
from tula_service.store.records import JobPage, JobRecord, NewJob
from tula_service.store.tables import jobs, runs
from tula_wire import Configuration

_UPDATABLE = frozenset(
    {
        "name",
        "state",
        "objective",
        "spec",
        "plan_reason",
        "recommended",
        "predicted_time_s",
        "predicted_cost_usd",
        "saving_vs_smallest_batch",
        "saving_vs_largest_batch",
        "prediction_error",
        "plan_state",
        "retried_up_to_key",
        "cross_validated_error",
        "cross_validated_runs",
    }
)
_FINAL = [state.value for state in RunState if state.is_final and state is not RunState.CANCELLED]
_DELETING = "deleting"


class Jobs(Repository):
    """The jobs table. A job that is being deleted no longer exists for any reader here."""

    def create(self, job: NewJob) -> tuple[JobRecord, bool]:
        """Register a job and say whether it is new; False when the same idempotency key was used before.

        Raises Conflict when the key came with a different request.
        """
        now = self._now()
        values = {
            "id": new_id("job"),
            "project_id": job.project_id,
            "name": job.name,
            "model_name": job.model_name,
            "state": "planning",
            "objective": job.objective,
            "spec": job.spec,
            "data_version": 0,
            "plan_reason": "",
            "created_at": now,
            "updated_at": now,
            "idempotency_key": job.idempotency_key,
            "fingerprint": job.fingerprint,
        }
        statement = (
            self._insert(jobs).values(values).on_conflict_do_nothing(index_elements=["project_id", "idempotency_key"])
        )
        if self._row(statement.returning(jobs.c.id)) is not None:
            return self.get(str(values["id"])), True
        known = self._row(
            sa.select(jobs.c.id, jobs.c.fingerprint, jobs.c.state).where(
                jobs.c.project_id == job.project_id, jobs.c.idempotency_key == job.idempotency_key
            )
        )
        if known is None or known["fingerprint"] != job.fingerprint or known["state"] == _DELETING:
            raise Conflict(
                "This Idempotency-Key was already used for a different job: send a new key.", field="Idempotency-Key"
            )
        return self.get(known["id"]), False

    def registered(self, project_id: str, *, idempotency_key: str | None, fingerprint: str) -> JobRecord | None:
        """The job registered under this key, or with this fingerprint; None when the registration is a new one.

        Raises Conflict when the key came with a different request.
        """
        if idempotency_key is not None:
            known = self._row(
                sa.select(jobs.c.id, jobs.c.fingerprint, jobs.c.state).where(
                    jobs.c.project_id == project_id, jobs.c.idempotency_key == idempotency_key
                )
            )
            if known is not None and (known["fingerprint"] != fingerprint or known["state"] == _DELETING):
                raise Conflict(
                    "This Idempotency-Key was already used for a different job: send a new key.",
                    field="Idempotency-Key",
                )
            if known is not None:
                return self.get(known["id"])
        same = self._row(
            sa.select(jobs.c.id)
            .where(jobs.c.project_id == project_id, jobs.c.fingerprint == fingerprint, jobs.c.state != _DELETING)
            .order_by(jobs.c.key.desc())
            .limit(1)
        )
        return None if same is None else self.get(same["id"])

    def get(self, job_id: str, *, project_id: str | None = None) -> JobRecord:
        """The job, if it exists (and belongs to `project_id`, when given). Raises NotFound."""
        statement = sa.select(jobs).where(jobs.c.id == job_id, jobs.c.state != _DELETING)
        if project_id is not None:
            statement = statement.where(jobs.c.project_id == project_id)
        row = self._row(statement)
        if row is None:
            raise NotFound.of("job", job_id)
        return self._record(row, self._counts([job_id]))

    def lock(self, job_id: str) -> JobRecord:
        """The job, locked until this transaction ends: only one transaction at a time plans or publishes for it.

        FOR NO KEY UPDATE: rows that refer to the job, such as events, may be inserted meanwhile. A plain FOR UPDATE
        would make their foreign keys wait here while they hold a run or the lock of the job's events.
        """
        if self._postgres:
            row = sa.select(jobs.c.key).where(jobs.c.id == job_id)
            self._connection.execute(row.with_for_update(key_share=True))
        return self.get(job_id)

    def data_version(self, job_id: str) -> int:
        """The version of all data that a fit of this job reads. Raises NotFound."""
        version = self._connection.execute(
            sa.select(jobs.c.data_version).where(jobs.c.id == job_id, jobs.c.state != _DELETING)
        ).scalar()
        if version is None:
            raise NotFound.of("job", job_id)
        return int(version)

    def list(
        self,
        *,
        project_id: str | None = None,
        search: str | None = None,
        states: Sequence[str] | None = None,
        include_archived: bool = False,
        cursor: int | None = None,
        limit: int = 50,
        count_up_to: int | None = None,
    ) -> JobPage:
        """Jobs newest first; `search` is a case-blind part of the job's or the model's name.

        The page starts behind its cursor's key and the total is counted up to `count_up_to`, so that neither takes
        longer with the number of jobs; a search that few match reads the project's part of the index through.
        """
        wanted: list[sa.ColumnElement[bool]] = [jobs.c.state != _DELETING]
        if project_id is not None:
            wanted.append(jobs.c.project_id == project_id)
        if search:
            wanted.append(
                jobs.c.name.icontains(search, autoescape=True) | jobs.c.model_name.icontains(search, autoescape=True)
            )
        if states:
            wanted.append(jobs.c.state.in_(states))
        elif not include_archived:
            wanted.append(jobs.c.state != "archived")
        some = sa.select(sa.literal(1)).select_from(jobs).where(*wanted).limit(count_up_to).subquery("some")
        total = self._connection.execute(sa.select(sa.func.count()).select_from(some)).scalar_one()
        page = sa.select(jobs).where(*wanted).order_by(jobs.c.key.desc()).limit(limit + 1)
        if cursor is not None:
            page = page.where(jobs.c.key < cursor)
        rows = self._rows(page)
        counts = self._counts([row["id"] for row in rows[:limit]])
        records = [self._record(row, counts) for row in rows[:limit]]
        return JobPage(records, total, records[-1].cursor if len(rows) > limit else None)

    def update(self, job_id: str, *, bump: bool = False, **values: Any) -> JobRecord:
        """Change columns of a job; `bump` also moves its data version, so that no cached fit is used again.

        `recommended` takes a Configuration or None. Raises NotFound; TypeError for an unknown column.
        """
        unknown = set(values) - _UPDATABLE
        if unknown:
            raise TypeError(f"jobs have no such column to update: {sorted(unknown)}")
        if values.get("recommended") is not None:
            values["recommended"] = asdict(values["recommended"])
        if bump:
            values["data_version"] = jobs.c.data_version + 1
        statement = (
            sa.update(jobs)
            .where(jobs.c.id == job_id, jobs.c.state != _DELETING)
            .values(updated_at=self._now(), **values)
        )
        if self._connection.execute(statement).rowcount == 0:
            raise NotFound.of("job", job_id)
        return self.get(job_id)

    def mark_plan_stale(self, job_id: str, *, out_of_memory: bool = False) -> None:
        """Record, in the transaction that changes what the plan rests on, that the plan must be computed again."""
        statement = sa.update(jobs).where(jobs.c.id == job_id)
        if out_of_memory:
            statement = statement.values(plan_state=PlanState.STALE_OUT_OF_MEMORY.value)
        else:
            statement = statement.where(jobs.c.plan_state == PlanState.CURRENT.value).values(
                plan_state=PlanState.STALE.value
            )
        self._connection.execute(statement)

    def bump(self, job_id: str) -> None:
        """Increment the data version, because something that a fit reads has changed."""
        self._connection.execute(
            sa.update(jobs).where(jobs.c.id == job_id).values(data_version=jobs.c.data_version + 1)
        )

    def begin_delete(self, job_id: str) -> None:
        """Make the job invisible at once; `usecases/jobs.py` then removes its rows piece by piece."""
        self._connection.execute(
            sa.update(jobs).where(jobs.c.id == job_id).values(state=_DELETING, idempotency_key=None)
        )

    def archived_before(self, when: datetime) -> Sequence[str]:
        """Archived jobs that were last changed before `when`."""
        statement = sa.select(jobs.c.id).where(jobs.c.state == "archived", jobs.c.updated_at < when)
        return [row["id"] for row in self._rows(statement.order_by(jobs.c.key))]

    def deleting(self) -> Sequence[str]:
        """Jobs whose deletion has begun and may have been interrupted."""
        return [row["id"] for row in self._rows(sa.select(jobs.c.id).where(jobs.c.state == _DELETING))]

    def delete(self, job_id: str) -> None:
        """Delete the job and all rows that refer to it; slow for a job with much data, see `begin_delete`."""
        self._connection.execute(sa.delete(jobs).where(jobs.c.id == job_id))

    def _counts(self, job_ids: Sequence[str]) -> dict[str, tuple[int, int]]:
        if not job_ids:
            return {}
        done = sa.func.sum(sa.case((runs.c.state.in_(_FINAL), 1), else_=0))
        rows = self._connection.execute(
            sa.select(runs.c.job_id, done, sa.func.count())
            .where(
                runs.c.job_id.in_(job_ids),
                runs.c.kind == RunKind.PROFILE.value,
                runs.c.state != RunState.CANCELLED.value,
            )
            .group_by(runs.c.job_id)
        )
        return {job_id: (int(finished), int(planned)) for job_id, finished, planned in rows}

    @staticmethod
    def _record(row: RowMap, counts: dict[str, tuple[int, int]]) -> JobRecord:
        done, planned = counts.get(row["id"], (0, 0))
        return JobRecord(
            id=row["id"],
            project_id=row["project_id"],
            name=row["name"],
            model_name=row["model_name"],
            state=row["state"],
            objective=row["objective"],
            spec=row["spec"],
            data_version=row["data_version"],
            plan_reason=row["plan_reason"],
            created_at=row["created_at"],
            updated_at=row["updated_at"],
            recommended=None if row["recommended"] is None else Configuration(**row["recommended"]),
            predicted_time_s=row["predicted_time_s"],
            predicted_cost_usd=row["predicted_cost_usd"],
            saving_vs_smallest_batch=row["saving_vs_smallest_batch"],
            saving_vs_largest_batch=row["saving_vs_largest_batch"],
            prediction_error=row["prediction_error"],
            plan_state=PlanState(row["plan_state"]),
            retried_up_to_key=row["retried_up_to_key"],
            cross_validated_error=row["cross_validated_error"],
            cross_validated_runs=row["cross_validated_runs"] or (),
            runs_done=done,
            runs_planned=planned,
            cursor=row["key"],
        )
