"""Tests that SQLite and Postgres fulfil the same store contract."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import sqlalchemy as sa

from tests.service.store.examples import CONFIGURATION, a_chunk, a_job, a_run, a_specification, add_chunk, samples
from tests.support.clock import ManualClock
from tests.support.configurations import make_configuration
from tula_service.domain import MemoryReading, NewRun
from tula_service.errors import Conflict, NotFound
from tula_service.perfmodel.step_summary import summarise
from tula_service.store import DEFAULT_PROJECT_ID, Store, Transaction
from tula_service.store.ledger import LedgerRecord
from tula_service.store.tables import audit_log
from tula_wire import Estimate


def test_a_reading_transaction_sees_one_snapshot(store: Store) -> None:
    """While a transaction reads, it does not see what other transactions commit."""
    a_job(store)
    with store.reading() as tx:
        assert tx.jobs.list().total == 1
        a_job(store, name="meanwhile")
        assert tx.jobs.list().total == 1
    with store.reading() as tx:
        assert tx.jobs.list().total == 2


class TestJobs:
    """Tests jobs and their lists."""

    def test_a_registration_repeated_under_one_key_is_one_job(self, store: Store) -> None:
        options = {"idempotency_key": "k", "fingerprint": "f"}
        with store.transaction() as tx:
            first, created = tx.jobs.create(DEFAULT_PROJECT_ID, a_specification("a"), **options)
        with store.transaction() as tx:
            again, created_again = tx.jobs.create(DEFAULT_PROJECT_ID, a_specification("a"), **options)
            assert tx.jobs.list().total == 1
        assert (created, created_again) == (True, False)
        assert again.id == first.id

    def test_a_key_used_for_another_job_is_a_conflict(self, store: Store) -> None:
        with store.transaction() as tx:
            tx.jobs.create(DEFAULT_PROJECT_ID, a_specification("a"), idempotency_key="k", fingerprint="f")
        with pytest.raises(Conflict, match="another specification"), store.transaction() as tx:
            tx.jobs.create(DEFAULT_PROJECT_ID, a_specification("b"), idempotency_key="k", fingerprint="g")

    def test_pages_hold_every_job_once_newest_first(self, store: Store) -> None:
        made = [a_job(store, name=f"job {number}").id for number in range(7)]
        seen: list[str] = []
        cursor = None
        with store.reading() as tx:
            while True:
                page = tx.jobs.list(cursor=cursor, limit=3)
                assert page.total == 7
                seen += [job.id for job in page.jobs]
                if page.next_cursor is None:
                    break
                cursor = int(page.next_cursor)
        assert seen == made[::-1]

    def test_jobs_are_sorted_and_those_without_the_figure_come_last(self, store: Store) -> None:
        figures = {"b": (20.0, 3.0, -0.3), "A": (10.0, 4.0, 0.1), "c": (None, None, None)}
        with store.transaction() as tx:
            for name, (time_s, cost_usd, error) in figures.items():
                job, _ = tx.jobs.create(DEFAULT_PROJECT_ID, a_specification(name))
                values = {"predicted_time_s": time_s, "predicted_cost_usd": cost_usd, "prediction_error": error}
                tx.jobs.update(job.id, **values)
        with store.reading() as tx:
            orders = {"newest": "cAb", "name": "Abc", "time": "Abc", "cost": "bAc", "error": "bAc"}
            for order, names in orders.items():
                listed = tx.jobs.list(order=order).jobs  # type: ignore[arg-type]
                assert [job.name for job in listed] == list(names), order
            assert tx.jobs.list(order="name", limit=2).next_cursor is None

    def test_search_is_case_blind_literal_and_reaches_the_model(self, store: Store) -> None:
        by_name = a_job(store, name="Night 100% run").id
        by_model = a_job(store, name="other", model_name="ResNet-50").id
        with store.reading() as tx:
            assert [job.id for job in tx.jobs.list(search="night").jobs] == [by_name]
            assert [job.id for job in tx.jobs.list(search="resnet").jobs] == [by_model]
            assert [job.id for job in tx.jobs.list(search="0% r").jobs] == [by_name]
            assert tx.jobs.list(search="%").total == 1
            assert (tx.jobs.list(search="night\0").jobs, tx.jobs.list(search="\0").total) == ([], 0)

    def test_a_search_finds_every_name_with_this_part_and_no_other_page_by_page(self, store: Store) -> None:
        """The part may have any length and contain any characters; the result must equal a search through all names."""
        names = ["a_b", "aXb", 'say "abc"', "ABCD", "abd bcd", "Größe", "ab", "x*y-z OR w", "net"]
        made = [a_job(store, name=name, model_name="NET").id for name in names]
        with store.transaction() as tx:
            tx.jobs.delete(made.pop())
            names.pop()
        for search in ("a_b", "b", "abc", "bcd", '"abc"', "*y-z", " OR ", "öße", "net", "netz", "%%%"):
            found: list[str] = []
            cursor = None
            with store.reading() as tx:
                while True:
                    page = tx.jobs.list(search=search, limit=3, cursor=cursor)
                    found += [job.name for job in page.jobs]
                    if page.next_cursor is None:
                        break
                    cursor = int(page.next_cursor)
                total = tx.jobs.list(search=search).total
            expected = [name for name in reversed(names) if search.lower() in name.lower() or search == "net"]
            assert (search, found) == (search, expected)
            assert total == len(expected)

    def test_archived_jobs_leave_the_list_and_stay_readable(self, store: Store) -> None:
        job = a_job(store)
        with store.transaction() as tx:
            tx.jobs.update(job.id, state="archived")
        with store.reading() as tx:
            assert tx.jobs.list().total == 0
            assert tx.jobs.list(state="archived").total == 1
            assert tx.jobs.get(job.id).state == "archived"

    def test_counts_are_of_profiling_runs_that_were_not_cancelled(self, store: Store) -> None:
        job = a_job(store)
        done, cancelled = a_run(store, job.id), a_run(store, job.id)
        a_run(store, job.id)
        a_run(store, job.id, kind="train")
        with store.transaction() as tx:
            tx.runs.transition(done.id, expected=["pending"], to="succeeded")
            tx.runs.transition(cancelled.id, expected=["pending"], to="cancelled")
            counted = tx.jobs.get(job.id)
        assert (counted.runs_done, counted.runs_planned) == (1, 2)

    def test_recommended_configuration_comes_back_as_it_went_in(self, store: Store) -> None:
        job = a_job(store)
        with store.transaction() as tx:
            tx.jobs.update(job.id, recommended=CONFIGURATION, predicted_time_s=1.5, state="ready")
        with store.reading() as tx:
            found = tx.jobs.get(job.id)
        assert (found.recommended, found.predicted_time_s, found.state) == (CONFIGURATION, 1.5, "ready")

    def test_an_unknown_job_is_not_found(self, store: Store) -> None:
        with pytest.raises(NotFound, match="no job"), store.reading() as tx:
            tx.jobs.get("job-nowhere")

    def test_everything_that_can_change_a_fit_moves_the_data_version(self, store: Store) -> None:
        job = a_job(store)
        versions = [0]

        def moved() -> None:
            with store.reading() as tx:
                versions.append(tx.jobs.data_version(job.id))
            assert versions[-1] > versions[-2]

        run = a_run(store, job.id)
        moved()
        with store.transaction() as tx:
            tx.runs.transition(run.id, expected=["pending"], to="running")
        moved()
        with store.transaction() as tx:
            tx.samples.add(run.key, job.id, samples(5))
        moved()
        with store.transaction() as tx:
            tx.jobs.update(job.id, bump=True, objective="time")
        moved()
        with store.transaction() as tx:
            tx.samples.add(run.key, job.id, samples(5))
        with store.reading() as tx:
            assert tx.jobs.data_version(job.id) == versions[-1], "a resend changes nothing"


class TestRuns:
    """Tests leases and states of runs."""

    def test_runs_are_claimed_in_plan_order_and_only_profiling_ones(self, store: Store) -> None:
        job = a_job(store)
        late, early = a_run(store, job.id, position=2), a_run(store, job.id, position=1)
        a_run(store, job.id, kind="train", position=0)
        with store.transaction() as tx:
            claimed = [tx.leases.claim(job.id, holder="h", lease_s=60) for _ in range(3)]
        assert [run and run.id for run in claimed] == [early.id, late.id, None]
        assert claimed[0] is not None
        assert (claimed[0].state, claimed[0].holder) == ("claimed", "h")

    def test_a_claim_skips_runs_that_need_too_many_nodes(self, store: Store) -> None:
        job = a_job(store)
        a_run(store, job.id, position=0, configuration=make_configuration(8, 1, 32))
        small = a_run(store, job.id, position=1, configuration=make_configuration(2, 1, 32))
        with store.transaction() as tx:
            claimed = tx.leases.claim(job.id, holder="h", lease_s=60, max_nodes=4)
        assert claimed is not None
        assert claimed.id == small.id

    def test_a_launch_is_leased_to_one_holder_and_renewed_as_one(self, store: Store, clock: ManualClock) -> None:
        job = a_job(store)
        runs = [a_run(store, job.id, configuration=make_configuration(4, 1, batch)) for batch in (32, 64, 128)]
        a_run(store, job.id, configuration=make_configuration(2, 1, 64))
        a_run(store, job.id, kind="train", configuration=make_configuration(4, 1, 64))
        with store.transaction() as tx:
            first = tx.leases.claim(job.id, holder="h", lease_s=60)
            assert first is not None
            others = tx.leases.claim_launch(first)
            assert {run.id for run in (first, *others)} == {run.id for run in runs}
            assert {(run.holder, run.state) for run in others} == {("h", "claimed")}
            assert tx.leases.claim_launch(first) == []
        clock.advance(50)
        with store.transaction() as tx:
            tx.leases.renew(first.id, whole_launch=True)
        clock.advance(50)
        with store.transaction() as tx:
            other = tx.leases.claim(job.id, holder="i", lease_s=600)
            assert other is not None
            assert other.configuration.num_nodes == 2, "the launch is still held"
        clock.advance(50)
        with store.transaction() as tx:
            again = tx.leases.claim(job.id, holder="i", lease_s=60)
            assert again is not None
            assert len(tx.leases.claim_launch(again)) == 2

    def test_runs_with_other_options_are_another_launch(self, store: Store) -> None:
        job = a_job(store)
        for word in ("fp32", "bf16"):
            for batch in (32, 64):
                options = (("compile", "off"), ("precision", word))
                a_run(store, job.id, configuration=replace(CONFIGURATION, local_batch_size=batch, options=options))
        with store.transaction() as tx:
            first = tx.leases.claim(job.id, holder="a", lease_s=60.0)
            assert first is not None
            others = tx.leases.claim_launch(first)
        assert [dict(run.configuration.options)["precision"] for run in (first, *others)] == ["fp32", "fp32"]

    def test_runs_without_a_holder_are_no_launch(self, store: Store, clock: ManualClock) -> None:
        job = a_job(store)
        options = {"state": "claimed", "lease_s": 60.0}
        first, other = (a_run(store, job.id, configuration=make_configuration(4, 1, b), **options) for b in (32, 64))
        clock.advance(50)
        with store.transaction() as tx:
            assert tx.leases.renew(first.id, whole_launch=True)
            renewed, expires_at = tx.runs.get(first.id).lease_expires_at, tx.runs.get(other.id).lease_expires_at
            assert (renewed, expires_at) == (clock() + timedelta(seconds=60), other.lease_expires_at)

    def test_many_claimants_never_share_a_run(self, store: Store) -> None:
        job = a_job(store)
        for _ in range(10):
            a_run(store, job.id)
        claimed: list[str] = []
        start = threading.Barrier(5)

        def claim_all(holder: str) -> None:
            start.wait()
            while True:
                with store.transaction() as tx:
                    run = tx.leases.claim(job.id, holder=holder, lease_s=60)
                if run is None:
                    return
                claimed.append(run.id)

        threads = [threading.Thread(target=claim_all, args=(f"h{number}",)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(claimed) == len(set(claimed)) == 10

    def test_a_lease_that_is_not_renewed_goes_back(self, store: Store, clock: ManualClock) -> None:
        job = a_job(store)
        run = a_run(store, job.id)
        with store.transaction() as tx:
            tx.leases.claim(job.id, holder="first", lease_s=30)
        clock.advance(20)
        with store.transaction() as tx:
            assert tx.leases.renew(run.id)
        clock.advance(20)
        with store.transaction() as tx:
            assert tx.leases.claim(job.id, holder="second", lease_s=30) is None, "renewed at 20 s for 30 s more"
        clock.advance(11)
        with store.transaction() as tx:
            again = tx.leases.claim(job.id, holder="second", lease_s=30)
        assert again is not None
        assert (again.id, again.holder) == (run.id, "second")

    def test_a_state_changes_only_from_the_expected_one(self, store: Store) -> None:
        job = a_job(store)
        run = a_run(store, job.id)
        with store.transaction() as tx:
            assert not tx.runs.transition(run.id, expected=["claimed"], to="running")
            assert tx.runs.transition(run.id, expected=["pending"], to="running")
            assert tx.runs.transition(run.id, expected=["running"], to="succeeded", dropped=3)
            assert not tx.runs.transition(run.id, expected=["running"], to="failed")
            found = tx.runs.get(run.id)
        assert (found.state, found.dropped) == ("succeeded", 3)
        assert found.started_at is not None
        assert found.finished_at is not None

    def test_a_training_run_is_never_leased_out(self, store: Store, clock: ManualClock) -> None:
        job = a_job(store)
        with store.transaction() as tx:
            tx.runs.create(job.id, NewRun("train", CONFIGURATION, "running", holder="user", lease_s=10))
        clock.advance(60)
        with store.transaction() as tx:
            assert tx.leases.claim(job.id, holder="h", lease_s=10) is None


class TestLedgerFitsScalingEvents:
    """Tests the ledger, fits, scaling values and events of a job."""

    def entry(self, tx: Transaction, job_id: str) -> LedgerRecord:
        """Write a ledger entry in the transaction; return it."""
        entry = LedgerRecord(
            created_at=tx.now(),
            job_id=job_id,
            objective="knee",
            basis="profiled",
            configuration=CONFIGURATION,
            prices={"default": {"usd_per_node_hour": 2.5}},
            model_version="1",
            data_version=3,
            predicted_step_time_s=Estimate(value=0.5, low=0.4, high=0.6),
        )
        tx.ledger.append(entry)
        return entry

    def test_an_entry_keeps_its_prices_and_gets_its_outcome_beside_it(self, store: Store) -> None:
        job = a_job(store)
        run = a_run(store, job.id)
        with store.transaction() as tx:
            entry = self.entry(tx, job.id)
            assert list(tx.ledger.list(job.id, followed=True)) == []
            tx.ledger.record_outcome(entry.recommendation_id, run.id, 0.55, error=0.1, within_interval=True)
            tx.ledger.record_outcome(entry.recommendation_id, run.id, 0.56, error=0.12, within_interval=True)
        with store.reading() as tx:
            (found,) = tx.ledger.list(job.id)
            assert tx.ledger.latest(job.id, "knee") == found
            assert list(tx.ledger.list(job.id, followed=True)) == [found]
            assert list(tx.ledger.errors()) == [0.12]
            assert list(tx.ledger.outcomes(project_id="another")) == []
            (of_job,) = tx.ledger.outcomes(project_id=DEFAULT_PROJECT_ID)
            assert of_job == (found, job.name, job.model_name, job.spec)
        assert found.prices == {"default": {"usd_per_node_hour": 2.5}}
        assert found.predicted_step_time_s == Estimate(value=0.5, low=0.4, high=0.6)
        assert found.measured_step_time_s == 0.56

    def test_the_database_itself_refuses_to_change_an_entry(self, store: Store) -> None:
        job = a_job(store)
        with store.transaction() as tx:
            self.entry(tx, job.id)
        with pytest.raises(sa.exc.DBAPIError, match="immutable"), store.transaction() as tx:
            tx.connection.execute(sa.text("UPDATE ledger SET basis = 'prior'"))

    def test_a_kept_fit_answers_only_for_its_versions(self, store: Store) -> None:
        job = a_job(store)
        with store.transaction() as tx:
            tx.answers.put(job.id, "rec", data_version=5, model_version="2", body='{"a":1}')
            tx.answers.put(job.id, "rec", data_version=4, model_version="2", body="late")
        with store.reading() as tx:
            assert tx.answers.get(job.id, "rec", data_version=5, model_version="2") == '{"a":1}'
            assert tx.answers.get(job.id, "rec", data_version=6, model_version="2") is None
            assert tx.answers.get(job.id, "rec", data_version=5, model_version="3") is None

    def test_numbers_of_a_policy_are_replaced_as_a_whole(self, store: Store) -> None:
        job = a_job(store)
        nothing = dict.fromkeys(("delta", "static_scale", "s_min", "s_max", "small_batch_size"))
        with store.transaction() as tx:
            assert tx.scaling.read(job.id, "ags") is None
            for version, numbers in ((2, {"delta": 0.5}), (3, {"s_max": 2.0})):
                tx.scaling.write(job.id, "ags", {**nothing, **numbers, "version": version})
            assert tx.scaling.read(job.id, "ags") == {**nothing, "s_max": 2.0, "version": 3}
            assert tx.scaling.read(job.id, "gain") is None

    def test_events_are_read_on_from_the_last_one_seen(self, store: Store) -> None:
        job, other = a_job(store), a_job(store)
        with store.transaction() as tx:
            first = tx.events.append(job.id, "job")
            tx.events.append(other.id, "job")
            second = tx.events.append(job.id, "run", run_id="r", data={"state": "running"})
            found = tx.events.after(job.id, first)
            assert tx.events.last_id(job.id) == second
        assert [(event.id, event.kind, event.data) for event in found] == [(second, "run", {"state": "running"})]

    def test_a_locked_job_still_takes_events_of_others_so_that_no_two_wait_for_each_other(
        self, postgres_url: str
    ) -> None:
        store = Store.open(postgres_url)
        job = a_job(store)
        run = a_run(store, job.id)

        def announce() -> None:
            with store.transaction() as tx:
                assert tx.leases.claim(job.id, holder="h", lease_s=10) is not None
                tx.events.append(job.id, "run", run_id=run.id)

        with ThreadPoolExecutor(1) as launcher:
            with store.transaction() as tx:
                tx.jobs.lock(job.id)
                announced = launcher.submit(announce)
                waiting = sa.text("SELECT count(*) FROM pg_locks WHERE NOT granted")
                while not announced.done() and not tx.connection.execute(waiting).scalar():
                    pass
                tx.runs.update(run.id, predicted_step_time_s=0.5)
                tx.events.append(job.id, "job")
            announced.result()
        with store.reading() as tx:
            assert [event.kind for event in tx.events.after(job.id)] == ["run", "job"]
        store.close()

    def test_the_newest_events_of_some_kinds_come_first(self, store: Store) -> None:
        job, other = a_job(store), a_job(store)
        with store.transaction() as tx:
            named = [
                (kind, run_id, tx.events.append(job.id, kind, run_id=run_id))
                for kind, run_id in (("run", "r"), ("samples", "r"), ("drift", "s"), ("job", None))
            ]
            tx.events.append(other.id, "job")
            all_kinds = tx.events.recent(job.id, kinds=("run", "drift", "job"), limit=2)
            of_run = tx.events.recent(job.id, kinds=("run", "drift", "job"), run_id="r")
        assert [event.id for event in all_kinds] == [named[3][2], named[2][2]]
        assert [event.id for event in of_run] == [named[0][2]]


class TestAccess:
    """Tests tokens, projects and the audit log."""

    def test_a_project_name_stands_for_one_project(self, store: Store) -> None:
        with store.transaction() as tx:
            made = tx.projects.create("blue")
        with pytest.raises(Conflict, match="blue"), store.transaction() as tx:
            tx.projects.create("blue")
        with store.reading() as tx:
            assert tx.projects.by_name("blue") == made
            assert [project.name for project in tx.projects.list()] == ["blue", "default"]

    def test_that_a_token_was_made_is_never_forgotten(self, store: Store, clock: ManualClock) -> None:
        from datetime import timedelta

        with store.transaction() as tx:
            assert not tx.tokens.ever_made()
            revoked = tx.tokens.create(sha256="a", name="a", scope="admin")
            tx.tokens.create(sha256="b", name="b", scope="admin", expires_at=clock() + timedelta(seconds=5))
            tx.tokens.revoke(revoked.id)
            assert tx.tokens.ever_made()
        clock.advance(6)
        with store.reading() as tx:
            assert tx.tokens.ever_made()
            assert tx.tokens.by_hash("a") is not None
            assert tx.tokens.by_hash("c") is None

    def test_acts_are_kept_in_their_order(self, store: Store) -> None:
        with store.transaction() as tx:
            tx.audit.append(actor="x", action="token.create", target="t1", detail={"name": "n"})
            tx.audit.append(actor="x", action="token.revoke", target="t1")
            acts = tx.connection.execute(sa.select(audit_log.c.action).order_by(audit_log.c.id)).scalars()
            assert list(acts) == ["token.create", "token.revoke"]


def test_a_failed_transaction_stores_nothing(store: Store) -> None:
    job = a_job(store)

    def fail_half_way() -> None:
        with store.transaction() as tx:
            tx.jobs.update(job.id, state="ready")
            tx.runs.create(job.id, NewRun("profile", CONFIGURATION))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail_half_way()
    with store.reading() as tx:
        assert tx.jobs.get(job.id).state == "planning"
        assert tx.runs.list(job.id) == []


def test_a_deleted_job_takes_everything_with_it(store: Store) -> None:
    """Runs, samples, chunks, events, fits, ledger entries and tokens are deleted with their job."""
    import sqlalchemy as sa

    from tula_service.store.tables import METADATA

    with store.reading() as tx:
        before = {
            table.name: tx.connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
            for table in METADATA.sorted_tables
        }
    job = a_job(store)
    run = a_run(store, job.id)
    with store.transaction() as tx:
        tx.samples.add(run.key, job.id, samples(5, memory=MemoryReading("peak_rss", 1)))
        tx.samples.refresh(run.key, summarise)
        add_chunk(tx, run.key, a_chunk(0, 5))
        tx.events.append(job.id, "job")
        tx.answers.put(job.id, "x", data_version=1, model_version="1", body="{}")
        tx.scaling.write(job.id, "gain", {"version": 2, "s_max": 2.0})
        entry = TestLedgerFitsScalingEvents().entry(tx, job.id)
        tx.ledger.record_outcome(entry.recommendation_id, run.id, 1.0, error=0.0, within_interval=True)
        tx.tokens.create(sha256="z", name="z", scope="agent", project=DEFAULT_PROJECT_ID, job_id=job.id)
    with store.transaction() as tx:
        tx.jobs.delete(job.id)
        after = {
            table.name: tx.connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
            for table in METADATA.sorted_tables
        }
    assert after == before
