"""Runs: moved from state to state only by compare-and-set."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from tula_service.domain import EndCause, RunKind, RunOrigin, RunState
from tula_service.errors import NotFound
from tula_service.store._base import Repository, RowMap, configuration_from, new_id
from tula_service.store.records import NewRun, RunRecord
from tula_service.store.tables import jobs, run_summaries, runs

_UPDATABLE = frozenset(
    {
        "message",
        "dropped",
        "failed_local_batch_size",
        "predicted_step_time_s",
        "recommendation_id",
        "straggler_rank",
        "drifted",
        "drift_state",
        "scaling_step",
        "position",
        "purpose",
        "started_at",
        "finished_at",
        "holder",
        "lease_s",
        "lease_expires_at",
    }
)
_OBSERVED = ("world_size", "local_batch_size", "grad_accum_steps")
SELECT_RUNS = sa.select(
    runs, run_summaries.c.step_time_s, *(run_summaries.c[name].label(f"observed_{name}") for name in _OBSERVED)
).outerjoin(run_summaries, run_summaries.c.run_key == runs.c.key)


class Runs(Repository):
    """The runs table; `store/leases.py` claims runs and renews their leases."""

    def create(self, job_id: str, run: NewRun) -> RunRecord:
        """Add a run to a job and move the job's data version. Raises NotFound without such a job."""
        project_id = self._connection.execute(sa.select(jobs.c.project_id).where(jobs.c.id == job_id)).scalar()
        if project_id is None:
            raise NotFound.of("job", job_id)
        now = self._now()
        identity = new_id("run")
        self._connection.execute(
            sa.insert(runs).values(
                id=identity,
                job_id=job_id,
                project_id=project_id,
                kind=run.kind.value,
                state=run.state.value,
                **asdict(run.configuration),
                origin=run.origin.value,
                purpose=run.purpose,
                instruction=run.instruction,
                method=run.method,
                position=run.position,
                holder=run.holder,
                lease_s=run.lease_s,
                lease_expires_at=None if run.lease_s is None else now + timedelta(seconds=run.lease_s),
                created_at=now,
                started_at=now if run.state is RunState.RUNNING else None,
                num_samples=0,
                dropped=0,
                predicted_step_time_s=run.predicted_step_time_s,
                recommendation_id=run.recommendation_id,
                drifted=False,
            )
        )
        self._bump(job_id)
        return self.get(identity)

    def get(self, run_id: str) -> RunRecord:
        """The run. Raises NotFound."""
        row = self._row(SELECT_RUNS.where(runs.c.id == run_id))
        if row is None:
            raise NotFound.of("run", run_id)
        return run_record(row)

    def list(
        self,
        job_id: str,
        *,
        kind: RunKind | None = None,
        states: Collection[RunState] | None = None,
        cursor: int | None = None,
        limit: int = 1000,
        plan_order: bool = False,
    ) -> list[RunRecord]:
        """Runs of a job: newest first (older than the key `cursor`), or in the order in which they are claimed."""
        statement = SELECT_RUNS.where(runs.c.job_id == job_id).limit(limit)
        if kind is not None:
            statement = statement.where(runs.c.kind == kind.value)
        if states is not None:
            statement = statement.where(runs.c.state.in_([state.value for state in states]))
        if cursor is not None:
            statement = statement.where(runs.c.key < cursor)
        order = (runs.c.position, runs.c.key) if plan_order else (runs.c.key.desc(),)
        return [run_record(row) for row in self._rows(statement.order_by(*order))]

    def transition(
        self,
        run_id: str,
        *,
        expected: Collection[RunState],
        to: RunState,
        end_cause: EndCause | None = None,
        **values: Any,
    ) -> bool:
        """Move a run from one of `expected` to `to`; False, and nothing changed, when it is in another state by now.

        Sets `started_at` and `finished_at`, ends the lease of a final state, and increments the job's data version.
        """
        self._check(values)
        now = self._now()
        values |= {"end_cause": None if end_cause is None else end_cause.value}
        if to is RunState.RUNNING:
            values["started_at"] = sa.func.coalesce(runs.c.started_at, sa.literal(now, runs.c.started_at.type))
        values["finished_at"] = now if to.is_final else None
        if to.is_final:
            values["lease_expires_at"] = None
        if to is RunState.PENDING:
            values |= {"holder": None, "lease_s": None, "lease_expires_at": None}
        changed = self._connection.execute(
            sa.update(runs)
            .where(runs.c.id == run_id, runs.c.state.in_([state.value for state in expected]))
            .values(state=to.value, **values)
            .returning(runs.c.job_id)
        ).first()
        if changed is None:
            return False
        self._bump(changed[0])
        return True

    def update(self, run_id: str, *, bump: bool = False, **values: Any) -> None:
        """Change columns other than the state. Raises NotFound; TypeError for a column that may not change."""
        self._check(values)
        changed = self._connection.execute(
            sa.update(runs).where(runs.c.id == run_id).values(**values).returning(runs.c.job_id)
        ).first()
        if changed is None:
            raise NotFound.of("run", run_id)
        if bump:
            self._bump(changed[0])

    def cancel_pending(self, job_id: str, run_ids: Sequence[str]) -> int:
        """Cancel those of these runs that are still pending; returns their number."""
        if not run_ids:
            return 0
        statement = (
            sa.update(runs)
            .where(runs.c.job_id == job_id, runs.c.id.in_(run_ids), runs.c.state == RunState.PENDING.value)
            .values(state=RunState.CANCELLED.value, finished_at=self._now())
        )
        cancelled = int(self._connection.execute(statement).rowcount)
        if cancelled:
            self._bump(job_id)
        return cancelled

    def count_by_state(self, job_id: str | None = None) -> dict[RunState, int]:
        """The number of runs (of one job, or of all) in each state."""
        statement = sa.select(runs.c.state, sa.func.count()).group_by(runs.c.state)
        if job_id is not None:
            statement = statement.where(runs.c.job_id == job_id)
        return {RunState(state): int(number) for state, number in self._connection.execute(statement)}

    def _bump(self, job_id: str) -> None:
        self._connection.execute(
            sa.update(jobs).where(jobs.c.id == job_id).values(data_version=jobs.c.data_version + 1)
        )

    @staticmethod
    def _check(values: dict[str, Any]) -> None:
        unknown = set(values) - _UPDATABLE
        if unknown:
            raise TypeError(f"runs have no such column to update: {sorted(unknown)}")


def run_record(row: RowMap) -> RunRecord:
    return RunRecord(
        key=row["key"],
        id=row["id"],
        job_id=row["job_id"],
        project_id=row["project_id"],
        kind=RunKind(row["kind"]),
        state=RunState(row["state"]),
        configuration=configuration_from(row),
        origin=RunOrigin(row["origin"]),
        purpose=row["purpose"],
        instruction=row["instruction"],
        message=row["message"],
        end_cause=None if row["end_cause"] is None else EndCause(row["end_cause"]),
        method=row["method"],
        position=row["position"],
        holder=row["holder"],
        lease_s=row["lease_s"],
        lease_expires_at=row["lease_expires_at"],
        created_at=row["created_at"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        num_samples=row["num_samples"],
        dropped=row["dropped"],
        failed_local_batch_size=row["failed_local_batch_size"],
        predicted_step_time_s=row["predicted_step_time_s"],
        recommendation_id=row["recommendation_id"],
        straggler_rank=row["straggler_rank"],
        drifted=row["drifted"],
        drift_state=row["drift_state"],
        scaling_step=row["scaling_step"],
        step_time_s=row["step_time_s"],
        **{f"observed_{name}": row[f"observed_{name}"] for name in _OBSERVED},
    )
