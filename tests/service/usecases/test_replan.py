"""Tests that fits and searches use a read-only snapshot, and that their results are stored once or not at all."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

import tula_wire as wire
from tests.service.usecases.cluster import Cluster, spec
from tula_service.analysis import answer, plan
from tula_service.analysis.job_data import JobData
from tula_service.analysis.questions import Findings
from tula_service.store import Store, Transaction
from tula_service.usecases import jobs, ledger, planning, runs
from tula_service.usecases.access import ANONYMOUS

OPEN = ("pending", "claimed", "running")


class WriteTracker(Store):
    """A store that records for each thread whether a writing transaction is open."""

    writing = threading.local()

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        with super().transaction() as tx:
            self.writing.now = True
            try:
                yield tx
            finally:
                self.writing.now = False


def change_epochs(store: Store, job_id: str, epochs: float) -> None:
    with store.transaction() as tx:
        tx.jobs.update(job_id, bump=True, spec={**tx.jobs.get(job_id).spec, "epochs": epochs})


def planned_twice(cluster: Cluster, job_id: str) -> list[wire.Configuration]:
    planned = [run.configuration for run in cluster.job(job_id).plan if run.state != "cancelled"]
    return [configuration for configuration, times in Counter(planned).items() if times > 1]


def test_no_fit_and_no_search_holds_a_connection(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = store.engine.pool
    assert isinstance(pool, sa.pool.QueuePool)
    calls: Counter[str] = Counter()

    def seen(name: str, original):  # type: ignore[no-untyped-def]
        def wrapped(*args, **options):  # type: ignore[no-untyped-def]
            calls[name] += 1
            assert pool.checkedout() == 0, f"{name} ran inside a transaction"
            return original(*args, **options)

        return wrapped

    monkeypatch.setattr(answer, "fit_step_time", seen("fit", answer.fit_step_time))
    monkeypatch.setattr(plan, "plan", seen("plan", plan.plan))
    cluster = Cluster(store)
    job_id = cluster.register().job.id
    cluster.work(job_id)
    jobs.change(store, ANONYMOUS, job_id, wire.JobPatch(objective="knee"))
    best = cluster.recommendation(job_id).chosen
    assert best is not None
    cluster.patch(cluster.train(job_id, best.configuration).id, "succeeded")
    assert calls["fit"] >= 4
    assert calls["plan"] >= 4


def test_no_fit_holds_the_database_when_data_change_faster_than_it_takes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training run that reports continually must not wait while a requested recommendation is computed."""
    tracked = WriteTracker(store.engine)
    cluster = Cluster(tracked)
    job_id = cluster.register().job.id
    cluster.work(job_id)
    run = cluster.train(job_id, wire.Configuration(num_nodes=2, ranks_per_node=2, local_batch_size=64))
    find = planning.report_findings
    asked: list[int] = []

    def overtaken(data: JobData, *how: Any) -> Findings:
        assert not getattr(WriteTracker.writing, "now", False), "fitted inside a writing transaction"
        asked.append(data.data_version)
        found = find(data, *how)
        with ThreadPoolExecutor(1) as agent:
            agent.submit(cluster.send, run, [0.1] * 5).result()
        return found

    cluster.send(run, [0.1] * 5)
    monkeypatch.setattr(planning, "report_findings", overtaken)
    first = cluster.recommendation(job_id)
    assert len(asked) == 1, "the answer is that of the data as they were when it was asked for"
    second = cluster.recommendation(job_id)
    assert len(asked) == 2, "and the next question finds the new ones"
    assert asked[0] < asked[1]
    assert first.chosen is not None
    assert second.chosen is not None


def test_an_answer_is_computed_again_if_prices_changed_meanwhile(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = cluster.register().job.id
    find, asked = planning.report_findings, []
    with cluster.store.transaction() as tx:
        tx.jobs.bump(job_id)

    def repriced(data: JobData, *how: Any) -> Findings:
        asked.append(data.data_version)
        found = find(data, *how)
        if len(asked) == 1:
            spec = data.spec.model_dump(mode="json")
            changed = {**spec, "cluster": [{**spec["cluster"][0], "price": {"usd_per_node_hour": 50.0}}]}
            with ThreadPoolExecutor(1) as other:
                other.submit(reprice, changed).result()
        return found

    def reprice(changed: dict[str, object]) -> None:
        with cluster.store.transaction() as tx:
            tx.jobs.update(job_id, bump=True, spec=changed)

    monkeypatch.setattr(planning, "report_findings", repriced)
    cluster.recommendation(job_id)
    assert len(asked) == 2
    newest = ledger.entries(cluster.store, ANONYMOUS, job_id).entries[0]
    assert newest.prices["default"]["usd_per_node_hour"] == 50.0  # type: ignore[index]


def test_an_answer_is_computed_again_if_the_job_changed_meanwhile(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = cluster.register().job.id
    find = planning.report_findings
    raced: list[int] = []

    def beaten(data: JobData, *how: Any) -> Findings:
        found = find(data, *how)
        if len(raced) < 2:
            raced.append(data.data_version)
            change_epochs(cluster.store, job_id, 10.0 + len(raced))
        return found

    monkeypatch.setattr(planning, "report_findings", beaten)
    cluster.work(job_id)
    assert len(raced) == 2
    assert cluster.job(job_id).state == "ready"
    assert planned_twice(cluster, job_id) == []


def test_measurements_during_a_computation_do_not_delay_the_plan(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training during profiling reports continually, and these reports count only for the next plan."""
    tracked = WriteTracker(store.engine)
    cluster = Cluster(tracked)
    job_id = cluster.register().job.id
    run = cluster.train(job_id, wire.Configuration(num_nodes=2, ranks_per_node=2, local_batch_size=64))
    find, fitted = planning.report_findings, []

    def overtaken(data: JobData, *how: Any) -> Findings:
        assert not getattr(WriteTracker.writing, "now", False), "fitted inside a writing transaction"
        fitted.append(data.data_version)
        with ThreadPoolExecutor(1) as agent:
            agent.submit(cluster.send, run, [0.1] * 5).result()
        return find(data, *how)

    monkeypatch.setattr(planning, "report_findings", overtaken)
    done = cluster.work(job_id)
    assert len(done) >= 3
    assert len(fitted) == len(done), "once for each run that ended"
    assert planned_twice(cluster, job_id) == []
    assert cluster.recommendation(job_id).model.num_runs >= len(done)


def test_a_job_that_changes_during_every_attempt_is_planned_under_its_lock(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = cluster.register().job.id
    find, raced = planning.report_findings, []

    def beaten(data: JobData, *how: Any) -> Findings:
        raced.append(data.data_version)
        if len(raced) <= planning.ATTEMPTS:
            change_epochs(cluster.store, job_id, 10.0 + len(raced))
        return find(data, *how)

    monkeypatch.setattr(planning, "report_findings", beaten)
    with cluster.store.transaction() as tx:
        tx.jobs.mark_plan_stale(job_id)
    body = planning.replan(cluster.store, job_id)
    assert len(raced) == planning.ATTEMPTS + 1
    assert wire.read(wire.Recommendation, body).job_id == job_id


def test_runs_that_end_at_once_are_planned_for_once(store: Store) -> None:
    cluster = Cluster(store)
    job_id = cluster.register(spec(profiling={"max_runs": 6})).job.id
    held = []
    while (run := runs.claim(store, ANONYMOUS, job_id, wire.ClaimRequest(holder="launcher")).run) is not None:
        cluster.patch(run.id, "running")
        cluster.send(run, cluster.times(run.configuration, 20))
        held.append(run)
    assert len(held) >= 3
    with ThreadPoolExecutor(len(held)) as threads:
        ended = list(threads.map(lambda run: cluster.patch(run.id, "succeeded").state, held))
    assert ended == ["succeeded"] * len(held)
    assert planned_twice(cluster, job_id) == []
    cluster.work(job_id)
    job = cluster.job(job_id)
    assert job.state == "ready"
    assert planned_twice(cluster, job_id) == []
    assert len(job.plan) <= 6


def test_threads_that_wait_for_a_replan_return_its_result(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = cluster.register().job.id
    find, computed, released = planning.report_findings, [], threading.Event()

    def held(data: JobData, *how: Any) -> Findings:
        computed.append(data.data_version)
        released.wait()
        return find(data, *how)

    monkeypatch.setattr(planning, "report_findings", held)
    with cluster.store.transaction() as tx:
        tx.jobs.mark_plan_stale(job_id)
    with ThreadPoolExecutor(6) as threads:
        asked = [threads.submit(planning.replan, cluster.store, job_id) for _ in range(6)]
        while not computed:
            time.sleep(0.001)
        released.set()
        answers = [one.result() for one in asked]
    assert len(computed) == 1
    assert len({wire.read(wire.Recommendation, body).id for body in answers}) == 1


def test_a_worker_that_dies_between_the_last_run_and_its_plan_ends_nobodys_search(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = cluster.register().job.id
    with monkeypatch.context() as dying:
        dying.setattr(runs, "replan", lambda *_: None)
        first = cluster.work(job_id)
    left = cluster.job(job_id)
    assert left.state == "planning"
    assert not any(run.state in OPEN for run in left.plan)
    rest = cluster.work(job_id)
    assert cluster.job(job_id).state == "ready", "the next claim found the plan due and made it"
    assert cluster.recommendation(job_id).model.num_runs == len(first) + len(rest)
    assert cluster.job(job_id).runs_done == len(first) + len(rest)


def test_no_run_that_may_not_fit_is_claimed_while_the_plan_is_stale(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = cluster.register(spec(search="full", cluster={"max_nodes": 4}, batch={"max_local_batch_size": 64})).job.id
    request = wire.ClaimRequest(holder="launcher")
    first = runs.claim(cluster.store, ANONYMOUS, job_id, request).run
    assert first is not None
    waiting = [run.configuration.local_batch_size for run in cluster.job(job_id).plan if run.state == "pending"]
    assert 64 in waiting
    with monkeypatch.context() as planning_takes_long:
        planning_takes_long.setattr(runs, "replan", lambda *_: None)
        cluster.patch(first.id, "out_of_memory", failed_local_batch_size=64)
        meanwhile = runs.claim(cluster.store, ANONYMOUS, job_id, request)
        assert meanwhile.run is None
        assert meanwhile.retry_after_s is not None
        assert "out of memory" in meanwhile.reason
        cluster.patch(cluster.train(job_id, first.configuration).id, "succeeded")  # planning is due for nothing less
        assert runs.claim(cluster.store, ANONYMOUS, job_id, request).run is None
    ran = [run.configuration.local_batch_size for run in cluster.work(job_id)]
    assert ran
    assert max(ran) < 64


def test_a_failed_run_that_is_retried_rules_its_configuration_out_no_more(cluster: Cluster) -> None:
    wanted = spec(search="full", cluster={"max_nodes": 2})
    job_id = cluster.register(wanted).job.id
    request = wire.ClaimRequest(holder="launcher")
    while (run := runs.claim(cluster.store, ANONYMOUS, job_id, request).run) is not None:
        if (run.configuration.num_nodes, run.configuration.local_batch_size) == (2, 256):
            cluster.patch(run.id, "failed")
        else:
            cluster.execute(run)
    again = cluster.register(wanted)
    assert [run.configuration.local_batch_size for run in again.runs] == [256]
    with cluster.store.transaction() as tx:
        tx.jobs.bump(job_id)
    assert cluster.recommendation(job_id).chosen == again.recommendation.chosen


def test_a_failed_or_mislaunched_first_run_is_the_first_to_be_claimed_once_its_job_is_registered_again(
    cluster: Cluster,
) -> None:
    job_id = cluster.register().job.id
    request = wire.ClaimRequest(holder="launcher")
    failed, mislaunched = [], None
    while mislaunched is None:
        run = runs.claim(cluster.store, ANONYMOUS, job_id, request).run
        assert run is not None
        if not failed:
            failed.append(run.configuration)
            cluster.patch(run.id, "failed")
        elif run.configuration.world_size > 2:
            mislaunched = run.configuration
            cluster.send(run, [0.1] * 20, world_size=2)  # on another number of ranks than planned
            cluster.patch(run.id, "succeeded")
        else:
            cluster.execute(run)
    waiting = [run.id for run in cluster.job(job_id).plan if run.state == "pending"]
    again = cluster.register()
    assert waiting, "runs of the first plan are left"
    for wanted in (*failed, mislaunched):
        run = runs.claim(cluster.store, ANONYMOUS, job_id, request).run
        assert run is not None
        assert (run.configuration, run.purpose[:7]) == (wanted, "Repeats")
        cluster.execute(run)
    cluster.work(job_id)
    repeated = [run.state for run in cluster.job(job_id).plan if run.purpose.startswith("Repeats")]
    assert repeated == ["succeeded"] * 2, "each once"
    candidates = cluster.recommendation(job_id).candidates
    assert all(one.excluded_by is None for one in candidates if one.configuration in {*failed, mislaunched})
    assert again.job.id == job_id
