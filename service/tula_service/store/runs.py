"""Stores runs, changes run states only by compare-and-set, and leases each run to one holder at a time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from tula_service.domain import NewRun, RunRecord
from tula_service.errors import Conflict, NotFound
from tula_service.store._base import Repository, RowMap, new_id, same_fields
from tula_service.store.tables import jobs, run_outputs, run_summaries, runs
from tula_wire.configurations import Configuration
from tula_wire.enums import FINAL_STATES, EndCause, RunKind, RunState
from tula_wire.samples import LEASE_HEADER

_RELEASED: dict[str, Any] = {
    "holder": None, "lease_s": None, "lease_expires_at": None, "started_at": None, "lease": runs.c.lease + 1,
}  # fmt: skip
"""The column values that are set when a run returns to the plan."""
_OBSERVED = ("world_size", "local_batch_size", "grad_accum_steps")
_SUMMARISED = ("step_time_s", "num_steps", "straggler_rank")
_SELECT_RUNS = sa.select(
    runs,
    *(run_summaries.c[name] for name in _SUMMARISED),
    *(run_summaries.c[name].label(f"observed_{name}") for name in _OBSERVED),
).outerjoin(run_summaries, run_summaries.c.run_key == runs.c.key)

_HELD = ("claimed", "running")
_RUN = _SELECT_RUNS.where(runs.c.id == sa.bindparam("run"))
_HELD_RUN = _RUN.where(runs.c.state.in_(_HELD))
_LEASE = sa.select(runs.c.lease).where(runs.c.id == sa.bindparam("run"))
_EXTENDED: dict[str, Any] = {"lease_s": sa.bindparam("length_s"), "lease_expires_at": sa.bindparam("expires_at")}
_EXTEND = sa.update(runs).where(runs.c.id == sa.bindparam("run"), runs.c.state.in_(_HELD)).values(_EXTENDED)


class Runs(Repository):
    """The table of runs. The class `Leases` claims runs and renews their leases."""

    def create(self, job_id: str, run: NewRun) -> RunRecord:
        """Add a run to a job, increment the job's data version, and return the run.

        Raises NotFound for an unknown job.
        """
        project_id = self._scalar(sa.select(jobs.c.project_id).where(jobs.c.id == job_id))
        if project_id is None:
            raise NotFound.of("job", job_id)
        now = self._now()
        values = asdict(run) | {
            "id": new_id("run"),
            "job_id": job_id,
            "project_id": project_id,
            "lease_expires_at": None if run.lease_s is None else now + timedelta(seconds=run.lease_s),
            "lease": int(run.state != "pending"),
            "created_at": now,
            "started_at": now if run.state == "running" else None,
            "num_samples": 0,
            "num_measured": 0,
            "dropped": 0,
        }
        values |= values.pop("configuration") | {"options": dict(run.configuration.options)}
        self._connection.execute(sa.insert(runs).values(values))
        self.bump(job_id)
        return self.get(values["id"])

    def get(self, run_id: str) -> RunRecord:
        """Return the run with this id. Raises NotFound."""
        row = self._row(_RUN, run=run_id)
        if row is None:
            raise NotFound.of("run", run_id)
        return _run_record(row)

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
        """Return a job's runs, newest first or, if `plan_order` is True, in the order in which they are claimed.

        If `cursor` is set, only runs with smaller keys are returned.
        """
        statement = _SELECT_RUNS.where(runs.c.job_id == job_id).limit(limit)
        if kind is not None:
            statement = statement.where(runs.c.kind == kind)
        if states is not None:
            statement = statement.where(runs.c.state.in_(list(states)))
        if cursor is not None:
            statement = statement.where(runs.c.key < cursor)
        order = (runs.c.position, runs.c.key) if plan_order else (runs.c.key.desc(),)
        return [_run_record(row) for row in self._rows(statement.order_by(*order))]

    def running_trainings(self, project_id: str | None, *, limit: int) -> Sequence[RunRecord]:
        """Return the newest running training runs of a project or of all projects, except those with expired leases."""
        held = runs.c.lease_expires_at.is_(sa.null()) | (runs.c.lease_expires_at >= self._now())
        statement = _SELECT_RUNS.where(runs.c.state == "running", runs.c.kind == "train", held)
        if project_id is not None:
            statement = statement.where(runs.c.project_id == project_id)
        return [_run_record(row) for row in self._rows(statement.order_by(runs.c.key.desc()).limit(limit))]

    def transition(
        self,
        run_id: str,
        *,
        expected: Collection[RunState],
        to: RunState,
        end_cause: EndCause | None = None,
        **values: Any,
    ) -> bool:
        """Move a run from one of the `expected` states to `to`; if it is in another state, return False.

        This sets `started_at` and `finished_at`, ends the lease if `to` is a final state, and increments the job's data
        version. A run that returns to the plan has no `started_at` until its next holder starts it.
        """
        now = self._now()
        values["end_cause"] = end_cause
        if to == "running":
            values["started_at"] = sa.func.coalesce(runs.c.started_at, sa.literal(now, runs.c.started_at.type))
        values["finished_at"] = now if to in FINAL_STATES else None
        if to in FINAL_STATES:
            values["lease_expires_at"] = None
        if to == "pending":
            values |= _RELEASED
        changed = self._connection.execute(
            sa.update(runs)
            .where(runs.c.id == run_id, runs.c.state.in_(list(expected)))
            .values(state=to, **values)
            .returning(runs.c.job_id)
        ).first()
        if changed is None:
            return False
        self.bump(changed[0])
        return True

    def update(self, run_id: str, *, bump: bool = False, **values: Any) -> None:
        """Change columns of a run, except its state, which only `transition` may change. Raises NotFound."""
        changed = self._connection.execute(
            sa.update(runs).where(runs.c.id == run_id).values(**values).returning(runs.c.job_id)
        ).first()
        if changed is None:
            raise NotFound.of("run", run_id)
        if bump:
            self.bump(changed[0])

    def put_output(self, run_key: int, text: str) -> None:
        """Replace the stored output of a run."""
        self._put(run_outputs, {"run_key": run_key}, {"text": text})

    def output(self, run_key: int) -> str | None:
        """Return the stored output of a run, or None."""
        text: str | None = self._scalar(sa.select(run_outputs.c.text).where(run_outputs.c.run_key == run_key))
        return text

    def count_by_state(self) -> dict[RunState, int]:
        """Return the number of runs in each state."""
        statement = sa.select(runs.c.state, sa.func.count()).group_by(runs.c.state)
        return {state: int(number) for state, number in self._connection.execute(statement)}


def _run_record(row: RowMap) -> RunRecord:
    """Return the record for a row of `_SELECT_RUNS`."""
    configuration = Configuration.from_json(same_fields(Configuration, row))
    return RunRecord(**same_fields(RunRecord, row), configuration=configuration)


class Leases(Repository):
    """Manages leases. A lease lets one holder work on a run until a certain time, which the holder's heartbeats extend.

    A heartbeat is a PATCH request with the state `running`, or a batch of samples. No timer ends leases: the next claim
    returns a profiling run with an expired lease to the plan, and the next read or change of a job marks a training run
    with an expired lease as failed (`usecases/runs.py: with_vanished`); a later PATCH reopens the run. A change to a
    final state ends the lease. Times come from the store's clock, so the clocks of replicas must agree within about a
    second.

    Each lease has a number, which agents send with their requests. `check` refuses agents whose lease has ended, since
    another holder's agents may be measuring the same run.
    """

    def check(self, run_id: str, number: int | None) -> None:
        """Raise Conflict if `number` is not the run's current lease; None is accepted."""
        current = None if number is None else self._scalar(_LEASE, run=run_id)
        if current is not None and current != number:
            raise Conflict(
                f"Lease {number} of this run has ended, and the run has returned to the plan or has another holder: "
                "stop working on the run.",
                field=LEASE_HEADER,
            )

    def claim(self, job_id: str, *, holder: str, lease_s: float, max_nodes: int | None = None) -> RunRecord | None:
        """Lease and return the next pending profiling run, or return None if no run can be claimed now.

        Runs with an expired lease count as pending. Two claimants never get the same run, since Postgres skips rows
        that another transaction has locked, and SQLite allows one writer at a time.
        """
        self._release_expired(job_id)
        due = sa.select(runs.c.key).where(runs.c.job_id == job_id, runs.c.state == "pending", runs.c.kind == "profile")
        if max_nodes is not None:
            due = due.where(runs.c.num_nodes <= max_nodes)
        due = due.order_by(runs.c.position, runs.c.key).limit(1).with_for_update(skip_locked=True)
        key = self._scalar(due)
        if key is None:
            return None
        (run,) = self._rows(_SELECT_RUNS.where(runs.c.key == key))
        # All runs that a launch may measure get the same lease number.
        last = self._scalar(sa.select(sa.func.max(runs.c.lease)).where(*_same_launch(_run_record(run))))
        return self._lease([key], holder, lease_s, self._now() + timedelta(seconds=lease_s), int(last) + 1)[0]

    def claim_launch(self, run: RunRecord) -> list[RunRecord]:
        """Lease the pending runs of the same launch to the holder of `run`, and return them.

        Runs of the same launch differ only in local batch size.
        """
        pending = sa.select(runs.c.key).where(*_same_launch(run), runs.c.state == "pending")
        keys = list(self._connection.execute(pending.with_for_update(skip_locked=True)).scalars())
        return self._lease(keys, run.holder, run.lease_s, run.lease_expires_at, run.lease)

    def _lease(
        self, keys: Sequence[int], holder: str | None, lease_s: float | None, expires_at: datetime | None, number: int
    ) -> list[RunRecord]:
        held: dict[str, Any] = {"state": "claimed", "holder": holder, "lease": number}
        held |= {"lease_s": lease_s, "lease_expires_at": expires_at}
        self._connection.execute(sa.update(runs).where(runs.c.key.in_(keys)).values(held))
        return [_run_record(row) for row in self._rows(_SELECT_RUNS.where(runs.c.key.in_(keys)))]

    def _release_expired(self, job_id: str) -> None:
        expired = sa.update(runs).where(
            runs.c.job_id == job_id,
            runs.c.state.in_(_HELD),
            runs.c.kind == "profile",
            runs.c.lease_expires_at < self._now(),
        )
        self._connection.execute(expired.values(state="pending", **_RELEASED))

    def expired(self, job_ids: Sequence[str]) -> Sequence[str]:
        """Return the ids in `job_ids` of jobs that have a training run with an expired lease."""
        lost = sa.and_(runs.c.kind == "train", runs.c.state.in_(_HELD), runs.c.lease_expires_at < self._now())
        statement = sa.select(runs.c.job_id).where(runs.c.job_id.in_(job_ids), lost).distinct()
        return list(self._connection.execute(statement).scalars())

    def renew(self, run_id: str, *, lease_s: float | None = None, whole_launch: bool = False) -> bool:
        """Extend a run's lease by `lease_s` (default: the duration at the claim); return False if no lease is held.

        If `whole_launch` is True, also extend the leases of the runs that the holder claimed together with this run.
        """
        row = self._row(_HELD_RUN, run=run_id)
        if row is None:
            return False
        length = lease_s if lease_s is not None else row["lease_s"]
        if length is None:
            return True
        extension = {"length_s": length, "expires_at": self._now() + timedelta(seconds=length)}
        if whole_launch and row["holder"] is not None:
            claimed_together = (
                *_same_launch(_run_record(row)),
                runs.c.holder == row["holder"],
                runs.c.state.in_(_HELD),
            )
            extend = sa.update(runs).where(*claimed_together).values(_EXTENDED)
            return self._connection.execute(extend, extension).rowcount > 0
        return self._connection.execute(_EXTEND, extension | {"run": run_id}).rowcount > 0


def _same_launch(run: RunRecord) -> list[sa.ColumnElement[bool]]:
    """Return conditions that select the job's profiling runs that differ from `run` at most in local batch size."""
    c = run.configuration
    return [
        runs.c.job_id == run.job_id,
        runs.c.kind == "profile",
        runs.c.num_nodes == c.num_nodes,
        runs.c.ranks_per_node == c.ranks_per_node,
        runs.c.grad_accum_steps == c.grad_accum_steps,
        runs.c.instance_type == c.instance_type,
        runs.c.options == dict(c.options),
    ]
