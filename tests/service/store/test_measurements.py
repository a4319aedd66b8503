"""Tests the store's contract for measurements on both engines: sample rows, their summaries, and telemetry chunks."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest
import sqlalchemy as sa

import tula_wire as wire
from tests.service.store.examples import a_chunk, a_job, a_run, add_chunk, samples
from tula_service.domain import BucketTimeline, MemoryReading, NewChunk
from tula_service.errors import InvalidInput, StoreUnavailable
from tula_service.perfmodel.step_summary import summarise
from tula_service.store import Store, telemetry
from tula_service.store import samples as samples_module
from tula_service.store.samples import Samples


class TestSamples:
    """Tests that each row is stored once, and which statistics of the rows a fit receives."""

    def test_rows_are_stored_once_however_often_they_are_sent(self, store: Store) -> None:
        job = a_job(store)
        run = a_run(store, job.id)
        with store.transaction() as tx:
            assert tx.samples.add(run.key, job.id, samples(10)) == 10
        with store.transaction() as tx:
            partly = tx.samples.add(run.key, job.id, samples(15))
            assert partly == 5
            assert tx.runs.get(run.id).num_samples == 15
            assert tx.samples.add(run.key, job.id, samples(15, rank=1)) == 15
            assert tx.samples.add(run.key, job.id, samples(15, boot_id="restarted")) == 15

    def test_samples_and_a_change_of_their_run_wait_for_each_other_in_turn(self, postgres_url: str) -> None:
        """Both transactions lock the job before the run; otherwise, each could hold a lock that the other needs."""
        store = Store.open(postgres_url)
        job = a_job(store)
        run = a_run(store, job.id)

        def add() -> int:
            with store.transaction() as tx:
                return tx.samples.add(run.key, job.id, samples(10))

        with ThreadPoolExecutor(1) as agent:
            with store.transaction() as tx:
                tx.jobs.lock(job.id)
                sent = agent.submit(add)
                waiting = sa.text("SELECT count(*) FROM pg_locks WHERE NOT granted")
                while not tx.connection.execute(waiting).scalar():
                    assert not sent.done()
                tx.runs.update(run.id, drift_sentence="slower")
            assert sent.result() == 10
        with store.reading() as tx:
            assert (tx.runs.get(run.id).drifted, tx.runs.get(run.id).num_samples) == (True, 10)
        store.close()

    def test_columns_come_back_with_nan_where_nothing_was_measured(self, store: Store) -> None:
        job = a_job(store)
        run = a_run(store, job.id)
        sent = samples(4)
        with store.transaction() as tx:
            tx.samples.add(run.key, job.id, sent)
            found = tx.samples.recent(run.key)
        np.testing.assert_array_equal(found.step, sent.step)
        np.testing.assert_array_equal(found.step_time_s, sent.step_time_s)
        assert found.compute_time_s is not None
        assert found.compute_time_s.tolist()[1:] == [0.25] * 3
        assert np.isnan(found.compute_time_s[0])
        assert found.straggler_rank is not None
        assert found.straggler_rank.tolist() == [-1, 1, 1, 1]

    def test_the_summary_is_robust_and_ignores_warm_up(self, store: Store) -> None:
        job = a_job(store)
        run = a_run(store, job.id)
        times = np.full(100, 0.5)
        times[50] = 60.0
        with store.transaction() as tx:
            tx.samples.add(run.key, job.id, samples(5, warmup=True, boot_id="w", step_time_s=np.full(5, 9.0)))
            tx.samples.add(
                run.key,
                job.id,
                samples(100, step_time_s=times, local_batch_size=16, memory=MemoryReading("peak_rss", 2**30)),
            )
            tx.samples.add(run.key, job.id, samples(1, rank=1, memory=MemoryReading("peak_rss", 2**31)))
            (summary,) = tx.samples.summaries(job.id, summarise)
        assert summary.step_time_s == pytest.approx(0.5, rel=1e-6)
        assert summary.optimizer_time_s == pytest.approx(0.05)
        assert summary.num_samples == 101
        assert summary.local_batch_size == 16
        assert summary.memory == MemoryReading("peak_rss", 2**31)
        with store.reading() as tx:
            by_rank = tx.samples.memory_by_rank(run.key, limit=5)
            assert {rank: reading.peak_bytes for rank, reading in by_rank.items()} == {0: 2**30, 1: 2**31}
            assert list(tx.samples.memory_by_rank(run.key, limit=1)) == [1], "the highest peaks"
        assert summary.relative_sd is not None
        with store.reading() as tx:
            assert tx.samples.summaries(job.id, summarise) == [summary], "a reader without write access sees the same"
            stored = tx.runs.get(run.id)
            assert stored.step_time_s == pytest.approx(0.5, rel=1e-6)
            assert (stored.num_steps, stored.straggler_rank) == (100, 1)

    def test_a_database_that_fails_while_samples_are_read_leaves_no_summary_without_figures(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job = a_job(store)
        run = a_run(store, job.id)
        with store.transaction() as tx:
            tx.samples.add(run.key, job.id, samples(5))
        failing = Mock(side_effect=sa.exc.OperationalError("SELECT", {}, Exception("disk I/O error")))
        with monkeypatch.context() as broken:
            broken.setattr(Samples, "recent", failing)
            with pytest.raises(StoreUnavailable), store.transaction() as tx:
                tx.samples.summaries(job.id, summarise)
        with store.transaction() as tx:
            (summary,) = tx.samples.summaries(job.id, summarise)
        assert summary.step_time_s is not None

    def test_a_resent_batch_changes_no_version(self, store: Store) -> None:
        job = a_job(store)
        run = a_run(store, job.id)
        versions = []
        for peak in (2**30, 2**30, 2**29, 2**31):
            with store.transaction() as tx:
                tx.samples.add(run.key, job.id, samples(1, memory=MemoryReading("peak_rss", peak)))
                versions.append(tx.jobs.data_version(job.id))
        assert versions[0] == versions[1] == versions[2] == versions[3] - 1, "only a higher peak changes it"

    def test_a_timeline_is_part_of_its_run(self, store: Store) -> None:
        job = a_job(store)
        timed, other = a_run(store, job.id), a_run(store, job.id)
        timeline = wire.samples.BucketTimeline(bucket_bytes=[2**20, 2**21], ready_s=[0.25, 0.5])
        with store.transaction() as tx:
            tx.samples.add(timed.key, job.id, samples(5))
            tx.samples.add(timed.key, job.id, samples(5, boot_id="again", timeline=timeline))
            tx.samples.add(other.key, job.id, samples(5))
            found = {summary.run_id: summary.timeline for summary in tx.samples.summaries(job.id, summarise)}
        assert found == {timed.id: BucketTimeline((2**20, 2**21), (0.25, 0.5)), other.id: None}

    def test_a_run_out_of_memory_is_summarised_without_samples(self, store: Store) -> None:
        job = a_job(store)
        run = a_run(store, job.id)
        with store.transaction() as tx:
            tx.runs.transition(run.id, expected=["pending"], to="out_of_memory", failed_local_batch_size=64)
            (summary,) = tx.samples.summaries(job.id, summarise)
        assert (summary.state, summary.failed_local_batch_size) == ("out_of_memory", 64)
        assert summary.step_time_s is None


def test_the_output_of_a_run_is_replaced_and_goes_with_the_run(store: Store) -> None:
    job = a_job(store)
    run = a_run(store, job.id)
    with store.transaction() as tx:
        assert tx.runs.output(run.key) is None
        for text in ("first", "second"):
            tx.runs.put_output(run.key, text)
        assert tx.runs.output(run.key) == "second"
        tx.jobs.delete(job.id)
        assert tx.runs.output(run.key) is None


class TestChunks:
    """Tests telemetry chunks."""

    def test_a_chunk_is_stored_once_and_read_back_exactly(self, store: Store) -> None:
        job = a_job(store)
        run = a_run(store, job.id)
        chunk = a_chunk(0, 100)
        with store.transaction() as tx:
            assert add_chunk(tx, run.key, chunk)
            assert not add_chunk(tx, run.key, chunk)
            steps, values, _ = tx.telemetry.read(run.key, "loss")
        np.testing.assert_array_equal(steps, chunk.steps)
        np.testing.assert_array_equal(values, chunk.values[0])

    def test_chunks_that_arrive_out_of_order_are_read_in_order(self, store: Store) -> None:
        job = a_job(store)
        run = a_run(store, job.id)
        with store.transaction() as tx:
            for sequence in (2, 0, 1):
                add_chunk(tx, run.key, a_chunk(sequence, 50))
            steps, *_ = tx.telemetry.read(run.key, "loss")
            some, *_ = tx.telemetry.read(run.key, "loss", first_step=40, last_step=60)
            assert tx.telemetry.columns(run.key) == ["grad_norm", "loss"]
        assert steps.tolist() == list(range(150))
        assert some.tolist() == list(range(40, 61))

    def test_a_column_of_many_runs_is_read_by_one_query_and_counted_by_another(self, store: Store) -> None:
        job = a_job(store)
        one, two, other = (a_run(store, job.id) for _ in range(3))
        with store.transaction() as tx:
            for run, sequences in ((one, (1, 0)), (two, (0,)), (other, (0,))):
                for sequence in sequences:
                    add_chunk(tx, run.key, a_chunk(sequence, 50))
            read = {
                run_id: (steps, values) for run_id, steps, values in tx.telemetry.read_runs([one.id, two.id], "loss")
            }
            counted = tx.telemetry.num_steps([one.id, two.id])
            alone = tx.telemetry.read(one.key, "loss")[:2]
            assert list(tx.telemetry.read_runs([one.id], "los")) == []
        assert set(read) == {one.id, two.id}
        for ours, known in zip(read[one.id], alone, strict=True):
            np.testing.assert_array_equal(ours, known)
        assert read[two.id][0].tolist() == list(range(50))
        assert counted == {one.id: {"loss": 100, "grad_norm": 100}, two.id: {"loss": 50, "grad_norm": 50}}

    def test_a_step_sent_again_after_a_restart_counts_once(self, store: Store) -> None:
        job = a_job(store)
        run = a_run(store, job.id)
        with store.transaction() as tx:
            add_chunk(tx, run.key, a_chunk(0, 20, boot_id="a"))
            add_chunk(tx, run.key, a_chunk(0, 20, boot_id="b", shift=1.0))
            steps, values, _ = tx.telemetry.read(run.key, "loss")
        assert steps.tolist() == list(range(20))
        np.testing.assert_array_equal(values, a_chunk(0, 20, shift=1.0).values[0])

    def test_a_long_history_is_read_in_bounded_memory_with_all_its_peaks(
        self, sqlite_store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(telemetry, "MOST_POINTS", 4_000)
        run = a_run(sqlite_store, a_job(sqlite_store).id)
        length, peaks = 500, {1_234: 50.0, 31_999: -50.0, 77_777: 60.0}
        with sqlite_store.transaction() as tx:
            for number in range(160):
                steps = np.arange(number * length, (number + 1) * length)
                values = np.array([peaks.get(step, math.sin(step / 1000)) for step in steps.tolist()])
                add_chunk(tx, run.key, NewChunk(0, "boot", number, steps, ["loss"], values[None]))
            steps, values, total = tx.telemetry.read(run.key, "loss")
        assert total == 80_000, "what was left out is counted"
        assert steps.size <= 2 * 4_000
        assert (np.diff(steps) > 0).all()
        assert (steps[0], steps[-1]) == (0, 79_999)
        assert set(peaks.values()) <= set(values.tolist())
        halves = np.count_nonzero(steps < 40_000), np.count_nonzero(steps >= 40_000)
        assert max(halves) < 1.5 * min(halves), "thinned evenly"


class TestProcesses:
    """Tests the processes that send samples of a run."""

    def test_a_run_has_a_bounded_number_of_processes(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(samples_module, "MAX_PROCESSES", 3)
        job = a_job(store)
        run = a_run(store, job.id)
        with store.transaction() as tx:
            for boot in "abc":
                tx.samples.add(run.key, job.id, samples(2, boot_id=boot))
            with pytest.raises(InvalidInput) as refused:
                tx.samples.add(run.key, job.id, samples(2, boot_id="d"))
            assert refused.value.field == "boot_id"
            assert tx.samples.add(run.key, job.id, samples(4, boot_id="c")) == 2, "known ones go on"
