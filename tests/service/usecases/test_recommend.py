"""The recommendation: computed once per version, honest about what it rests on, kept in the ledger for ever."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tula_wire as wire
from tests.service.usecases.cluster import Cluster, overlapping, spec
from tula_service.errors import InvalidInput
from tula_service.store import Store
from tula_service.usecases import cold_start, fitting, ledger, predict, recommend, register, runs, thresholds
from tula_service.usecases.access import ANONYMOUS


@pytest.fixture
def profiled(cluster: Cluster) -> tuple[Cluster, str]:
    """A job whose plan is done."""
    job_id = cluster.register().job.id
    cluster.work(job_id)
    return cluster, job_id


def test_a_second_question_costs_no_fit_and_gets_the_same_bytes(
    profiled: tuple[Cluster, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, job_id = profiled
    first = recommend.get(cluster.store, ANONYMOUS, job_id)
    monkeypatch.setattr(fitting, "fit", lambda *_: pytest.fail("a cached answer was fitted again"))
    assert recommend.get(cluster.store, ANONYMOUS, job_id) == first


def test_another_worker_computes_the_same_answer(profiled: tuple[Cluster, str]) -> None:
    cluster, job_id = profiled
    first = cluster.recommendation(job_id)
    with cluster.store.transaction() as tx:
        job = tx.jobs.get(job_id)
        second = recommend.publish(tx, job, "time", recommend.compute(tx, job, "time"))
    assert wire.read(wire.Recommendation, second) == first, "even the ledger entry is the same, since it says the same"


def test_predictions_are_true_within_their_intervals(profiled: tuple[Cluster, str]) -> None:
    cluster, job_id = profiled
    candidates = cluster.recommendation(job_id).candidates
    truth = np.array([overlapping(c.configuration) for c in candidates])
    value = np.array([c.step_time_s.value for c in candidates])
    inside = [c.step_time_s.low <= t <= c.step_time_s.high for c, t in zip(candidates, truth, strict=True)]
    assert np.median(np.abs(value / truth - 1)) < 0.05
    assert np.mean(inside) >= 0.8


def test_terms_add_up_to_the_step_and_equations_4a_and_4b_hold(profiled: tuple[Cluster, str]) -> None:
    cluster, job_id = profiled
    for c in cluster.recommendation(job_id).candidates:
        assert c.terms is not None
        assert c.terms.compute_time_s + c.terms.exposed_comm_time_s == pytest.approx(c.step_time_s.value)
        assert c.total_time_s.value == pytest.approx(10 * 100_000 / c.global_batch_size * c.step_time_s.value)
        assert c.cost_usd is not None
        assert c.cost_usd.value == pytest.approx(c.total_time_s.value / 3600 * 3.0 * c.configuration.num_nodes)


def test_the_frontier_is_what_no_candidate_beats_in_both(profiled: tuple[Cluster, str]) -> None:
    cluster, job_id = profiled
    answer = cluster.recommendation(job_id)
    for c in answer.candidates:
        assert c.cost_usd is not None
        beaten = any(
            o.total_time_s.value < c.total_time_s.value
            and o.cost_usd is not None
            and o.cost_usd.value < c.cost_usd.value
            for o in answer.candidates
        )
        assert c.dominated is beaten
        assert (c.configuration in answer.frontier) is not c.dominated


@pytest.mark.parametrize("objective", ["time", "cost", "knee"])
def test_each_objective_gets_its_own_and_says_why(profiled: tuple[Cluster, str], objective: str) -> None:
    cluster, job_id = profiled
    answer = cluster.recommendation(job_id, objective)
    assert answer.objective == objective
    expected = {"time": answer.least_time, "cost": answer.least_cost}.get(objective)
    assert answer.chosen is not None
    if expected is not None:
        assert answer.chosen == expected
    else:
        assert answer.knee.found is (answer.knee.configuration is not None)
        assert answer.knee.reason in answer.why
    assert f"{answer.chosen.configuration.num_nodes} node" in answer.why
    assert "runner-up" in answer.why


def test_an_unknown_objective_is_refused_by_name(profiled: tuple[Cluster, str]) -> None:
    cluster, job_id = profiled
    with pytest.raises(InvalidInput) as caught:
        recommend.get(cluster.store, ANONYMOUS, job_id, "cheapest")
    assert caught.value.field == "objective"


def test_limits_exclude_candidates_in_a_sentence(cluster: Cluster) -> None:
    job_id = cluster.register(spec(limits={"max_global_batch_size": 512})).job.id
    cluster.work(job_id)
    answer = cluster.recommendation(job_id)
    assert answer.chosen is not None
    assert answer.chosen.global_batch_size <= 512
    out = [c for c in answer.candidates if c.global_batch_size > 512]
    assert out
    assert all("above the limit of 512" in (c.excluded_by or "") for c in out)
    assert "max_global_batch_size" in answer.why


def test_the_knee_says_what_it_is_for_and_what_a_larger_batch_would_do(cluster: Cluster) -> None:
    job_id = cluster.register(spec(objective="knee")).job.id
    cluster.work(job_id)
    answer = cluster.recommendation(job_id)
    assert answer.knee.found
    assert answer.chosen is not None
    assert answer.least_time is not None
    assert answer.least_time.global_batch_size > answer.chosen.global_batch_size
    assert "larger ones tend to generalise worse" in answer.why
    assert f"global batch of {answer.least_time.global_batch_size}" in answer.why
    assert "ask for time or cost where quality can bear it" in answer.why
    assert "generalise" not in cluster.recommendation(job_id, "time").why


def test_limits_that_nothing_keeps_choose_nothing_and_say_so(cluster: Cluster) -> None:
    job_id = cluster.register(spec(limits={"deadline_s": 0.001})).job.id
    cluster.work(job_id)
    answer = cluster.recommendation(job_id)
    assert answer.chosen is None
    assert "deadline_s" in answer.why


def test_without_prices_no_cost_is_invented(cluster: Cluster) -> None:
    job_id = cluster.register(spec(cluster={"max_nodes": 4})).job.id
    answer = cluster.recommendation(job_id)
    assert all(c.cost_usd is None for c in answer.candidates)
    assert any("No price" in warning for warning in answer.model.warnings)


def test_spot_capacity_is_a_choice_beside_on_demand(cluster: Cluster) -> None:
    price = {
        "usd_per_node_hour": 3.0,
        "spot": {"usd_per_node_hour": 0.9, "interruptions_per_node_hour": 0.01, "checkpoint_interval_s": 600},
    }
    job_id = cluster.register(
        spec(cluster={"max_nodes": 4, "ranks_per_node": 2, "price": price}, objective="cost")
    ).job.id
    cluster.work(job_id)
    answer = cluster.recommendation(job_id)
    assert answer.chosen is not None
    assert answer.chosen.spot
    (twin,) = [c for c in answer.candidates if c.configuration == answer.chosen.configuration and not c.spot]
    assert twin.total_time_s.value < answer.chosen.total_time_s.value, "interruptions cost time"
    assert len([c for c in answer.candidates if c.spot]) == len([c for c in answer.candidates if not c.spot])


@pytest.mark.parametrize("objective", ["time", "cost", "knee"])
def test_a_price_per_gb_hour_waits_for_memory_and_then_counts_every_ranks_peak(
    sqlite_store: Store, objective: str
) -> None:
    cluster = Cluster(sqlite_store, capacity_bytes=16e9)
    price = {"usd_per_gb_hour": 0.1}
    nodes = {"max_nodes": 8, "ranks_per_node": 2, "price": price}
    made = cluster.register(spec(objective=objective, cluster=nodes, limits={"budget_usd": 1000.0}))
    before = made.recommendation
    assert before.basis == "prior"
    assert before.chosen is not None
    assert before.chosen.cost_usd is None
    assert any("per GB-hour" in warning for warning in before.model.warnings)
    cluster.work(made.job.id)
    after = cluster.recommendation(made.job.id)
    assert not any("per GB-hour" in warning for warning in after.model.warnings)
    for c in after.candidates:
        assert c.cost_usd is not None
        assert c.memory_bytes is not None
        hours = c.total_time_s.value / 3600
        assert c.cost_usd.value == pytest.approx(hours * c.configuration.world_size * c.memory_bytes.value / 1e9 * 0.1)


def test_at_a_price_per_gb_hour_the_plan_goes_on_where_no_run_tells_its_memory(cluster: Cluster) -> None:
    """What is recommended by node-hours is measured like any other choice."""
    nodes = {"max_nodes": 8, "ranks_per_node": 2, "price": {"usd_per_gb_hour": 0.1}}
    job_id = cluster.register(spec(objective="cost", cluster=nodes)).job.id
    request = wire.ClaimRequest(holder="launcher")
    while (run := runs.claim(cluster.store, ANONYMOUS, job_id, request).run) is not None:
        cluster.patch(run.id, "running")
        cluster.send(run, cluster.times(run.configuration, 20))
        cluster.patch(run.id, "succeeded")
    chosen = cluster.recommendation(job_id).chosen
    assert chosen is not None
    assert chosen.profiled
    assert "stable" in cluster.job(job_id).plan_reason


def test_several_instance_types_compete_in_one_job(cluster: Cluster) -> None:
    types = [
        {"instance_type": "fast", "max_nodes": 4, "price": {"usd_per_node_hour": 9.0}},
        {"instance_type": "slow", "max_nodes": 4, "price": {"usd_per_node_hour": 1.0}},
    ]
    cluster.step_time = lambda c: overlapping(c) * (1.0 if c.instance_type == "fast" else 3.0)
    job_id = cluster.register(spec(cluster=types)).job.id
    cluster.work(job_id)
    fastest, cheapest = (cluster.recommendation(job_id, objective).chosen for objective in ("time", "cost"))
    assert fastest is not None
    assert cheapest is not None
    assert (fastest.configuration.instance_type, cheapest.configuration.instance_type) == ("fast", "slow")


def test_an_earlier_job_on_the_same_hardware_gives_a_better_start(cluster: Cluster) -> None:
    wanted = {"cluster": {"max_nodes": 8, "ranks_per_node": 2, "accelerator": "V100-16GB"}}
    cold = cluster.register(spec(**wanted)).recommendation
    job_id = cluster.register(spec(**wanted)).job.id
    cluster.work(job_id)
    warm = cluster.register(spec(**wanted, epochs=20)).recommendation
    assert (cold.basis, warm.basis) == ("prior", "transfer")
    assert "earlier jobs" in warm.why

    def error(answer: wire.Recommendation) -> float:
        return float(
            np.median([abs(c.step_time_s.value / overlapping(c.configuration) - 1) for c in answer.candidates])
        )

    assert error(warm) < 0.25 * error(cold)
    elsewhere = {"cluster": {"max_nodes": 8, "ranks_per_node": 2, "accelerator": "T4"}}
    moved = cluster.register(spec(**elsewhere)).recommendation
    assert moved.basis == "prior", "jobs on other hardware are no measurement of this one"
    pairs = zip(moved.candidates, warm.candidates, strict=True)
    slower = np.median([t4.step_time_s.value / v100.step_time_s.value for t4, v100 in pairs])
    assert 1.5 < slower < 900.0 / 320.0 * 1.2, "the same network, moved by what the data sheets differ in"


def test_each_instance_type_of_a_job_that_never_ran_has_a_guess_of_its_own(cluster: Cluster) -> None:
    types = [
        {"instance_type": "new", "max_nodes": 2, "accelerator": "A100-40GB", "network_gbps": 100},
        {"instance_type": "old", "max_nodes": 2, "accelerator": "T4", "network_gbps": 10},
    ]
    answer = cluster.register(spec(cluster=types, model={"name": "net", "flops_per_sample": 12e9})).recommendation
    at = {(c.configuration.instance_type, c.configuration.local_batch_size): c.step_time_s for c in answer.candidates}
    assert at["old", 256].value > 3 * at["new", 256].value
    assert answer.basis == "prior"


def test_a_type_with_lessons_does_not_lend_its_certainty_to_one_without(cluster: Cluster) -> None:
    known = {"instance_type": "known", "max_nodes": 4, "ranks_per_node": 2, "accelerator": "V100-16GB"}
    cluster.work(cluster.register(spec(cluster=known)).job.id)
    strange = {"instance_type": "strange", "max_nodes": 4, "ranks_per_node": 2, "accelerator": "Q9"}
    answer = cluster.register(spec(cluster=[known, strange])).recommendation
    width = {
        c.configuration.instance_type: c.step_time_s.high / c.step_time_s.low
        for c in answer.candidates
        if c.configuration.local_batch_size == 256
    }
    assert answer.basis == "prior", "one of the two rests on a guess"
    assert width["strange"] > 1.5 * width["known"]


def test_the_ledger_keeps_every_recommendation_and_cannot_be_changed(profiled: tuple[Cluster, str]) -> None:
    cluster, job_id = profiled
    before = ledger.entries(cluster.store, ANONYMOUS, job_id).entries
    assert [entry.basis for entry in before][-1] == "prior"
    assert before[0].recommendation_id == cluster.recommendation(job_id).id
    patch = wire.JobPatch(prices={"default": wire.Price(usd_per_node_hour=6.0)})
    register.change(cluster.store, ANONYMOUS, job_id, patch)
    after = ledger.entries(cluster.store, ANONYMOUS, job_id).entries
    assert after[1:] == before
    assert after[0].prices["default"]["usd_per_node_hour"] == 6.0  # type: ignore[index]
    with pytest.raises(sa.exc.DatabaseError), cluster.store.transaction() as tx:
        tx.connection.execute(sa.text("UPDATE ledger SET basis = 'profiled'"))


def test_training_is_put_beside_its_prediction_and_widens_what_was_too_narrow(profiled: tuple[Cluster, str]) -> None:
    cluster, job_id = profiled
    chosen = cluster.recommendation(job_id).chosen
    assert chosen is not None
    width = chosen.step_time_s.high / chosen.step_time_s.low
    for _ in range(4):
        run = cluster.train(job_id, chosen.configuration)
        cluster.send(run, [1.3 * overlapping(chosen.configuration)] * 4)
        cluster.patch(run.id, "succeeded")
    entries = [entry for entry in ledger.entries(cluster.store, ANONYMOUS, job_id).entries if entry.run_id]
    assert len(entries) == 4
    newest = entries[-1]
    assert newest.measured_step_time_s == pytest.approx(1.3 * overlapping(chosen.configuration))
    assert newest.predicted_step_time_s is not None
    assert newest.error == pytest.approx(newest.measured_step_time_s / newest.predicted_step_time_s.value - 1)
    assert newest.within_interval is False
    assert cluster.job(job_id).prediction_error is not None
    other = cluster.register(spec(epochs=2)).job.id
    cluster.work(other)
    again = cluster.recommendation(other).candidates
    (same,) = [c for c in again if c.configuration == chosen.configuration]
    assert same.step_time_s.high / same.step_time_s.low > width


def test_training_is_put_beside_the_recommendation_that_it_follows_whoever_asked_last(
    profiled: tuple[Cluster, str],
) -> None:
    cluster, job_id = profiled
    own, other = cluster.recommendation(job_id), cluster.recommendation(job_id, "cost")
    assert own.chosen is not None
    assert other.chosen is not None
    assert own.chosen.configuration != other.chosen.configuration
    for followed in (own, other):
        run = cluster.train(job_id, followed.chosen.configuration)  # type: ignore[union-attr]
        cluster.send(run, [overlapping(run.configuration)] * 4)
        cluster.patch(run.id, "succeeded")
    kept = ledger.entries(cluster.store, ANONYMOUS, job_id).entries
    assert {e.recommendation_id for e in kept if e.run_id is not None} == {own.id, other.id}
    neither = next(
        c.configuration
        for c in own.candidates
        if c.configuration not in {own.chosen.configuration, other.chosen.configuration}
    )
    run = cluster.train(job_id, neither)
    cluster.send(run, [overlapping(run.configuration)] * 4)
    cluster.patch(run.id, "succeeded")
    assert all(e.run_id != run.id for e in ledger.entries(cluster.store, ANONYMOUS, job_id).entries)


def test_what_calibration_learns_from_is_the_width_that_the_model_gave(
    profiled: tuple[Cluster, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, job_id = profiled
    chosen = cluster.recommendation(job_id).chosen
    assert chosen is not None
    promised = ledger.entries(cluster.store, ANONYMOUS, job_id).entries[0].predicted_step_time_s
    assert promised is not None
    # Had the promise been twice as wide as the model's own, the pair kept must be half as wide: else widening undoes
    # itself as soon as widened promises come true.
    monkeypatch.setattr(fitting, "calibration", lambda _: 2.0)
    run = cluster.train(job_id, chosen.configuration)
    cluster.send(run, [overlapping(chosen.configuration)] * 4)
    cluster.patch(run.id, "succeeded")
    with cluster.store.reading() as tx:
        job = tx.jobs.get(job_id)
        ((value, low, high, measured),) = cold_start.lessons_of(tx, job, fitting.spec_of(job)).pairs
    assert (value, measured) == pytest.approx((promised.value, overlapping(chosen.configuration)))
    assert value / low == pytest.approx((promised.value / promised.low) ** 0.5)
    assert high / value == pytest.approx((promised.high / promised.value) ** 0.5)


def test_time_to_quality_trades_throughput_against_the_worth_of_an_example(profiled: tuple[Cluster, str]) -> None:
    cluster, job_id = profiled
    unknown = cluster.recommendation(job_id, "time_to_quality")
    assert "not known before training reports it" in unknown.why
    assert unknown.max_sensible_batch_size is None
    run = cluster.train(job_id, wire.Configuration(num_nodes=1, ranks_per_node=2, local_batch_size=32))
    cluster.report(run, gradient_noise_scale=[200.0] * 400)
    thresholds.current(cluster.store, ANONYMOUS, job_id)
    known = cluster.recommendation(job_id, "time_to_quality")
    assert known.max_sensible_batch_size == 200 + 2 * 64
    assert known.chosen is not None
    assert unknown.chosen is not None
    assert known.chosen.global_batch_size < unknown.chosen.global_batch_size
    base = min(known.candidates, key=lambda c: c.global_batch_size)
    assert base.statistical_efficiency == pytest.approx(1.0)
    assert all(c.statistical_efficiency is not None and c.statistical_efficiency <= 1 for c in known.candidates)


def ask(cluster: Cluster, job_id: str, **question: Any) -> wire.Predictions:
    """A what-if."""
    return predict.predictions(cluster.store, ANONYMOUS, job_id, predict.WhatIf(**question))


def test_a_what_if_answers_for_what_was_never_a_candidate(profiled: tuple[Cluster, str]) -> None:
    cluster, job_id = profiled
    (found,) = ask(cluster, job_id, num_nodes=[3], local_batch_size=[48]).candidates
    assert found.global_batch_size == 3 * 2 * 48
    truth = overlapping(found.configuration)
    assert found.step_time_s.low < truth < found.step_time_s.high
    (outside,) = ask(cluster, job_id, num_nodes=[32], local_batch_size=[48]).candidates
    assert outside.extrapolated
    width = outside.step_time_s.high / outside.step_time_s.low
    assert width > found.step_time_s.high / found.step_time_s.low


def test_a_what_if_grid_price_and_deadline_replace_the_jobs_own(profiled: tuple[Cluster, str]) -> None:
    cluster, job_id = profiled
    grid = ask(cluster, job_id, num_nodes=[1, 2, 4], global_batch_size=[256, 512])
    assert {(c.configuration.num_nodes, c.global_batch_size) for c in grid.candidates} == {
        (n, b) for n in (1, 2, 4) for b in (256, 512)
    }
    dear = ask(cluster, job_id, num_nodes=[1], local_batch_size=[32], usd_per_node_hour=6.0, deadline_s=1e-3)
    (plain,) = ask(cluster, job_id, num_nodes=[1], local_batch_size=[32]).candidates
    assert plain.cost_usd is not None
    assert dear.candidates[0].cost_usd is not None
    assert dear.candidates[0].cost_usd.value == pytest.approx(2 * plain.cost_usd.value)
    assert "deadline" in (dear.candidates[0].excluded_by or "") or " s" in (dear.candidates[0].excluded_by or "")


@pytest.mark.parametrize(
    ("question", "field"),
    [
        ({"global_batch_size": [512], "local_batch_size": [32]}, "local_batch_size"),
        ({"num_nodes": [3], "global_batch_size": [7]}, "global_batch_size"),
        ({"instance_type": ["p4d"]}, "instance_type"),
        ({"usd_per_node_hour": float("nan")}, "usd_per_node_hour"),
        ({"deadline_s": float("inf")}, "deadline_s"),
        ({"num_nodes": list(range(1, 50)), "local_batch_size": list(range(1, 50))}, "num_nodes"),
    ],
)
def test_a_question_without_an_answer_is_refused_by_field(
    profiled: tuple[Cluster, str], question: dict[str, Any], field: str
) -> None:
    cluster, job_id = profiled
    with pytest.raises(InvalidInput) as caught:
        ask(cluster, job_id, **question)
    assert caught.value.field == field


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(nodes=st.integers(1, 16), batch=st.integers(1, 512))
def test_every_prediction_lies_inside_its_own_interval(profiled: tuple[Cluster, str], nodes: int, batch: int) -> None:
    cluster, job_id = profiled
    (found,) = ask(cluster, job_id, num_nodes=[nodes], local_batch_size=[batch]).candidates
    for value in (found.step_time_s, found.total_time_s, found.cost_usd):
        assert value is not None
        assert 0 < value.low <= value.value <= value.high < float("inf")


def test_what_if_reads_only(profiled: tuple[Cluster, str], sqlite_store: Store) -> None:
    cluster, job_id = profiled
    with sqlite_store.reading() as tx:
        before = tx.jobs.data_version(job_id)
    ask(cluster, job_id)
    with sqlite_store.reading() as tx:
        assert tx.jobs.data_version(job_id) == before


def test_samples_that_say_the_same_do_not_fill_the_ledger(profiled: tuple[Cluster, str]) -> None:
    cluster, job_id = profiled
    chosen = cluster.recommendation(job_id).chosen
    assert chosen is not None
    run = cluster.train(job_id, chosen.configuration)
    before = len(ledger.entries(cluster.store, ANONYMOUS, job_id).entries)
    for _ in range(6):
        cluster.send(run, cluster.times(run.configuration, 20))
        cluster.recommendation(job_id)
    assert len(ledger.entries(cluster.store, ANONYMOUS, job_id).entries) <= before + 1
