"""Tests that a recommendation is computed once per version, names its basis, and remains in the ledger."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import tula_wire as wire
from tests.service.usecases.cluster import Cluster, overlapping, spec
from tula_service.analysis.explanation import describe_configuration
from tula_service.analysis.questions import report_findings
from tula_service.errors import StoreUnavailable
from tula_service.store import DEFAULT_PROJECT_ID, Store
from tula_service.usecases import jobs, planning, recommendations, runs
from tula_service.usecases.access import ANONYMOUS, Principal
from tula_service.usecases.job_data import load_job_data


def test_a_second_question_costs_no_fit_and_gets_the_same_bytes(
    profiled: tuple[Cluster, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, job_id = profiled
    first = recommendations.get(cluster.store, ANONYMOUS, job_id)
    monkeypatch.setattr(planning, "report_findings", lambda *_: pytest.fail("a cached answer was fitted again"))
    assert recommendations.get(cluster.store, ANONYMOUS, job_id) == first


def test_another_worker_computes_the_same_answer(profiled: tuple[Cluster, str]) -> None:
    cluster, job_id = profiled
    first = cluster.recommendation(job_id)
    with cluster.store.transaction() as tx:
        job = tx.jobs.get(job_id)
        second = planning.store_answer(tx, job, report_findings(load_job_data(tx, job), "time"))
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


def test_batch_throughput_and_cost_are_given_in_tokens_too(cluster: Cluster) -> None:
    assert cluster.register().recommendation.candidates[0].tokens_per_step is None
    for c in cluster.register(spec(model={"name": "net", "tokens_per_example": 512})).recommendation.candidates:
        assert c.tokens_per_step == 512 * c.global_batch_size
        assert c.tokens_per_s is not None
        assert c.tokens_per_s.value == pytest.approx(c.tokens_per_step / c.step_time_s.value)
        assert c.tokens_per_s.low <= c.tokens_per_s.value <= c.tokens_per_s.high
        assert c.cost_usd is not None
        assert c.usd_per_million_tokens is not None
        assert c.usd_per_million_tokens.high == pytest.approx(c.cost_usd.high / (10 * 100_000 * 512 / 1e6))


def test_tokens_that_the_agent_sees_count_by_their_mean_and_unequal_lengths_are_named(cluster: Cluster) -> None:
    job_id = cluster.register().job.id
    for lengths in ([512.0, 512.0], [100.0, 300.0, float("nan")]):
        claimed = runs.claim(cluster.store, ANONYMOUS, job_id, wire.ClaimRequest(holder="launcher")).run
        assert claimed is not None
        cluster.report(claimed, tokens_per_example=lengths)
        cluster.execute(claimed)
        answer = cluster.recommendation(job_id)
        unequal = [warning for warning in answer.model.warnings if "tokens per example" in warning]
        assert bool(unequal) is (min(lengths) < 512), answer.model.warnings
    assert "100 to 512" in unequal[0]
    assert answer.candidates[0].tokens_per_step == 356 * answer.candidates[0].global_batch_size


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


@pytest.mark.parametrize("objective", ["balanced", "time", "cost", "knee"])
def test_the_menu_names_the_recommended_point_and_what_an_hour_saved_costs(
    profiled: tuple[Cluster, str], objective: str
) -> None:
    cluster, job_id = profiled
    answer = cluster.recommendation(job_id, objective)
    assert answer.chosen is not None
    assert [point.configuration for point in answer.menu if point.recommended] == [answer.chosen.configuration]
    assert 2 <= len(answer.menu) <= 5
    for faster, slower in pairwise(answer.menu):
        assert faster.cost_usd is not None
        assert slower.cost_usd is not None
        assert faster.usd_per_hour_saved is not None
        saved_h = (slower.total_time_s.value - faster.total_time_s.value) / 3600
        more = faster.cost_usd.value - slower.cost_usd.value
        assert faster.usd_per_hour_saved == pytest.approx(more / saved_h)
    assert answer.menu[-1].usd_per_hour_saved is None


@pytest.mark.parametrize("objective", ["balanced", "time", "cost", "knee"])
def test_each_objective_gets_its_own_and_says_why(profiled: tuple[Cluster, str], objective: str) -> None:
    cluster, job_id = profiled
    answer = cluster.recommendation(job_id, objective)
    assert answer.objective == objective
    expected = {"time": answer.least_time, "cost": answer.least_cost}.get(objective)
    assert answer.chosen is not None
    assert not answer.chosen.dominated
    if expected is not None:
        assert answer.chosen == expected
    elif objective == "knee":
        assert answer.knee.found is (answer.knee.configuration is not None)
        assert answer.knee.reason in answer.why
    assert f"{answer.chosen.configuration.num_nodes} node" in answer.why
    assert "runner-up" in answer.why


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
    nearest = min(out, key=lambda c: (c.global_batch_size, c.total_time_s.value))
    name = describe_configuration(nearest.configuration)
    said = f"Nearest miss of the largest global batch: {name}; {nearest.excluded_by}"
    assert said in answer.why


def test_a_short_training_keeps_the_batch_small_and_says_what_a_larger_one_would_do(cluster: Cluster) -> None:
    one_node = {"max_nodes": 1, "ranks_per_node": 2, "price": {"usd_per_node_hour": 3.0}}
    job_id = cluster.register(spec(objective="balanced", epochs=2, cluster=one_node)).job.id
    cluster.work(job_id)
    answer, fastest = cluster.recommendation(job_id), cluster.recommendation(job_id, "time")
    assert answer.chosen is not None
    assert answer.quality is not None
    assert answer.quality.kept
    assert answer.quality.steps == 200_000 // answer.chosen.global_batch_size >= 250
    assert "Larger batches tend to generalise worse" in answer.why
    assert "use the objective time or cost if you accept this" in answer.why
    assert fastest.chosen is not None
    assert fastest.quality is not None
    assert fastest.chosen.global_batch_size == 512
    assert not fastest.quality.kept
    assert fastest.quality.sentence.startswith("Accuracy at risk: 390 steps")
    assert "generalise" not in fastest.why


def test_the_nearest_miss_of_a_limit_is_named(cluster: Cluster) -> None:
    job_id = cluster.register(spec(objective="cost")).job.id
    cluster.work(job_id)
    free = cluster.recommendation(job_id)
    assert free.least_time is not None
    deadline_s = 1.2 * free.least_time.total_time_s.high
    jobs.change(cluster.store, ANONYMOUS, job_id, wire.JobPatch.model_validate({"limits": {"deadline_s": deadline_s}}))
    answer = cluster.recommendation(job_id)
    broken = [c for c in answer.candidates if "deadline" in (c.excluded_by or "")]
    nearest = min(broken, key=lambda c: c.total_time_s.high)
    assert (
        f"Nearest miss of the deadline: {describe_configuration(nearest.configuration)}; {nearest.excluded_by}"
        in answer.why
    )


def test_a_price_of_waiting_moves_the_compromise_from_the_cheapest_to_the_fastest(cluster: Cluster) -> None:
    chosen = {}
    for usd in (0.001, 1e5):
        wanted = spec(name=f"waiting-{usd}", epochs=1000, objective="balanced", usd_per_hour_of_waiting=usd)
        job_id = cluster.register(wanted).job.id
        answer = cluster.recommendation(job_id)
        assert answer.chosen is not None
        chosen[usd] = (answer.chosen, answer.least_cost, answer.least_time)
    assert chosen[0.001][0] == chosen[0.001][1]
    assert chosen[1e5][0] == chosen[1e5][2]


def test_limits_that_nothing_keeps_choose_nothing_and_say_so(cluster: Cluster) -> None:
    job_id = cluster.register(spec(limits={"deadline_s": 0.001})).job.id
    cluster.work(job_id)
    answer = cluster.recommendation(job_id)
    assert answer.chosen is None
    assert "deadline_s" in answer.why
    fastest = min(c.total_time_s.value for c in answer.candidates)
    assert f"the fastest takes {fastest:.3g} s" in answer.why


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
    assert " on spot capacity: " in answer.why
    assert " on demand: " in cluster.recommendation(job_id, "time").why, "interruptions cost time"
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


def test_at_a_price_per_gb_hour_the_plan_continues_if_no_run_reports_its_memory(cluster: Cluster) -> None:
    """A recommendation by node-hours is measured like any other choice."""
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


@pytest.mark.parametrize("precision", [None, "fp16"])
def test_recomputed_activations_lengthen_the_first_guess_by_a_third_of_compute(
    cluster: Cluster, precision: str | None
) -> None:
    """The second forward pass takes as long as the first, whether or not the job states a precision."""

    def compute_s(**model: object) -> float:
        answer = cluster.register(
            spec(model={"name": "net", "flops_per_sample": 24e9, "precision": precision} | model)
        ).recommendation
        terms = max(answer.candidates, key=lambda each: each.configuration.local_batch_size).terms
        assert terms is not None
        return terms.compute_time_s

    assert compute_s(activation_checkpointing=True) / compute_s() == pytest.approx(4 / 3, rel=0.02)


def test_a_job_of_another_network_teaches_the_speed_of_its_hardware_and_less_so_of_others(cluster: Cluster) -> None:
    # 24 GFLOP an example take this cluster a fifth of what the data sheet promises.
    def asks(name: str, accelerator: str) -> wire.JobSpec:
        on = {"max_nodes": 8, "ranks_per_node": 2, "accelerator": accelerator}
        return spec(cluster=on, model={"name": name, "flops_per_sample": 24e9})

    def compute_s(answer: wire.Recommendation) -> float:
        at = {c.configuration: c.step_time_s.value for c in answer.candidates}
        return at[wire.Configuration(num_nodes=1, ranks_per_node=2, local_batch_size=256)]

    before = {name: cluster.register(asks("other", name)).recommendation for name in ("V100-16GB", "A100-40GB")}
    cluster.work(cluster.register(asks("net", "V100-16GB")).job.id)
    after = {name: cluster.register(asks("another", name)).recommendation for name in before}
    moved = {name: np.log(compute_s(before[name]) / compute_s(after[name])) for name in before}
    truth = np.log(
        compute_s(before["V100-16GB"])
        / overlapping(wire.Configuration(num_nodes=1, ranks_per_node=2, local_batch_size=256))
    )
    assert truth > 1.0, "or there is nothing to learn"
    assert 0.4 * truth < moved["V100-16GB"] < truth
    assert 0.2 * truth < moved["A100-40GB"] < moved["V100-16GB"]
    assert (after["V100-16GB"].basis, after["A100-40GB"].basis) == ("transfer", "prior")
    assert "data sheet" in after["A100-40GB"].why


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


def test_profiling_runs_report_the_noise_scale_before_any_training(cluster: Cluster) -> None:
    job_id = cluster.register().job.id
    (first,) = cluster.work(job_id, most=1)
    unknown = cluster.recommendation(job_id, "time")
    assert unknown.chosen is not None
    ratio = unknown.chosen.global_batch_size / 64
    assert f"Multiply the learning rate of a batch of 64 by 1 to {ratio:.3g}" in unknown.why
    assert unknown.chosen.learning_rate_factor is None
    assert unknown.scaling_rule == "gain"
    smallest = min(unknown.candidates, key=lambda c: c.global_batch_size)
    assert smallest.learning_rate_factor == 1.0, "no noise scale changes that"

    cluster.report(first, gradient_noise_scale=[200.0] * 40)
    cluster.work(job_id)
    known = cluster.recommendation(job_id, "time_to_quality")
    assert "noise scale of 200 examples, as measured by profiling runs; it grows during training" in known.why
    assert known.max_sensible_batch_size is None, "forty steps do not show it"
    factors = {c.global_batch_size: c.learning_rate_factor for c in known.candidates}
    assert factors[64] == pytest.approx(1.0)
    assert factors[256] == pytest.approx((1 + 800 / 64) / (1 + 800 / 256))


def test_what_the_script_reports_of_its_rule_decides_which_batches_keep_the_accuracy(cluster: Cluster) -> None:
    job_id = cluster.register(spec(epochs=3, objective="balanced")).job.id
    run = cluster.train(job_id, wire.Configuration(num_nodes=1, ranks_per_node=2, local_batch_size=32))
    cluster.send(run, cluster.times(run.configuration, 20))
    cluster.report(run, gradient_noise_scale=[130.0] * 200)

    def batches() -> tuple[int, int]:
        with cluster.store.transaction() as tx:
            tx.jobs.update(job_id, bump=True)
        answer = cluster.recommendation(job_id)
        assert answer.chosen is not None
        assert answer.quality is not None
        assert answer.quality.kept
        assert f"rate x {answer.chosen.learning_rate_factor:.2g}." in answer.quality.sentence
        return answer.chosen.global_batch_size, answer.quality.base_batch_size

    assert batches() == (256, 64), "no more than 130 + 2 x 64"
    cluster.report(run, first_step=200, directions=[1.0])
    assert batches() == (512, 64), "turned steps bear three times as much"
    cluster.report(run, first_step=201, directions=[0.0], small_batch_size=[256.0])
    assert batches() == (512, 256), "no more than 130 + 2 x 256"
    cluster.report(run, first_step=202, small_batch_size=[64.0 * 512])
    assert batches() == (256, 64), "tokens are no examples"


def test_time_to_quality_trades_throughput_against_the_worth_of_an_example(profiled: tuple[Cluster, str]) -> None:
    cluster, job_id = profiled
    unknown = cluster.recommendation(job_id, "time_to_quality")
    assert "No run has reported the gradient noise scale" in unknown.why
    assert unknown.max_sensible_batch_size is None
    run = cluster.train(job_id, wire.Configuration(num_nodes=1, ranks_per_node=2, local_batch_size=32))
    cluster.send(run, cluster.times(run.configuration, 20))
    cluster.report(run, gradient_noise_scale=[200.0] * 400)
    cluster.patch(run.id, "succeeded")
    known = cluster.recommendation(job_id, "time_to_quality")
    assert known.max_sensible_batch_size == 200 + 2 * 64
    assert known.chosen is not None
    assert unknown.chosen is not None
    assert known.chosen.global_batch_size < unknown.chosen.global_batch_size
    base = min(known.candidates, key=lambda c: c.global_batch_size)
    assert base.statistical_efficiency == pytest.approx(1.0)
    assert all(c.statistical_efficiency is not None and c.statistical_efficiency <= 1 for c in known.candidates)


def test_the_cross_validated_error_is_of_the_runs_and_the_model_of_the_answer(cluster: Cluster) -> None:
    job_id = cluster.register().job.id
    cluster.work(job_id)
    error = cluster.recommendation(job_id).model.cross_validated_error
    assert error is not None
    with cluster.store.transaction() as tx:
        tx.jobs.update(job_id, bump=True)
    assert cluster.recommendation(job_id).model.cross_validated_error == error
    with cluster.store.transaction() as tx:
        tx.jobs.update(job_id, bump=True, cross_validated_model="an older one")
    assert cluster.recommendation(job_id).model.cross_validated_error is None


def test_an_answer_that_cannot_be_stored_is_given_all_the_same(
    profiled: tuple[Cluster, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may be full, or the database role of a replica may be read-only."""
    cluster, job_id = profiled
    stored = wire.read(wire.Recommendation, recommendations.get(cluster.store, ANONYMOUS, job_id))

    def full(*_: object, **__: object) -> None:
        raise StoreUnavailable("The disk of the database is full.")

    monkeypatch.setattr(planning, "store_answer", full)
    monkeypatch.setattr(planning, "cached", lambda *_, **__: None)
    unstored = wire.read(wire.Recommendation, recommendations.get(cluster.store, ANONYMOUS, job_id))
    assert unstored.chosen == stored.chosen
    assert unstored.id == "recommendation-unstored"


def test_a_token_that_only_reads_gets_an_answer_and_stores_none(profiled: tuple[Cluster, str]) -> None:
    cluster, job_id = profiled
    reader = Principal("reader", "read", "token-1", DEFAULT_PROJECT_ID)

    def stored() -> list[object]:
        with cluster.store.reading() as tx:
            tables = ("answers", "ledger", "events", "scaling_numbers")
            counts = [tx.connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar() for table in tables]
            return [*counts, tx.jobs.get(job_id)]

    before = stored()
    asked = wire.read(wire.Recommendation, recommendations.get(cluster.store, reader, job_id, "cost"))
    assert stored() == before
    misses: list[str] = []
    again = recommendations.get(cluster.store, reader, job_id, "cost", on_miss=lambda: misses.append("computed"))
    assert (wire.read(wire.Recommendation, again), misses) == (asked, []), "the same question is not computed again"
    kept = cluster.recommendation(job_id, "cost")
    assert asked.model_copy(update={"id": kept.id, "created_at": kept.created_at}) == kept
    assert wire.read(wire.Recommendation, recommendations.get(cluster.store, reader, job_id, "cost")) == kept
