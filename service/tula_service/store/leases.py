"""Leases: who holds a run, and until when."""

from __future__ import annotations

from datetime import timedelta

import sqlalchemy as sa

from tula_service.store._base import Repository
from tula_service.store.records import RunRecord
from tula_service.store.runs import RELEASED, SELECT_RUNS, run_record
from tula_service.store.tables import runs

_HELD = ("claimed", "running")


class Leases(Repository):
    """A lease is the right of one holder to work on a run until a time; the holder renews it by its heartbeats.

    A heartbeat is a PATCH `running` or a batch of samples. No timer watches leases: the next claim returns a profiling
    run with an expired lease to the plan, and the next change of a job fails a training whose lease has expired
    (`usecases/runs.py: fail_vanished`), which a later PATCH reopens. A final state ends the lease. Times come from
    the store's clock, so the clocks of replicas must agree to about a second.
    """

    def claim(self, job_id: str, *, holder: str, lease_s: float, max_nodes: int | None = None) -> RunRecord | None:
        """Lease the next pending profiling run, None if no run can be claimed now.

        Runs with an expired lease count as pending. Two claimants never get the same run: Postgres skips rows that
        another transaction has locked, SQLite has one writer at a time.
        """
        self._release_expired(job_id)
        wanted = sa.select(runs.c.key).where(
            runs.c.job_id == job_id, runs.c.state == "pending", runs.c.kind == "profile"
        )
        if max_nodes is not None:
            wanted = wanted.where(runs.c.num_nodes <= max_nodes)
        wanted = wanted.order_by(runs.c.position, runs.c.key).limit(1).with_for_update(skip_locked=True)
        key = self._scalar(wanted)
        if key is None:
            return None
        self._connection.execute(
            sa.update(runs)
            .where(runs.c.key == key)
            .values(
                state="claimed",
                holder=holder,
                lease_s=lease_s,
                lease_expires_at=self._now() + timedelta(seconds=lease_s),
            )
        )
        row = self._row(SELECT_RUNS.where(runs.c.key == key))
        assert row is not None
        return run_record(row)

    def claim_column(self, run: RunRecord) -> list[RunRecord]:
        """Lease, to the holder of `run` and for as long, the pending runs that differ in the local batch alone."""
        wanted = sa.select(runs.c.key).where(*_same_column(run), runs.c.state == "pending")
        keys = list(self._connection.execute(wanted.with_for_update(skip_locked=True)).scalars())
        leased = sa.update(runs).where(runs.c.key.in_(keys))
        self._connection.execute(
            leased.values(
                state="claimed",
                holder=run.holder,
                lease_s=run.lease_s,
                lease_expires_at=run.lease_expires_at,
            )
        )
        return [run_record(row) for row in self._rows(SELECT_RUNS.where(runs.c.key.in_(keys)))]

    def renew_column(self, run: RunRecord, *, lease_s: float | None = None) -> None:
        """Extend the leases of the runs that the holder of `run` has claimed with it."""
        length = lease_s if lease_s is not None else run.lease_s
        if run.holder is None or length is None:
            return
        held = sa.update(runs).where(*_same_column(run), runs.c.holder == run.holder, runs.c.state.in_(_HELD))
        self._connection.execute(held.values(lease_s=length, lease_expires_at=self._now() + timedelta(seconds=length)))

    def _release_expired(self, job_id: str) -> None:
        expired = sa.update(runs).where(
            runs.c.job_id == job_id,
            runs.c.state.in_(_HELD),
            runs.c.kind == "profile",
            runs.c.lease_expires_at < self._now(),
        )
        self._connection.execute(expired.values(state="pending", **RELEASED))

    def renew(self, run_id: str, *, lease_s: float | None = None) -> bool:
        """Extend a held lease by `lease_s` (default: as claimed); False if it is no longer held."""
        row = self._row(sa.select(runs.c.lease_s, runs.c.state).where(runs.c.id == run_id))
        if row is None or row["state"] not in _HELD:
            return False
        length = lease_s if lease_s is not None else row["lease_s"]
        if length is None:
            return True
        statement = (
            sa.update(runs)
            .where(runs.c.id == run_id, runs.c.state.in_(_HELD))
            .values(lease_s=length, lease_expires_at=self._now() + timedelta(seconds=length))
        )
        return self._connection.execute(statement).rowcount == 1


def _same_column(run: RunRecord) -> list[sa.ColumnElement[bool]]:
    """Profiling runs of the job that differ from `run` in the local batch alone; itself is among them."""
    c = run.configuration
    return [
        runs.c.job_id == run.job_id,
        runs.c.kind == "profile",
        runs.c.num_nodes == c.num_nodes,
        runs.c.ranks_per_node == c.ranks_per_node,
        runs.c.grad_accum_steps == c.grad_accum_steps,
        runs.c.instance_type == c.instance_type,
    ]
