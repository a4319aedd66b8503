"""Tests that reading a long run takes no more steps of SQLite's virtual machine than reading a short one."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest

from tests.service.store.examples import a_chunk, a_job, a_run, add_chunk, samples
from tula_service.domain import NewChunk, RunRecord
from tula_service.perfmodel.step_summary import summarise
from tula_service.store import Store, Transaction
from tula_service.store.telemetry import MAX_NAMES

EVERY = 100
"""Instructions of SQLite's virtual machine after which it calls its progress handler."""


def cost_of(store: Store, work: Callable[[Transaction], object]) -> int:
    """Return how often SQLite's progress handler is called while `work` runs."""
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return 0

    with store.transaction() as tx:
        driver = tx.connection.connection.driver_connection
        assert driver is not None
        work(tx)  # statements are compiled, and the summary is stored
        driver.set_progress_handler(count, EVERY)
        work(tx)
        driver.set_progress_handler(None, EVERY)
    return calls


def trained(store: Store, job_id: str, *, num_chunks: int, num_samples: int) -> RunRecord:
    run = a_run(store, job_id)
    with store.transaction() as tx:
        for number in range(num_chunks):
            add_chunk(tx, run.key, a_chunk(number, 5))
        for first in range(0, num_samples, 500):
            places = list(range(first, first + 500))
            tx.samples.add(run.key, job_id, samples(500).model_copy(update={"sequence": places, "step": places}))
    return run


@pytest.mark.parametrize(
    "read",
    [
        lambda tx, run: tx.telemetry.columns(run.key),
        lambda tx, run: tx.telemetry.admitted(run.key, ["loss", "new"]),
        lambda tx, run: tx.telemetry.newest(run.key, ["loss"]),
        lambda tx, run: tx.telemetry.num_steps([run.id]),
        lambda tx, run: tx.telemetry.read(run.key, "loss", last_step=20),
        lambda tx, run: tx.samples.refresh(run.key, summarise),
        lambda tx, run: tx.samples.recent(run.key, rank=0),
    ],
    ids=("names", "admitted", "newest", "counts", "first steps", "summary", "one rank"),
)
def test_no_query_costs_more_of_a_longer_run(
    sqlite_store: Store, read: Callable[[Transaction, RunRecord], object]
) -> None:
    job = a_job(sqlite_store)
    short = trained(sqlite_store, job.id, num_chunks=20, num_samples=5_000)
    long = trained(sqlite_store, job.id, num_chunks=400, num_samples=15_000)
    cheap, dear = (cost_of(sqlite_store, lambda tx, run=run: read(tx, run)) for run in (short, long))
    assert dear <= 1.2 * cheap + 2


def test_a_chart_of_a_history_four_times_as_long_takes_four_times_the_work(sqlite_store: Store) -> None:
    """The work is the number of Python calls; each chunk is processed once, whatever chunks precede it."""
    job = a_job(sqlite_store)

    def calls(run: RunRecord) -> int:
        count = 0

        def note(*_: object) -> None:
            nonlocal count
            count += 1

        with sqlite_store.reading() as tx:
            tx.telemetry.read(run.key, "loss")
            sys.setprofile(note)
            try:
                tx.telemetry.read(run.key, "loss")
            finally:
                sys.setprofile(None)
        return count

    short = trained(sqlite_store, job.id, num_chunks=100, num_samples=0)
    long = trained(sqlite_store, job.id, num_chunks=400, num_samples=0)
    assert calls(long) < 4.4 * calls(short)


def test_a_run_has_a_bounded_number_of_columns_and_keeps_those_that_it_has(store: Store) -> None:
    run = a_run(store, a_job(store).id)
    names = [f"column_{number}" for number in range(MAX_NAMES)]
    with store.transaction() as tx:
        for sequence, start in enumerate(range(0, MAX_NAMES, 50)):
            chunk = NewChunk(0, "boot", sequence, np.arange(2), names[start : start + 50], np.zeros((50, 2)))
            assert add_chunk(tx, run.key, chunk)
        assert tx.telemetry.admitted(run.key, ["one_more", "column_7", "another"]) == ["column_7"]
        assert tx.telemetry.columns(run.key) == sorted(names)


def test_the_newest_value_is_that_of_the_last_step_whichever_chunk_comes_last(store: Store) -> None:
    run = a_run(store, a_job(store).id)
    with store.transaction() as tx:
        for sequence, (steps, values) in enumerate((([4, 5, 6], [1.0, 2.0, np.nan]), ([1, 2, 3], [7.0, 8.0, 9.0]))):
            add_chunk(tx, run.key, NewChunk(0, "boot", sequence, np.array(steps), ["delta"], np.array([values])))
        add_chunk(tx, run.key, NewChunk(1, "other", 0, np.array([9]), ["delta", "of_another"], np.ones((2, 1))))
        assert tx.telemetry.newest(run.key, ["delta", "of_another", "absent"]) == {
            "delta": 2.0, "of_another": None, "absent": None,
        }  # fmt: skip
        assert tx.telemetry.num_steps([run.id]) == {run.id: {"delta": 6}}
        assert tx.telemetry.columns(run.key) == ["delta", "of_another"]
