"""Tests that pruning removes old archived jobs, partly deleted jobs and old events, and nothing else."""

from __future__ import annotations

from datetime import timedelta

import pytest
import sqlalchemy as sa

from tests.service.store.examples import a_chunk, a_job, a_run, add_chunk, samples
from tests.support.clock import ManualClock
from tula_service.errors import NotFound
from tula_service.store import Store
from tula_service.store.tables import audit_log
from tula_service.usecases.access import ANONYMOUS
from tula_service.usecases.jobs import delete_job, prune_store

DAY_S = 86_400.0


def filled(store: Store) -> str:
    """Create a job with data; return its id."""
    job = a_job(store)
    run = a_run(store, job.id)
    with store.transaction() as tx:
        tx.samples.add(run.key, job.id, samples(50))
        add_chunk(tx, run.key, a_chunk(0, 10))
        tx.events.append(job.id, "job")
    return job.id


def rows(store: Store, table: str) -> int:
    """Return the number of rows in a table."""
    with store.reading() as tx:
        return int(tx.connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar_one())


def test_only_jobs_archived_long_enough_go(store: Store, clock: ManualClock) -> None:
    """A dry run announces these jobs and changes nothing."""
    old, recent, living = filled(store), filled(store), filled(store)
    with store.transaction() as tx:
        tx.jobs.update(old, state="archived")
    clock.advance(100 * DAY_S)
    with store.transaction() as tx:
        tx.jobs.update(recent, state="archived")
    age = timedelta(days=90)
    pruned = prune_store(store, older_than=age, actor=ANONYMOUS, dry_run=True)
    assert list(pruned.job_ids) == [old]
    assert rows(store, "jobs") == 3
    done = prune_store(store, older_than=age, actor=ANONYMOUS)
    assert list(done.job_ids) == [old]
    with store.reading() as tx:
        assert tx.jobs.get(recent).state == "archived"
        assert tx.jobs.get(living).id == living
        assert tx.connection.execute(sa.select(audit_log.c.action)).scalars().all() == ["job.delete"]
    assert rows(store, "step_samples") == 100
    assert rows(store, "events") == 0, "all events were older than a week"


def test_a_job_being_deleted_is_gone_for_readers_and_pruning_finishes_it(store: Store) -> None:
    """The deletion was interrupted between two batches, as by a crash."""
    job = filled(store)
    with store.transaction() as tx:
        tx.jobs.begin_delete(job)
        tx.samples.purge(job, limit=20)
    with pytest.raises(NotFound), store.reading() as tx:
        tx.jobs.get(job)
    assert rows(store, "step_samples") == 30
    prune_store(store, older_than=timedelta(days=1), actor=ANONYMOUS)
    assert [rows(store, table) for table in ("jobs", "runs", "step_samples", "telemetry_chunks")] == [0, 0, 0, 0]


def test_deleting_a_job_leaves_its_neighbour_whole(store: Store) -> None:
    """A batch of deletions concerns only one job."""
    gone, kept = filled(store), filled(store)
    delete_job(store, ANONYMOUS, gone)
    with store.reading() as tx:
        assert tx.jobs.get(kept).id == kept
    assert rows(store, "step_samples") == 50
    assert rows(store, "telemetry_chunks") == 1
