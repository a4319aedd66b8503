"""Stores jobs, one per idempotency key, and lists them in pages at a cost independent of the number of jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, TypeAlias

import sqlalchemy as sa

from tula_service.domain import JobOrder, JsonObject
from tula_service.errors import Conflict, NotFound
from tula_service.store._base import Repository, RowMap, new_id
from tula_service.store.tables import jobs, runs
from tula_wire import Configuration, JobPage, JobSummary
from tula_wire.enums import FINAL_STATES

_FINAL = sorted(FINAL_STATES - {"cancelled"})
_DELETING = "deleting"
_PROFILED = sa.select(sa.func.count()).where(runs.c.job_id == jobs.c.id, runs.c.kind == "profile")
_SELECT_JOBS = sa.select(
    jobs,
    jobs.c.key.label("cursor"),
    _PROFILED.where(runs.c.state.in_(_FINAL)).scalar_subquery().label("runs_done"),
    _PROFILED.where(runs.c.state != "cancelled").scalar_subquery().label("runs_planned"),
)
_ORDERS: Mapping[JobOrder, Sequence[sa.ColumnElement[Any]]] = {
    "newest": (),
    "name": (sa.func.lower(jobs.c.name),),
    "time": (jobs.c.predicted_time_s.nulls_last(),),
    "cost": (jobs.c.predicted_cost_usd.nulls_last(),),
    "error": (sa.func.abs(jobs.c.prediction_error).desc().nulls_last(),),
}
_SEARCHED = sa.table("jobs_search", sa.column("rowid"))
"""The SQLite table of the trigrams in each job's name and model name, which triggers keep up to date."""
_MATCH: sa.ColumnElement[Any] = sa.literal_column("jobs_search")
_TRIGRAMS: sa.ColumnElement[Any] = sa.literal_column("tula_trigrams(lower(jobs.name || ' ' || jobs.model_name))")
"""The Postgres index expression for the trigrams in a job's name and model name."""
_LEAST_SEARCHED = 3
"""The minimum length of a text that contains a trigram; a search for a shorter text must read every name."""
_KEY_TAKEN = "This Idempotency-Key was already used for another specification: send a new key."

PlanState: TypeAlias = Literal["current", "stale", "stale_out_of_memory"]
"""The state of a job's plan: it either takes all runs of the job into account, or is stale and must be recomputed.

After an out-of-memory failure, pending runs may not fit into memory either, so none can be claimed until the plan is
current.
"""


class JobRecord(JobSummary):
    """A job with all its fields; use cases keep the fields of `JobSummary`, which lists show, up to date.

    `data_version` increases with every change that can affect a fit, and is therefore part of the key of every cached
    recommendation. Failed runs whose key is at most `retried_up_to_key` may be profiled again. `cross_validated_error`
    was computed from exactly the runs `cross_validated_runs`, with the model version `cross_validated_model`.
    """

    cursor: int
    project_id: str
    spec: JsonObject
    data_version: int
    plan_reason: str
    plan_state: PlanState
    retried_up_to_key: int
    cross_validated_error: float | None
    cross_validated_runs: Sequence[str]
    cross_validated_model: str | None


class Jobs(Repository):
    """The table of jobs. Its methods treat jobs that are being deleted as nonexistent."""

    def create(
        self, project_id: str, spec: JsonObject, *, idempotency_key: str | None = None, fingerprint: str | None = None
    ) -> tuple[JobRecord, bool]:
        """Create a job and return (job, True), or (existing job, False) if a job has the same key or request.

        `fingerprint` is a digest of the request; a job with the same `idempotency_key` takes precedence over a job with
        the same fingerprint. Raises Conflict if the key was already used with a different request.
        """
        # A request without a key or fingerprint must match no job. Without sa.literal, the comparison with None would
        # become IS NULL and match all jobs without a key or fingerprint.
        same_key = jobs.c.idempotency_key == sa.literal(idempotency_key, sa.Text)
        same_request = jobs.c.fingerprint == sa.literal(fingerprint, sa.Text)
        same = (
            sa.select(jobs.c.id, jobs.c.fingerprint)
            .where(jobs.c.project_id == project_id, same_key | same_request, jobs.c.state != _DELETING)
            .order_by(sa.case((same_key, 0), else_=1), jobs.c.key.desc())
            .limit(1)
        )
        existing = self._row(same)
        if existing is None:
            job_id, now = new_id("job"), self._now()
            of_spec = {"name": spec["name"], "model_name": spec["model"]["name"], "objective": spec["objective"]}
            of_request = {"project_id": project_id, "idempotency_key": idempotency_key, "fingerprint": fingerprint}
            start = {"state": "planning", "data_version": 0, "plan_reason": "", "created_at": now, "updated_at": now}
            insert = self._insert(jobs).values(id=job_id, spec=spec, **of_spec, **of_request, **start)
            insert = insert.on_conflict_do_nothing(index_elements=["project_id", "idempotency_key"])
            if self._row(insert.returning(jobs.c.id)) is not None:
                return self.get(job_id), True
            existing = self._row(same)  # the row that another transaction has just inserted
        if existing is None or existing["fingerprint"] != fingerprint:
            raise Conflict(_KEY_TAKEN, field="Idempotency-Key")
        return self.get(existing["id"]), False

    def get(self, job_id: str) -> JobRecord:
        """Return the job with this id. Raises NotFound."""
        row = self._row(_SELECT_JOBS.where(jobs.c.id == job_id, jobs.c.state != _DELETING))
        if row is None:
            raise NotFound.of("job", job_id)
        return _job_record(row)

    def lock(self, job_id: str) -> JobRecord:
        """Lock the job until this transaction ends, and return it; only one transaction at a time may plan or publish.

        The lock is FOR NO KEY UPDATE, so that other transactions can insert rows that refer to the job, such as events.
        With FOR UPDATE, a transaction that holds the lock of a run or of the job's events would have to wait for this
        lock before it could insert a row.
        """
        row = sa.select(jobs.c.key).where(jobs.c.id == job_id)
        self._connection.execute(row.with_for_update(key_share=True))  # on SQLite, this is a plain query
        return self.get(job_id)

    def data_version(self, job_id: str) -> int:
        """Return the version of the data that a fit of this job reads. Raises NotFound if there is no such job."""
        version = self._scalar(sa.select(jobs.c.data_version).where(jobs.c.id == job_id, jobs.c.state != _DELETING))
        if version is None:
            raise NotFound.of("job", job_id)
        return int(version)

    def list(
        self,
        *,
        project_id: str | None = None,
        name: str | None = None,
        search: str | None = None,
        state: str | None = None,
        include_archived: bool = False,
        order: JobOrder = "newest",
        cursor: int | None = None,
        limit: int = 50,
        count_up_to: int | None = None,
    ) -> JobPage:
        """Return a page of jobs in this `order`; `search` matches part of a job's name or model name, ignoring case.

        Further pages are supported only in the order "newest".

        The query time does not grow with the number of jobs, since a page starts after the key in its cursor, jobs are
        counted only up to `count_up_to`, and a search for three or more characters uses trigrams.
        """
        conditions: list[sa.ColumnElement[bool]] = [jobs.c.state != _DELETING]
        key: sa.ColumnElement[Any] = jobs.c.key
        if project_id is not None:
            conditions.append(jobs.c.project_id == project_id)
        if name is not None:
            conditions.append(jobs.c.name == name)
        if search and "\0" in search:  # neither SQLite nor Postgres allows NUL in this text
            return JobPage(jobs=[], total=0)
        if search:
            # SQLite's LIKE ignores case, and takes half as long without a call of lower() for every name.
            contains = sa.Column.icontains if self._postgres else sa.Column.contains
            conditions.append(
                sa.or_(*(contains(column, search, autoescape=True) for column in (jobs.c.name, jobs.c.model_name)))
            )
            if len(search) >= _LEAST_SEARCHED and self._postgres:
                conditions.append(_TRIGRAMS.op("@>")(sa.func.tula_trigrams(sa.func.lower(search))))
            elif len(search) >= _LEAST_SEARCHED:
                phrase = '"' + search.replace('"', '""') + '"'
                conditions += [_SEARCHED.c.rowid == jobs.c.key, _MATCH.op("MATCH")(phrase)]
                key = _SEARCHED.c.rowid  # so ordered, SQLite reads matches only until the page is full
        if state is not None:
            conditions.append(jobs.c.state == state)
        elif not include_archived:
            conditions.append(jobs.c.state != "archived")
        counted = sa.select(jobs.c.key).where(*conditions)
        some = (counted if self._postgres else counted.order_by(key.desc())).limit(count_up_to).subquery("some")
        total = self._scalar(sa.select(sa.func.count()).select_from(some))
        page = sa.select(jobs.c.key).where(*conditions).order_by(*_ORDERS[order], key.desc()).limit(limit + 1)
        if cursor is not None:
            page = page.where(key < cursor)
        keys = self._connection.execute(page).scalars().all()
        records = {row["key"]: _job_record(row) for row in self._rows(_SELECT_JOBS.where(jobs.c.key.in_(keys[:limit])))}
        following = str(keys[limit - 1]) if order == "newest" and len(keys) > limit else None
        return JobPage(jobs=[records[key] for key in keys[:limit]], total=total, next_cursor=following)

    def update(self, job_id: str, *, bump: bool = False, **values: Any) -> JobRecord:
        """Change columns of a job; `bump` also increments its data version, which makes cached results stale.

        The value of `recommended` is a Configuration or None. Raises NotFound.
        """
        if values.get("recommended") is not None:
            values["recommended"] = values["recommended"].as_json()
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
        """Record that the plan must be recomputed; call this in the transaction that changes the inputs of the plan."""
        statement = sa.update(jobs).where(jobs.c.id == job_id)
        if out_of_memory:
            statement = statement.values(plan_state="stale_out_of_memory")
        else:
            statement = statement.where(jobs.c.plan_state == "current").values(plan_state="stale")
        self._connection.execute(statement)

    def begin_delete(self, job_id: str) -> None:
        """Make the job invisible; `usecases/jobs.py` then deletes its rows in small transactions."""
        self._connection.execute(
            sa.update(jobs).where(jobs.c.id == job_id).values(state=_DELETING, idempotency_key=None)
        )

    def archived_before(self, when: datetime) -> Sequence[str]:
        """Return the ids of archived jobs that were last changed before `when`."""
        statement = sa.select(jobs.c.id).where(jobs.c.state == "archived", jobs.c.updated_at < when)
        return self._connection.execute(statement.order_by(jobs.c.key)).scalars().all()

    def deleting(self) -> Sequence[str]:
        """Return the ids of jobs whose deletion has begun but has not finished, perhaps because it was interrupted."""
        return self._connection.execute(sa.select(jobs.c.id).where(jobs.c.state == _DELETING)).scalars().all()

    def delete(self, job_id: str) -> None:
        """Delete the job and all rows that refer to it; this is slow for a job with much data (see `begin_delete`)."""
        # Lock the job and then its runs by key, which is the order used by transactions that store samples.
        self._connection.execute(sa.select(jobs.c.key).where(jobs.c.id == job_id).with_for_update())
        of_job = sa.select(runs.c.key).where(runs.c.job_id == job_id).order_by(runs.c.key)
        self._connection.execute(of_job.with_for_update())
        self._connection.execute(sa.delete(jobs).where(jobs.c.id == job_id))


def _job_record(row: RowMap) -> JobRecord:
    """Return the record for a row of `_SELECT_JOBS`, without validation, since the row was valid when it was stored."""
    values = {name: row[name] for name in JobRecord.model_fields} | {
        "recommended": None if row["recommended"] is None else Configuration.from_json(row["recommended"]),
        "cross_validated_runs": row["cross_validated_runs"] or (),
    }
    return JobRecord.model_construct(**values)
