"""Tests the possible stages of a batch schedule, their savings, and when the constant batch is kept."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import tula_wire as wire
from tests.service.analysis.test_answer import answer_of, job, profiled
from tula_service.analysis.job_data import JobData
from tula_service.analysis.scaling import PARTS, NoiseCurve, StatisticalEfficiency, noise_curve
from tula_service.analysis.schedule import MOST_STAGES, Ramp, Ramps, plan_schedule
from tula_service.perfmodel.choice import choose
from tula_service.perfmodel.guard import SGD, AccuracyGuard
from tula_service.perfmodel.intervals import Interval
from tula_service.perfmodel.objectives import OBJECTIVES, Goal
from tula_service.perfmodel.pricing import Estimate, Offer, Training, price
from tula_wire import Configuration
from tula_wire.enums import Objective

TRAINING = Training(64_000, 10)
GUARD = AccuracyGuard(640_000.0, 64, 300.0, SGD)
GROWING = [100.0] * 3 + [300.0] * 7 + [800.0] * 5 + [5000.0] * 5


def goal_for(objective: Objective = "balanced") -> Goal:
    return Goal(objective, TRAINING, {"default": Offer(3.0)}, guard=GUARD)


def candidates() -> list[Estimate]:
    """Return candidates with one to eight nodes; with two or more nodes, their steps include communication."""
    planned = []
    for nodes in (1, 2, 4, 8):
        for batch in (64, 128, 256):
            step_s = 1.0 + 0.05 * batch + (2.0 if nodes > 1 else 0.0)
            interval = Interval(step_s, 0.95 * step_s, 1.05 * step_s)
            c = Configuration(num_nodes=nodes, local_batch_size=batch)
            planned.append(price(c, interval, TRAINING, Offer(3.0)))
    return planned


def best(noise: list[float], goal: Goal | None = None, **more: Any) -> Ramp:
    planned = Ramps(noise, candidates(), goal or goal_for(), **more).best()
    assert planned is not None
    return planned


@pytest.mark.parametrize("objective", ["balanced", "time", "cost", "knee"])
@given(noise=st.lists(st.floats(1.0, 1e5), min_size=PARTS, max_size=PARTS))
@example(noise=GROWING)
@example(noise=[900.0, 10.0, 5000.0, *[50_000.0] * 17])
def test_stages_are_few_their_batches_never_fall_and_the_guard_allows_each(objective: Objective, noise) -> None:
    goal = goal_for(objective)
    stages = best(noise, goal).stages
    assert 1 <= len(stages) <= MOST_STAGES
    assert [stages[0].first, stages[-1].end] == [0, PARTS]
    for stage, after in pairwise(stages):
        assert stage.end == after.first
        assert stage.estimate.key != after.estimate.key
        assert stage.estimate.configuration.global_batch_size <= after.estimate.configuration.global_batch_size
    for stage in stages:
        assert stage.noise_scale == min(noise[stage.first :])
        guard = replace(GUARD, noise_scale=stage.noise_scale)
        assert guard.allows(stage.estimate.configuration.global_batch_size)


@pytest.mark.parametrize("objective", ["balanced", "time", "cost"])
def test_each_stage_has_the_batch_and_nodes_that_the_objective_likes_best_at_its_noise(objective: Objective) -> None:
    goal = goal_for(objective)
    for stage in best(GROWING, goal).stages:
        guard = replace(GUARD, noise_scale=stage.noise_scale)
        allowed = [e for e in candidates() if guard.allows(e.configuration.global_batch_size)]
        liked = OBJECTIVES[objective].rank(replace(goal, guard=guard), allowed)[0]
        assert stage.estimate.configuration == liked.configuration


def test_a_growing_noise_scale_makes_a_ramp_that_is_better_than_any_batch_the_guard_allows_throughout() -> None:
    goal = goal_for("time")
    ramp = best(GROWING, goal, relaunch_s=0.0)
    assert len(ramp.stages) == 4
    throughout = replace(goal, guard=replace(GUARD, noise_scale=GROWING[0]))
    allowed = [
        e for e in candidates() if throughout.guard and throughout.guard.allows(e.configuration.global_batch_size)
    ]
    assert ramp.total.time_s.mean < min(e.time_s.mean for e in allowed)


@pytest.mark.parametrize("noise", [[300.0] * PARTS, GROWING[::-1]])
def test_one_batch_stays_while_the_noise_scale_is_flat_or_falls(noise: list[float]) -> None:
    assert len(best(noise).stages) == 1


def test_times_and_costs_are_those_of_the_stages_and_of_their_relaunches() -> None:
    ramp = best(GROWING, relaunch_s=100.0)
    whole = {e.key: e for e in candidates()}
    time_s = cost_usd = 0.0
    for stage in ramp.stages:
        share, of_all = (stage.end - stage.first) / PARTS, whole[stage.estimate.key]
        assert stage.estimate.time_s.mean == pytest.approx(share * of_all.time_s.mean)
        time_s += share * of_all.time_s.mean
        cost_usd += share * of_all.cost_usd.mean
        if stage.first:
            time_s += 100.0
            cost_usd += 100.0 / 3600 * 3.0 * stage.estimate.configuration.num_nodes
    assert len(ramp.stages) > 1
    assert ramp.total.time_s.mean == pytest.approx(time_s)
    assert ramp.total.cost_usd.mean == pytest.approx(cost_usd)


def test_relaunches_that_take_longer_than_they_save_leave_one_stage() -> None:
    assert len(best(GROWING, relaunch_s=1e6).stages) == 1


def test_parts_at_the_constant_configuration_save_nothing_whatever_the_error_of_its_prediction() -> None:
    ramps = Ramps(GROWING, candidates(), goal_for("time"), relaunch_s=0.0)
    ramp = ramps.best()
    assert ramp is not None
    first = ramp.stages[0]
    constant = next(e for e in candidates() if e.key == first.estimate.key)
    saved, _ = ramps.saved(ramp, constant)
    assert saved.mean == pytest.approx(constant.time_s.mean - ramp.total.time_s.mean)
    certain = replace(constant, time_s=Interval(*[constant.time_s.mean] * 3))
    narrower, _ = ramps.saved(ramp, certain)
    assert saved.low < narrower.low < saved.mean < narrower.high < saved.high
    assert ramps.saved(ramps.constant(constant), constant) == (Interval(0, 0, 0), Interval(0, 0, 0))


def test_under_time_to_quality_each_part_counts_the_steps_of_its_own_noise_scale() -> None:
    counted = StatisticalEfficiency(300.0, 64)
    factors = {e.configuration: 1.0 / counted.of(e.configuration.global_batch_size) for e in candidates()}
    goal = replace(goal_for("time_to_quality"), steps_factor=factors)
    estimate = candidates()[-1]
    ramps = Ramps([100.0] * 10 + [5000.0] * 10, [estimate], goal)
    batch = estimate.configuration.global_batch_size
    halves = (counted.of(batch) / StatisticalEfficiency(noise, 64).of(batch) for noise in (100.0, 5000.0))
    assert ramps.constant(estimate).total.time_s.mean == pytest.approx(estimate.time_s.mean * sum(halves) / 2)


def test_a_curve_has_the_noise_scale_of_each_part_and_no_more_than_was_measured() -> None:
    steps = np.arange(2000)
    values = np.where(steps < 1000, 100.0, 400.0)
    values[:100] = np.nan  # the first part was not measured
    values[1500:1600] = np.inf  # the noise of the sixteenth part is too high to be measured
    curve = noise_curve("run-1", steps, values, global_batch_size=50, examples=100_000)
    assert curve.covered == pytest.approx(1.0)
    assert curve.values == pytest.approx([100.0] * 10 + [400.0] * 10)


@pytest.mark.parametrize(
    ("steps", "measured", "covered"), [(1000, 1000, 0.5), (2000, 800, 0.4), (2000, 0, 0.0), (0, 0, 0.0)]
)
def test_a_training_that_was_not_measured_throughout_gives_no_curve(steps: int, measured: int, covered: float) -> None:
    values = np.full(steps, np.nan)
    values[:measured] = 100.0
    curve = noise_curve("run-1", np.arange(steps), values, global_batch_size=50, examples=100_000)
    assert (curve.values, curve.covered) == ((), pytest.approx(covered))


def profiled_job(**changes: Any) -> JobData:
    """Return a profiled job with 64,000 examples and an early noise scale of 100."""
    wanted = {"dataset": {"size": 64_000}, "objective": "balanced", "model": {"name": "net", "optimizer": "adam"}}
    data, _ = profiled(replace(job(**(wanted | changes)), trained_noise=[np.full(100, 100.0)]))
    slower = [replace(s, step_time_s=None if s.step_time_s is None else 300 * s.step_time_s) for s in data.summaries]
    return replace(data, summaries=slower)


def schedule(data: JobData, *curves: NoiseCurve, objective: Objective | None = None) -> wire.BatchSchedule:
    return wire.read(wire.BatchSchedule, plan_schedule(data, "job-1", objective, 0.999, curves))


def test_a_schedule_has_whole_steps_the_gain_as_rate_and_a_beta2_of_constant_half_life() -> None:
    data = profiled_job()
    planned = schedule(data, NoiseCurve("run-1", 1.0, tuple(GROWING)))
    assert planned.noise_run_id == "run-1"
    assert 2 <= len(planned.stages) <= MOST_STAGES, planned.sentence
    examples = 0
    for stage, after in pairwise(planned.stages):
        examples += stage.steps * stage.global_batch_size
        assert (after.first_step, after.first_example) == (stage.first_step + stage.steps, examples)
        assert after.learning_rate_factor > stage.learning_rate_factor
    assert 0 <= 640_000 - examples - planned.stages[-1].steps * planned.stages[-1].global_batch_size < 1024
    assert planned.steps == sum(stage.steps for stage in planned.stages)
    for stage in planned.stages:
        gain = StatisticalEfficiency(stage.noise_scale, 64).learning_rate_factor(stage.global_batch_size)
        assert stage.learning_rate_factor == pytest.approx(gain**0.5), "Adam uses the square root"
        assert np.log(stage.beta2) / stage.global_batch_size == pytest.approx(np.log(0.999) / 64)
    assert planned.saved_s is not None
    assert planned.saved_usd is not None
    assert planned.saved_s.low < planned.saved_s.value < planned.saved_s.high
    assert planned.sentence.startswith("The schedule takes ")
    assert planned.risk is not None


def test_without_a_noise_scale_over_a_training_the_schedule_says_how_to_get_it() -> None:
    data = profiled_job()
    for curves, said in (
        ([], "No training run has measured"),
        ([NoiseCurve("run-1", 0.4)], "known for only 40 % of a training run's examples: complete a"),
        ([NoiseCurve("run-1", 1.0)], "was measured in too few parts of a training run: complete a"),
    ):
        planned = schedule(data, *curves)
        assert planned.stages == []
        assert planned.sentence.startswith(said) or said in planned.sentence
        assert "complete a training run with `TulaOptimizer`" in planned.sentence


def test_where_no_schedule_is_better_the_constant_batch_is_kept() -> None:
    data = profiled_job()
    flat = schedule(data, NoiseCurve("run-1", 1.0, (100.0,) * PARTS))
    assert flat.stages == []
    assert flat.constant is not None
    kept = f"Keep the constant batch of {flat.constant.global_batch_size}: while the noise scale is 100 examples"
    assert flat.sentence.startswith(kept)
    elsewhere = schedule(data, NoiseCurve("run-1", 1.0, (100.0,) * PARTS), objective="time")
    assert elsewhere.constant != flat.constant
    assert elsewhere.sentence.startswith("Keep the constant batch: the best schedule that the accuracy guard allows")
    at_risk = schedule(data, NoiseCurve("run-1", 1.0, tuple(GROWING)), objective="time")
    assert at_risk.stages == []
    assert at_risk.sentence.startswith(
        "Keep the constant batch: the best schedule that the accuracy guard allows takes "
    )
    assert "puts the accuracy at risk" in at_risk.sentence
    chosen = choose(answer_of(data, "time").choice.goal, answer_of(data, "time").estimates).chosen
    assert chosen is not None
    assert at_risk.constant == chosen.configuration


def test_a_job_for_which_nothing_can_be_recommended_says_so() -> None:
    planned = schedule(job(limits={"deadline_s": 1e-3}), NoiseCurve("run-1", 1.0, tuple(GROWING)))
    assert (planned.stages, planned.constant) == ([], None)
    assert planned.sentence.startswith("No candidate meets the limits (deadline_s)")
