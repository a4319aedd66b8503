"""Tests that each option value is launched separately after the base values, and recommended only if measured."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tula_wire as wire
from tests.service.usecases.cluster import Cluster, overlapping, spec
from tests.support.clock import ManualClock
from tula_service.analysis.questions import WhatIf
from tula_service.errors import InvalidInput
from tula_service.store import Store
from tula_service.usecases import recommendations, runs
from tula_service.usecases.access import ANONYMOUS

OPTIONS = {"precision": ["fp32", "bf16"], "compile": ["off", "on"]}
BASE = (("compile", "off"), ("precision", "fp32"))
FACTORS = {"bf16": 0.5, "on": 0.95}


def switched(c: wire.Configuration) -> float:
    """Return the step time in seconds, which bf16 halves and compilation shortens by 5 %."""
    factor = 1.0
    for _, word in c.options:
        factor *= FACTORS.get(word, 1.0)
    return factor * overlapping(replace(c, options=()))


def worked(cluster: Cluster, /, **changes: Any) -> wire.Recommendation:
    """Run the whole plan of a job with options; return its recommendation."""
    cluster.step_time = switched
    job_id = cluster.register(spec(**({"options": OPTIONS} | changes))).job.id
    cluster.work(job_id)
    return cluster.recommendation(job_id)


def launches(cluster: Cluster) -> list[tuple[object, ...]]:
    """Return the number of nodes and the options of each launch, in the order of the launches."""
    ran = [(c.num_nodes, c.options) for c in cluster.ran]
    return [one for one, before in zip(ran, [None, *ran], strict=False) if one != before]


@pytest.fixture(scope="module")
def finished(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Cluster, wire.Recommendation]:
    """Return the cluster and the recommendation of a job with two options whose plan is done."""
    path = tmp_path_factory.mktemp("options") / "tula.db"
    shutil.copy(sqlite_template, path)
    store = Store.open(f"sqlite:///{path}", now=ManualClock())
    cluster = Cluster(store)
    answer = worked(cluster)
    store.close()
    return cluster, answer


def test_a_plan_launches_the_base_first_and_then_finds_what_pays(
    finished: tuple[Cluster, wire.Recommendation],
) -> None:
    cluster, answer = finished
    assert answer.chosen is not None
    assert answer.with_base_options is not None
    assert [options for _, options in launches(cluster)[:2]] == [BASE, BASE]
    assert len(launches(cluster)) <= 8
    assert dict(answer.chosen.configuration.options)["precision"] == "bf16"
    assert answer.chosen.profiled
    assert answer.with_base_options.configuration.options == BASE
    assert answer.chosen.total_time_s.value < 0.6 * answer.with_base_options.total_time_s.value


def test_an_option_that_is_not_to_vary_keeps_its_first_value(cluster: Cluster) -> None:
    answer = worked(cluster, profiling={"only": ["precision"]})
    assert {dict(options)["compile"] for _, options in launches(cluster)} == {"off"}
    assert {dict(options)["precision"] for _, options in launches(cluster)} == {"fp32", "bf16"}
    assert [effect.value for effect in answer.options] == ["bf16"]


def test_each_value_says_what_it_is_worth_in_time_money_and_memory(
    finished: tuple[Cluster, wire.Recommendation],
) -> None:
    _, answer = finished
    by_value = {effect.value: effect for effect in answer.options}
    assert set(by_value) == {"bf16", "on"}
    bf16 = by_value["bf16"]
    assert bf16.launched
    assert bf16.recommended
    assert bf16.time is not None
    assert bf16.cost is not None
    assert bf16.memory is not None
    assert bf16.time.low <= 0.5 <= bf16.time.high
    assert 0.45 < bf16.time.value < 0.55
    assert bf16.time.high / bf16.time.low < 1.4, "both were launched with the other options equal"
    assert "less time and" in bf16.sentence
    assert "compare the losses" in bf16.sentence
    compiled = by_value["on"]
    assert compiled.launched or (compiled.most_gain is not None and compiled.most_gain < 0.6)


def test_a_cluster_that_costs_nothing_is_answered_without_ratios_of_its_cost(cluster: Cluster) -> None:
    price = {"usd_per_node_hour": 0.0}
    free = [{"max_nodes": 2, "memory_bytes_per_rank": 16 * 2**30, "price": price}]
    answer = worked(cluster, cluster=free, options={"kernel": ["a", "b"]})
    assert answer.chosen is not None
    assert all(effect.cost is None and effect.time is not None for effect in answer.options)


def test_a_value_that_may_as_well_save_as_cost_is_said_to_lie_between(cluster: Cluster) -> None:
    answer = worked(cluster, options={"kernel": ["a", "b"]})
    (effect,) = answer.options
    assert effect.time is not None
    assert effect.launched
    assert effect.time.low < 1.0 < effect.time.high
    assert not effect.recommended
    assert effect.sentence.startswith("kernel b needs between ")


@pytest.mark.parametrize("factor", [1.0, 0.99])
def test_a_value_whose_worth_is_within_noise_is_not_recommended_over_todays(cluster: Cluster, factor: float) -> None:
    job_id = cluster.register(spec(options={"kernel": ["z", "a"]})).job.id
    cluster.step_time = lambda c: overlapping(replace(c, options=())) * (factor if ("kernel", "a") in c.options else 1)
    cluster.work(job_id)
    answer = cluster.recommendation(job_id)
    assert answer.chosen is not None
    assert answer.chosen == answer.with_base_options
    assert answer.chosen.profiled
    (effect,) = answer.options
    assert effect.launched
    assert not effect.recommended


def test_what_an_unlaunched_value_could_win_is_over_the_recommendation(cluster: Cluster) -> None:
    answer = worked(cluster, options={"kernel": ["eager", "bf16", "slow"]}, profiling={"max_runs": 7})
    for effect in answer.options:
        if not effect.launched:
            assert effect.most_gain is not None
            assert effect.most_gain <= 0.6
            assert "win" in effect.sentence


def test_nothing_that_was_not_launched_is_recommended_or_listed(cluster: Cluster) -> None:
    job_id = cluster.register(spec(options=OPTIONS)).job.id
    first = cluster.recommendation(job_id)
    assert first.chosen is not None
    assert first.chosen.configuration.options == BASE
    assert {c.configuration.options for c in first.candidates} == {BASE}
    assert first.options == []
    cluster.step_time = switched
    while cluster.work(job_id, most=1):
        answer = cluster.recommendation(job_id)
        assert answer.chosen is not None
        launched = {(c.num_nodes, c.options) for c in cluster.ran}
        at = answer.chosen.configuration
        assert at.options == BASE or (at.num_nodes, at.options) in launched


def test_a_job_without_an_option_that_another_has_is_a_job_of_its_own_and_no_run_is_lost(cluster: Cluster) -> None:
    with_options = cluster.register(spec(options=OPTIONS)).job
    cluster.step_time = switched
    cluster.work(with_options.id, most=2)
    without = cluster.register(spec()).job
    fewer = cluster.register(spec(options={"precision": ["fp32", "bf16"]})).job
    assert len({with_options.id, without.id, fewer.id}) == 3
    kept = runs.list_runs(cluster.store, ANONYMOUS, with_options.id).runs
    assert sum(run.state == "succeeded" for run in kept) == 2
    assert cluster.register(spec(options=OPTIONS)).job.id == with_options.id


def test_a_what_if_asks_for_options_and_takes_the_recommended_ones_otherwise(cluster: Cluster) -> None:
    job_id = cluster.register(spec(options=OPTIONS)).job.id

    def asked(**question: Any) -> set[tuple[tuple[str, str], ...]]:
        body = recommendations.predict(cluster.store, ANONYMOUS, job_id, WhatIf(num_nodes=[2], **question))
        return {c.configuration.options for c in wire.read(wire.Predictions, body).candidates}

    assert asked() == {BASE}
    assert asked(option=["precision=bf16"]) == {(("compile", "off"), ("precision", "bf16"))}
    for wrong, sentence in (
        ("precision", "write it as name=value"),
        ("precision=fp8", "use fp32, bf16"),
        ("x=1", "no option"),
    ):
        with pytest.raises(InvalidInput, match=sentence) as caught:
            asked(option=[wrong])
        assert caught.value.field == "option"


def test_a_value_that_crashes_at_every_launch_is_left_out_and_the_rest_goes_on(cluster: Cluster) -> None:
    cluster.step_time = switched
    job_id = cluster.register(spec(options={"precision": ["fp32", "bf16"], "attention": ["eager", "flash"]})).job.id
    crashed = 0
    while (run := claimed(cluster, job_id)) is not None:
        if ("attention", "flash") in run.configuration.options:
            cluster.patch(run.id, "failed", message="The command ended with exit code 1.")
            crashed += 1
        else:
            cluster.execute(run)
    answer = cluster.recommendation(job_id)
    assert answer.chosen is not None
    assert dict(answer.chosen.configuration.options) == {"attention": "eager", "precision": "bf16"}
    (flash,) = (effect for effect in answer.options if effect.value == "flash")
    assert 1 <= crashed <= 3
    assert flash.left_out is not None
    assert flash.left_out.startswith("attention flash is excluded because every launch with it failed")
    assert "exit code 1" in flash.left_out


def claimed(cluster: Cluster, job_id: str) -> wire.Run | None:
    return runs.claim(cluster.store, ANONYMOUS, job_id, wire.ClaimRequest(holder="launcher")).run


def test_a_value_that_needs_less_memory_reaches_for_its_own_largest_batch(cluster: Cluster) -> None:
    cluster.capacity_bytes = 4e9
    peak = {"on": 10e6, "off": 30e6}

    class Checkpointed(Cluster):
        def execute(self, run: wire.Run, *, steps: int = 20) -> wire.Run:
            self.bytes_per_sample = peak[dict(run.configuration.options)["checkpointing"]]
            return super().execute(run, steps=steps)

    slow_links = Checkpointed(cluster.store, lambda c: overlapping(replace(c, options=()), bandwidth=0.02))
    slow_links.capacity_bytes = cluster.capacity_bytes
    job_id = slow_links.register(
        spec(options={"checkpointing": ["off", "on"]}, batch={"max_local_batch_size": 512})
    ).job.id
    slow_links.work(job_id)
    answer = slow_links.recommendation(job_id)
    assert answer.chosen is not None
    assert answer.with_base_options is not None
    assert dict(answer.chosen.configuration.options) == {"checkpointing": "on"}
    assert answer.chosen.configuration.local_batch_size > answer.with_base_options.configuration.local_batch_size


def test_a_job_may_have_five_options_and_launches_at_most_fourteen_times(cluster: Cluster) -> None:
    options = {name: ["off", "on"] for name in ("compile", "fused", "pinned", "channels", "amp")}
    worked(cluster, options=options, batch={"max_local_batch_size": 64})
    assert len(launches(cluster)) <= 14


def test_a_second_instance_type_has_launches_of_its_own(cluster: Cluster) -> None:
    types = [{"instance_type": name, "max_nodes": 4, "price": {"usd_per_node_hour": 3.0}} for name in ("a", "b")]
    job_id = cluster.register(spec(options={"precision": ["fp32", "bf16"]}, cluster=types)).job.id
    cluster.step_time = lambda c: switched(replace(c, instance_type="a")) * (1.6 if c.instance_type == "b" else 1.0)
    cluster.work(job_id)
    answer = cluster.recommendation(job_id)
    assert answer.chosen is not None
    assert answer.chosen.configuration.instance_type == "a"
    assert answer.chosen.configuration.options == (("precision", "bf16"),)
    ran = [(c.instance_type, c.num_nodes, c.options) for c in cluster.ran]
    assert len(set(ran)) <= 8
    assert {options for _, _, options in ran[:12]} == {(("precision", "fp32"),)}
