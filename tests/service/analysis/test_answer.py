"""Tests that planning and recommendation use the same answer, which is computed from `JobData` without a database."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import datetime, timedelta, timezone
from typing import Any

import numpy as np
import pytest

import tula_wire as wire
from tests.service.usecases.cluster import overlapping, spec
from tula_service.analysis import explanation
from tula_service.analysis.answer import Answer, Infeasible, analyse
from tula_service.analysis.effects import find_effects
from tula_service.analysis.job_data import JobData
from tula_service.analysis.plan import PlanDecision, decide_plan
from tula_service.domain import MemoryReading, RunRecord, RunSummary
from tula_service.perfmodel.variants import find_launch
from tula_wire.configurations import Variant
from tula_wire.enums import RunState
from tula_wire.format import multiple

SPOT = {
    "usd_per_node_hour": 3.0,
    "spot": {"usd_per_node_hour": 0.9, "interruptions_per_node_hour": 0.01, "checkpoint_interval_s": 600},
}


def job(**changes: Any) -> JobData:
    wanted = spec(**changes)
    return JobData(spec=wanted, objective=wanted.objective, data_version=1)


def profile_run(
    run_id: str, key: int, state: RunState, configuration: wire.Configuration, position: int = 0
) -> RunRecord:
    """Return a profiling run that takes 10 s."""
    facts: dict[str, Any] = {field.name: None for field in fields(RunRecord)}
    facts |= {"id": run_id, "key": key, "kind": "profile", "state": state, "configuration": configuration}
    began = datetime(2026, 1, 1, tzinfo=timezone.utc)
    facts |= {"position": position, "started_at": began, "finished_at": began + timedelta(seconds=10)}
    return RunRecord(**facts)


def measured(
    data: JobData, configuration: wire.Configuration, *, state: RunState = "succeeded", **more: Any
) -> JobData:
    """Return the job after one more profiling run."""
    number = len(data.runs)
    run = profile_run(f"run-{number}", number + 1, state, configuration, number)
    noise = np.exp(0.01 * np.random.default_rng(number).standard_normal())
    facts: dict[str, Any] = dict.fromkeys(("compute_time_s", "exposed_comm_time_s"))
    facts |= dict.fromkeys(("world_size", "local_batch_size", "grad_accum_steps", "failed_local_batch_size", "memory"))
    facts |= {"num_samples": 20, "num_steps": 20, "relative_sd": 0.002}
    facts["step_time_s"] = overlapping(configuration) * noise if state == "succeeded" else None
    summary = RunSummary(run_id=run.id, state=state, configuration=configuration, **(facts | more))
    return replace(data, runs=[*data.runs, run], summaries=[*data.summaries, summary])


def answer_of(data: JobData, objective: str | None = None) -> Answer:
    found = analyse(data, objective)
    assert isinstance(found, Answer)
    return found


def profiled(data: JobData) -> tuple[JobData, PlanDecision]:
    """Run the job's plan to its end; return the job and the last decision."""
    for _ in range(30):
        decision = decide_plan(analyse(data))
        if not decision.active:
            return data, decision
        for run in decision.new:
            data = measured(data, run.configuration)
    raise AssertionError("the plan did not end")


@pytest.mark.parametrize("objective", ["balanced", "time", "cost", "knee", "time_to_quality", "energy"])
@pytest.mark.parametrize("price", [{"usd_per_node_hour": 3.0}, SPOT])
def test_the_plan_ends_with_the_very_candidate_measured_that_is_recommended(
    objective: str, price: dict[str, Any]
) -> None:
    nodes = {"max_nodes": 8, "ranks_per_node": 2, "price": price}
    data, decision = profiled(replace(job(objective=objective, cluster=nodes), trained_noise=[np.full(20, 2000.0)]))
    chosen = answer_of(data).choice.chosen
    assert chosen is not None
    assert chosen.measured
    assert chosen.spot is (objective in ("cost", "balanced", "knee") and "spot" in price)
    assert "stable" in decision.reason


@pytest.mark.parametrize("ranks", [1, 64])
def test_a_few_steps_that_are_alike_by_chance_do_not_outweigh_the_other_batches_of_their_launch(ranks: int) -> None:
    """Ten steps may be equally slow by chance and so look precise; the launch's other batches show the true spread.

    All ranks except the first send one sample per run, whatever its length.
    """
    node = {"min_nodes": 1, "max_nodes": 1, "ranks_per_node": ranks}
    batch = {"min_local_batch_size": 32, "max_local_batch_size": 128}

    def predicted(by_chance: bool = False) -> float:
        data, *sizes = job(cluster=node, batch=batch), 128, 64, 32
        for size in sizes:
            where = wire.Configuration(num_nodes=1, ranks_per_node=ranks, local_batch_size=size)
            number, facts = 240, {"relative_sd": 0.03}
            if size == 128 and by_chance:
                number, facts = 10, {"relative_sd": 0.001, "step_time_s": 1.5 * overlapping(where)}
            data = measured(data, where, num_samples=number + ranks - 1, num_steps=number, **facts)
        largest = wire.Configuration(num_nodes=1, ranks_per_node=ranks, local_batch_size=128)
        return answer_of(data).estimate([largest])[0].step_time_s.mean

    off = predicted(by_chance=True) / predicted() - 1.0
    assert off < 0.3, "it was 0.49 when each measurement was weighted by its own spread"


def test_a_plan_that_no_run_can_bring_within_the_limits_ends_with_what_they_would_have_to_be() -> None:
    nodes = {"max_nodes": 8, "ranks_per_node": 2, "price": {"usd_per_node_hour": 3.0}}
    profiling = {"max_runs": 30}
    data, decision = profiled(job(cluster=nodes, limits={"deadline_s": 1.0}, profiling=profiling))
    assert decision.reason.startswith("No further run would help: No candidate meets the limits (deadline_s): the")
    assert explanation.why(answer_of(data)).startswith("No candidate meets the limits (deadline_s): the fastest takes")


def test_a_runner_up_that_costs_the_same_is_not_said_to_cost_more() -> None:
    node = {"min_nodes": 1, "max_nodes": 1, "ranks_per_node": 1, "price": {"usd_per_node_hour": 3.0}}
    alike = [node | {"instance_type": "left"}, node | {"instance_type": "right"}]
    batch = {"min_local_batch_size": 128, "max_local_batch_size": 128}
    why = explanation.recommendation_fields(answer_of(job(cluster=alike, batch=batch), "cost"), None)["why"]
    assert "The runner-up, 1 node of right at a global batch of 128, takes as long and costs as much." in why


def test_nodes_whose_ranks_cannot_share_the_global_batch_are_named() -> None:
    nodes = {"max_nodes": 4, "ranks_per_node": 1}
    fields = explanation.recommendation_fields(answer_of(job(cluster=nodes, batch={"global_batch_size": 7})), None)
    model = fields["model"]
    assert isinstance(model, wire.ModelReport)
    said = (
        "2, 4 nodes of default are excluded, because "
        "batch.global_batch_size = 7 is not a multiple of their number of ranks."
    )
    assert said in model.warnings


def test_the_learning_rate_of_the_candidates_is_that_of_the_reason() -> None:
    data = replace(job(model={"name": "net", "batch_normalization": True}), trained_noise=[np.full(20, 500.0)])
    fields = explanation.recommendation_fields(answer_of(data, "time"), None)
    chosen, candidates = fields["chosen"], fields["candidates"]
    assert isinstance(chosen, wire.Candidate)
    assert isinstance(candidates, list)
    base = min(c.global_batch_size for c in candidates)
    assert fields["scaling_rule"] == "gain"
    assert f"by {multiple(chosen.learning_rate_factor)}, which follows from the" in str(fields["why"])
    for each in candidates:
        times, factor = each.global_batch_size / base, each.learning_rate_factor
        assert factor < times or times == 1.0


@pytest.mark.parametrize("steps", [20, 200])
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_line_of_quality_and_the_reason_agree_on_the_noise_and_on_who_scales(steps: int, nodes: int) -> None:
    """The learning rate may use the noise of short runs, but the batch bound may not; one rank cannot measure noise."""
    facts = {"epochs": 1000, "cluster": {"min_nodes": nodes, "max_nodes": nodes, "ranks_per_node": 1}}
    data = replace(job(**facts), profiled_noise=[np.full(steps, 50_000.0)])
    fields = explanation.recommendation_fields(answer_of(data, "time"), None)
    quality, reason = fields["quality"], str(fields["why"])
    assert isinstance(quality, wire.Quality)
    assert ("rate x" in quality.sentence) == ("`TulaOptimizer` increases the rate" in reason) == (nodes > 1)
    assert ("keep the learning rate" in quality.sentence) == ("Keep the learning rate" in reason) == (nodes == 1)
    assert isinstance(fields["chosen"], wire.Candidate)
    assert (fields["chosen"].learning_rate_factor == 1.0) == (fields["scaling_rule"] is None) == (nodes == 1)
    assert ("no run of 100 steps has shown the gradient noise yet" in quality.sentence) == (steps < 100)
    assert ("the gradient noise scale of short runs" in reason) == (steps < 100 and nodes > 1)


@pytest.mark.parametrize("counted", [True, False])
def test_memory_of_a_sharded_job_is_predicted_for_each_number_of_ranks(counted: bool) -> None:
    """The ranks share 32 GB of training state (2e9 parameters, Adam), known from the agent or the specification."""
    shared, per_example, fixed = 32e9, 50e6, 0.2e9

    def reading(c: wire.Configuration) -> MemoryReading:
        part = round(shared / 4 / c.world_size)
        parts = {"parameter_bytes": part, "gradient_bytes": part, "optimizer_bytes": 2 * part} if counted else {}
        peak = round(4 * part + fixed + per_example * c.local_batch_size)
        return MemoryReading("cuda_allocator", peak, context_bytes=0, capacity_bytes=28 * 10**9, **parts)

    cluster = {"max_nodes": 8, "ranks_per_node": 2, "price": {"usd_per_node_hour": 3.0}}
    model = {"name": "net", "parameters": 2 * 10**9, "optimizer": "adam", "sharding": "zero3"}
    data = job(cluster=cluster, model=model)
    for nodes, batch in ((8, 256), (2, 32)):
        c = wire.Configuration(num_nodes=nodes, ranks_per_node=2, local_batch_size=batch)
        data = measured(data, c, memory=reading(c))
    answer = answer_of(data)
    assert {each.configuration.num_nodes for each in answer.estimates} == {1, 2, 4, 8}
    for each in answer.estimates:
        assert each.peak_bytes is not None
        truth = reading(each.configuration).peak_bytes
        assert each.peak_bytes.mean == pytest.approx(truth, rel=0.05)
        assert each.peak_bytes.low <= truth <= each.peak_bytes.high
    doubtful = {c.num_nodes for c in answer.doubtful if c.local_batch_size == 256}
    assert doubtful == {1}, "16 GB of state and 13 GB of activations do not fit there"


def test_the_state_of_a_sharded_model_is_divided_by_the_ranks_that_share_it() -> None:
    model = {"name": "net", "parameters": 10**10, "optimizer": "adam", "activation_bytes_per_sample": 10**6}
    on = {"max_nodes": 8, "ranks_per_node": 8, "memory_bytes_per_rank": 40 * 10**9}
    state = {"none": 160e9, "zero1": 80e9 + 10e9, "zero2": 40e9 + 15e9, "zero3": 20e9}
    for sharding, needed in state.items():
        found = analyse(job(model=model | {"sharding": sharding}, cluster=on))
        if needed < 40e9:
            assert isinstance(found, Answer)
            continue
        assert isinstance(found, Infeasible)
        assert f"at least {needed / 2**30:.3g} GiB per rank" in found.reason
        assert ("increase cluster.min_nodes" in found.reason) is (sharding != "none")


def test_a_replica_over_several_devices_divides_compute_and_state_between_them() -> None:
    model = {"name": "net", "parameters": 10**10, "optimizer": "adam", "flops_per_sample": 1e12}
    on = {"max_nodes": 4, "memory_bytes_per_rank": 80 * 10**9}
    whole, split = (answer_of(job(model=model | each, cluster=on)) for each in ({}, {"tensor_parallel_size": 4}))
    compute = [each.estimates[0].terms["compute_s"] for each in (whole, split)]
    assert compute[0] / compute[1] == pytest.approx(4, rel=0.05)
    alone = [any("optimizer state need" in said for said in each.evidence.warnings) for each in (whole, split)]
    assert alone == [True, False], "160 GB of state on one device, 40 on each of four"


def test_a_plan_that_ends_yields_posteriors_and_a_validation_error() -> None:
    _, decision = profiled(job())
    assert decision.posteriors is not None
    assert list(decision.posteriors) == ["default"]
    assert decision.cross_validated_error is not None
    assert decision.cross_validated_error < 0.15


def test_waiting_runs_stay_until_enough_was_measured() -> None:
    data = job()
    first = decide_plan(analyse(data)).new
    waiting = [
        profile_run(f"waiting-{row}", 100 + row, "pending", run.configuration, row) for row, run in enumerate(first)
    ]
    kept = decide_plan(analyse(replace(data, runs=waiting)))
    assert (kept.cancelled, kept.new) == ((), ())
    done, _ = profiled(data)
    everything = decide_plan(analyse(replace(done, runs=[*done.runs, *waiting])))
    assert set(everything.cancelled) == {run.id for run in waiting}
    assert not everything.active


def test_a_failed_configuration_is_left_out_until_its_job_is_registered_again() -> None:
    data, _ = profiled(job(search="full", cluster={"max_nodes": 2}))
    best = answer_of(data).choice.chosen
    assert best is not None
    summaries = [s for s in data.summaries if s.configuration != best.configuration]
    runs = [replace(r, state="failed") if r.configuration == best.configuration else r for r in data.runs]
    failed = replace(data, runs=runs, summaries=summaries)
    without = answer_of(failed)
    assert without.choice.chosen is not None
    assert without.choice.chosen.configuration != best.configuration
    assert not decide_plan(without).active
    again = answer_of(replace(failed, retried_up_to_key=len(runs)))
    assert [run.configuration for run in decide_plan(again).new] == [best.configuration]


def test_memory_that_leaves_no_candidate_cancels_what_waits_and_says_what_to_do() -> None:
    data = job()
    smallest = wire.Configuration(num_nodes=1, ranks_per_node=2, local_batch_size=32)
    reading = MemoryReading("cuda_allocator", 10**9, capacity_bytes=10**9)
    data = measured(data, smallest, state="out_of_memory", failed_local_batch_size=32, memory=reading)
    waiting = profile_run("waiting", 9, "pending", smallest)
    analysis = analyse(replace(data, runs=[*data.runs, waiting]))
    assert isinstance(analysis, Infeasible)
    decision = decide_plan(analysis)
    assert (decision.cancelled, decision.new, decision.active) == (("waiting",), (), False)
    assert "lower min_local_batch_size" in decision.reason
    assert "lower min_local_batch_size" in str(explanation.infeasible_fields(analysis)["why"])


def test_a_configuration_that_ran_fits_into_memory_even_where_its_step_time_is_ignored() -> None:
    data = job()
    for batch, peak in ((32, 2e9), (64, 4e9), (128, 7.9e9)):
        reading = MemoryReading("cuda_allocator", int(peak), capacity_bytes=8 * 10**9, context_bytes=0)
        largest = wire.Configuration(num_nodes=1, ranks_per_node=2, local_batch_size=batch)
        data = measured(data, largest, memory=reading)
    probability = answer_of(data).evidence.memory.fit_probability(largest)
    assert probability is not None
    assert probability < data.spec.profiling.memory_safety
    assert largest not in answer_of(replace(data, ignored_step_times=frozenset({data.runs[-1].id}))).doubtful


def test_a_question_about_any_configuration_costs_no_second_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    data, _ = profiled(job())
    answer = answer_of(data)
    monkeypatch.setattr("tula_service.analysis.answer.fit_step_time", lambda *_, **__: pytest.fail("fitted again"))
    asked = wire.Configuration(num_nodes=3, ranks_per_node=2, local_batch_size=48)
    (found,) = answer.what_if([asked]).estimates
    assert found.configuration == asked
    assert found.step_time_s.mean == pytest.approx(answer.estimate([asked])[0].step_time_s.mean)
    assert found.step_time_s.mean == pytest.approx(overlapping(asked), rel=0.2)


@pytest.mark.parametrize("precision", [None, "fp16"])
def test_a_specification_beyond_floating_point_is_answered_with_its_reason(precision: str | None) -> None:
    found = analyse(job(model={"name": "tiny", "flops_per_sample": 5e-324, "precision": precision}))
    assert isinstance(found, Infeasible)
    assert "flops_per_sample" in found.reason


def test_waiting_for_data_is_a_term_and_what_it_costs_is_said() -> None:
    """Waiting for data takes 70 % of each step, and is also predicted for other batches, in addition to compute."""
    data = job()
    for batch in (32, 256):
        c = wire.Configuration(num_nodes=1, ranks_per_node=2, local_batch_size=batch)
        step_s = 0.1 * batch / 32
        data = measured(
            data, c, step_time_s=step_s, compute_time_s=0.3 * step_s, input_time_s=0.7 * step_s, exposed_comm_time_s=0.0
        )
    answer = answer_of(data)
    for candidate in explanation.render_candidates(answer, answer.estimates):
        terms = candidate.terms
        assert terms is not None
        assert terms.input_time_s == pytest.approx(0.7 / 0.3 * terms.compute_time_s, rel=0.15)
        total = terms.input_time_s + terms.compute_time_s + terms.exposed_comm_time_s
        assert total == pytest.approx(candidate.step_time_s.value)
    (said,) = [each for each in explanation.model_report(answer).warnings if "waits for data" in each]
    assert "faster data-loader workers would save up to" in said
    assert "$" in said
    assert not any("waits for data" in each for each in explanation.model_report(answer_of(job())).warnings)


def test_a_chosen_batch_that_took_no_three_steps_is_unproved_and_one_on_a_full_device_is_named() -> None:
    cluster = {"min_nodes": 1, "max_nodes": 1, "ranks_per_node": 1}
    only = job(objective="time", cluster=cluster, batch={"min_local_batch_size": 32, "max_local_batch_size": 32})
    c = wire.Configuration(num_nodes=1, local_batch_size=32)
    reading = MemoryReading("cuda_allocator", 10**9, capacity_bytes=8 * 10**9, alloc_retries=3)
    short, full = (measured(only, c, num_samples=steps, memory=reading) for steps in (2, 20))
    for data, unproved, said in ((short, True, "Unproved: no run has taken three"), (full, False, "was full 3 times")):
        fields = explanation.recommendation_fields(answer_of(data), None)
        chosen, report = fields["chosen"], fields["model"]
        assert isinstance(chosen, wire.Candidate)
        assert isinstance(report, wire.ModelReport)
        assert chosen.unproved is unproved
        assert any(said in warning for warning in report.warnings)


def test_a_larger_batch_proves_a_smaller_one_and_shards_of_more_ranks_do_not_prove_those_of_fewer() -> None:
    for sharding, proved in (("none", True), ("zero3", False)):
        data = job(objective="time", model={"name": "net", "sharding": sharding}, cluster={"max_nodes": 4})
        data = measured(data, wire.Configuration(num_nodes=4, local_batch_size=128))
        memory = answer_of(data).evidence.memory
        assert memory.is_proved(wire.Configuration(num_nodes=4, local_batch_size=64))
        assert not memory.is_proved(wire.Configuration(num_nodes=4, local_batch_size=256))
        assert memory.is_proved(wire.Configuration(num_nodes=1, local_batch_size=128)) is proved


def test_batches_whose_convolutions_have_two_to_the_31_elements_are_named() -> None:
    batch = {"min_local_batch_size": 512, "max_local_batch_size": 2048}
    for elements, named in ((64 * 224 * 224, True), (64 * 32 * 32, False)):
        data = job(model={"name": "net", "convolution_elements_per_sample": elements}, batch=batch)
        warnings = explanation.model_report(answer_of(data)).warnings
        assert any("With a local batch of 669 or more" in warning for warning in warnings) is named


@pytest.mark.parametrize("num_runs", [0, 2])
def test_a_step_is_expected_to_be_slower_where_a_gpus_convolutions_have_two_to_the_31_elements(num_runs: int) -> None:
    def by_batch(accelerator: str | None, elements: int | None) -> dict[int, float]:
        """Return the predicted compute time of one rank in seconds by local batch size, after `num_runs` runs."""
        cluster = {"max_nodes": 2, "ranks_per_node": 1, "accelerator": accelerator}
        model = {"name": "net", "convolution_elements_per_sample": elements}
        batch = {"min_local_batch_size": 64, "max_local_batch_size": 1024}
        data = job(model=model, batch=batch, cluster=cluster, dataset={"size": 10**6})
        for local in (64, 128)[:num_runs]:
            data = measured(data, wire.Configuration(num_nodes=1, local_batch_size=local))
        configurations = [c for c in answer_of(data).evidence.candidates if c.num_nodes == 1]
        compute_s = answer_of(data).model.predict(configurations).compute_s.tolist()
        return dict(zip((c.local_batch_size for c in configurations), compute_s, strict=True))

    plain, large = by_batch("H100", 2**20), by_batch("H100", 2**22)
    more = {batch: large[batch] / plain[batch] for batch in plain}
    assert more == pytest.approx({64: 1.0, 128: 1.0, 256: 1.0, 512: 1.28, 1024: 1.28}, rel=0.01)
    assert by_batch("H100", None) == pytest.approx(plain)
    for unlimited in ("cpu", None):
        assert by_batch(unlimited, 2**22) == pytest.approx(by_batch(unlimited, None))


def test_the_first_guess_of_a_small_batch_is_its_operations_times_a_launch() -> None:
    """The time to launch an operation is taken from the probe; without a probe, it is assumed to be 30 us."""
    batch = {"min_local_batch_size": 1, "max_local_batch_size": 1}
    cluster = {"max_nodes": 1, "ranks_per_node": 2, "accelerator": "H100", "price": {"usd_per_node_hour": 3.0}}
    model = {
        "name": "net",
        "parameters": 10**5,
        "flops_per_sample": 1e6,
        "precision": "bf16",
        "operations_per_step": 1000,
    }
    data = job(model=model, cluster=cluster, batch=batch)
    readings = [wire.AllReduceReading(size_bytes=size, time_s=1e-6) for size in (1024, 4096, 16384)]
    probe = wire.FabricProbe(
        backend="nccl", num_nodes=1, ranks_per_node=2, all_ranks=readings, accelerator="H100", launch_time_s=8e-6
    )
    for probes, step_s in (([], 0.03), ([probe], 0.008)):
        compute = answer_of(replace(data, probes=probes)).estimates[0].terms["compute_s"]
        assert compute == pytest.approx(step_s, rel=0.1)


def test_energy_is_predicted_from_the_power_that_runs_read_and_the_least_of_it_chosen() -> None:
    """Twice the ranks are less than twice as fast, so one node uses the least energy but takes the longest."""
    data, _ = profiled(job(cluster={"max_nodes": 4, "ranks_per_node": 2, "price": {"usd_per_node_hour": 3.0}}))
    data = replace(data, spec=data.spec.model_copy(update={"usd_per_kwh": 0.3, "gco2_per_kwh": 400.0}))
    absent = explanation.recommendation_fields(answer_of(data, "energy"), None)
    assert "no run has reported energy" in str(absent["why"])
    watts = [replace(s, energy_per_step_j=400.0 * s.step_time_s) for s in data.summaries if s.step_time_s is not None]
    fields = explanation.recommendation_fields(answer_of(replace(data, summaries=watts), "energy"), None)
    chosen, candidates = fields["chosen"], fields["candidates"]
    assert isinstance(chosen, wire.Candidate)
    assert isinstance(candidates, list)
    assert chosen.configuration.num_nodes == 1
    menu = fields["menu"]
    assert isinstance(menu, list)
    assert all(point.energy_kwh and point.energy_usd and point.energy_gco2 for point in menu)
    for each in candidates:
        hours = each.total_time_s.value / 3600.0
        assert each.energy_kwh.value == pytest.approx(0.4 * each.configuration.world_size * hours)
        assert each.energy_kwh.low < each.energy_kwh.value < each.energy_kwh.high
        assert each.energy_usd.value == pytest.approx(0.3 * each.energy_kwh.value)
        assert each.energy_gco2.value == pytest.approx(400.0 * each.energy_kwh.value)
        joules = each.joules_per_example.value * data.spec.dataset.size * data.spec.epochs
        assert joules == pytest.approx(3.6e6 * each.energy_kwh.value)


OPTIONS = {"precision": ["fp32", "bf16"], "compile": ["off", "on"]}


def at(batch: int = 32, *, compiled: str = "off", precision: str = "fp32") -> wire.Configuration:
    """Return a configuration of one node with these values of `OPTIONS`."""
    options = (("compile", compiled), ("precision", precision))
    return wire.Configuration(num_nodes=1, ranks_per_node=2, local_batch_size=batch, options=options)


def test_a_combination_that_crashes_condemns_a_value_only_once_that_value_fails_alone() -> None:
    both = at(compiled="on", precision="bf16")
    data = measured(measured(job(options=OPTIONS), at()), at(precision="bf16"))
    data = measured(data, both, state="failed")
    data = replace(data, runs=[*data.runs[:-1], replace(data.runs[-1], message="Exit code 1.")])
    answer = answer_of(data)
    assert answer.evidence.left_out == {}
    assert {c.options for c in answer.evidence.failed} == {both.options}
    said = "compile on with precision bf16 is excluded because every launch with it failed (Exit code 1); to retry it, "
    assert f"{said}register the job again. " in explanation.why(answer)
    assert effect_of(answer, "on").sentence.startswith("compile on has failed in every launch; in other combinations, ")
    answer = answer_of(measured(data, at(compiled="on"), state="failed"))
    assert set(answer.evidence.left_out) == {("compile", "on")}
    assert {c.options for c in answer.evidence.failed} == {both.options, at(compiled="on").options}
    assert "excluded because" not in explanation.why(answer), "the sentence of the value has the reason"


def effect_of(answer: Answer, value: str) -> wire.OptionEffect:
    (effect,) = (effect for effect in find_effects(answer) if effect.value == value)
    return effect


def test_a_value_that_was_not_launched_is_not_said_to_have_failed_where_another_option_did() -> None:
    data = measured(measured(job(options=OPTIONS), at()), at(precision="bf16"), state="failed")
    assert effect_of(answer_of(data), "on").sentence.startswith("compile on was not launched; it ")


def test_a_value_that_keeps_no_limit_is_not_said_to_exceed_the_memory() -> None:
    batch = {"min_local_batch_size": 32, "max_local_batch_size": 32}
    node = {"min_nodes": 1, "max_nodes": 1, "ranks_per_node": 2}
    base = at()
    total_s = 100_000 * 10 / 64 * overlapping(base)
    data = job(options=OPTIONS, batch=batch, cluster=node, limits={"deadline_s": 2.0 * total_s})
    data = measured(measured(data, base), at(precision="bf16"), step_time_s=20.0 * overlapping(base))
    said = effect_of(answer_of(data), "bf16").sentence
    assert said == "precision bf16 with compile off is excluded because none of its candidates meets the limits."


def test_a_value_that_crashes_on_one_type_is_left_out_there_and_everywhere_only_if_it_ran_on_none() -> None:
    types = [{"instance_type": name, "max_nodes": 2, "ranks_per_node": 2} for name in ("a", "b")]
    data = job(options=OPTIONS, cluster=types)
    for name in ("a", "b"):
        data = measured(data, replace(at(), instance_type=name))
    data = measured(data, replace(at(compiled="on"), instance_type="a"), state="failed")
    everywhere = answer_of(data)
    assert set(everywhere.evidence.left_out) == {("compile", "on")}
    assert {c.instance_type for c in everywhere.evidence.failed} == {"a", "b"}
    on_one = answer_of(measured(data, replace(at(compiled="on", precision="bf16"), instance_type="b")))
    assert on_one.evidence.left_out == {}
    assert {c.instance_type for c in on_one.evidence.failed} == {"a"}
    assert {dict(c.options)["compile"] for c in on_one.evidence.failed} == {"on"}
    assert "compile on is excluded on a because every launch with it failed" in explanation.why(on_one)


def test_where_launches_measure_one_configuration_a_value_is_left_out_once_a_second_one_fails() -> None:
    data = measured(job(options=OPTIONS, profiling={"share_launches": False}), at())
    data = measured(data, at(precision="bf16"), state="failed")
    evidence = answer_of(data).evidence
    assert (evidence.left_out, evidence.failed) == ({}, {at(precision="bf16")})
    evidence = answer_of(measured(data, at(64, precision="bf16"), state="failed")).evidence
    assert set(evidence.left_out) == {("precision", "bf16")}
    assert {dict(c.options)["precision"] for c in evidence.failed} == {"bf16"}


def test_a_price_per_gb_hour_waits_for_the_memory_of_every_variant() -> None:
    data = job(options=OPTIONS, cluster={"max_nodes": 8, "ranks_per_node": 2, "price": {"usd_per_gb_hour": 0.1}})
    for peak, configuration in ((2e9, at()), (3e9, at(64)), (9e9, at(precision="bf16"))):
        reading = MemoryReading("cuda_allocator", int(peak), capacity_bytes=8 * 10**9, context_bytes=0)
        data = measured(data, configuration, memory=reading)
    answer = answer_of(data)
    assert Variant("default", at().options) in answer.evidence.memory.models
    assert Variant("default", at(precision="bf16").options) not in answer.evidence.memory.models
    assert not answer.choice.goal.priced
    assert any("per GB-hour" in warning for warning in explanation.model_report(answer).warnings)


@pytest.mark.parametrize("shared", [True, False])
def test_launches_that_fail_with_other_values_of_options_count_as_launches(shared: bool) -> None:
    values = [f"kernel-{number}" for number in range(16)]
    data = job(options={"attention": values}, cluster={"max_nodes": 2}, profiling={"share_launches": shared})
    failed = set()
    for _ in range(30):
        if not (new := decide_plan(analyse(data)).new):
            break
        for run in new:
            c = run.configuration
            if c.options == (("attention", values[0]),):
                data = measured(data, c)
            else:
                data = measured(data, c, state="failed")
                failed.add(find_launch(c) if shared else c)
    assert 0 < len(failed) <= 4, "the default is six launches, of which the base takes at least two"


@pytest.mark.parametrize("shared", [True, False])
def test_launches_of_the_first_values_that_fail_count_as_launches_too(shared: bool) -> None:
    data = job(options={"attention": ["eager", "flash"]}, profiling={"share_launches": shared})
    launches: list[object] = []
    while new := decide_plan(analyse(data)).new:
        for run in new:
            launch = find_launch(run.configuration) if shared else run.configuration
            launches += [launch] if launch not in launches else []
            state: RunState = "succeeded" if launch == launches[0] else "failed"
            data = measured(data, run.configuration, state=state)
    assert 2 < len(launches) <= 6
