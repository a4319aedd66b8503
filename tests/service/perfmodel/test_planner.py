"""Tests that plans contain the right runs, each with a purpose, stay within the budget, and end with a reason."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.configurations import make_configuration
from tula_service.perfmodel.choice import recommend
from tula_service.perfmodel.objectives import Goal
from tula_service.perfmodel.planner import PlanBudget, design, log_value, plan
from tula_service.perfmodel.points import ObservationError, StepTimeObservations
from tula_service.perfmodel.pricing import Limits, Offer, Training
from tula_service.perfmodel.priors import Priors, generic_prior
from tula_service.perfmodel.step_time_model import StepTimeModel, fit_step_time, unmeasured_model
from tula_wire import Configuration
from tula_wire.enums import Search

GRID = [make_configuration(nodes, 4, batch) for nodes in (1, 2, 4, 8) for batch in (32, 64, 128, 256)]
GOAL = Goal("cost", Training(1e6, 2), {"default": Offer(usd_per_node_hour=12.0)})
KNEE = Goal("knee", Training(1e6, 2), GOAL.offers)


def step_time(c: Configuration) -> float:
    return ((0.02 + 0.001 * c.local_batch_size) ** 2 + (0.06 * (c.num_nodes > 1)) ** 2) ** 0.5


def fitted(done, candidates, time=step_time) -> StepTimeModel | None:
    """Return the model fitted to the measured configurations, or None if there are none."""
    if not done:
        return None
    return fit_step_time(StepTimeObservations.at(done, [time(c) for c in done]), candidates=candidates)


def work_through(search: Search, candidates, goal=GOAL, budget=None, time=step_time, **options):
    """Run the plan to its end, and return all configurations in order and the reason why it ended."""
    done: list[Configuration] = []
    while True:
        step = plan(search, candidates, fitted(done, candidates, time), goal=goal, budget=budget, **options)
        if not step.runs:
            return done, step.stop_reason
        assert all(run.purpose.endswith(".") for run in step.runs)
        done += [run.configuration for run in step.runs]
        assert len(done) <= len(candidates)


def test_full_search_profiles_everything_once():
    done, reason = work_through("full", GRID)
    assert sorted(done) == sorted(GRID)
    assert reason == "Every candidate has been profiled."


def test_partial_search_profiles_the_four_corners():
    done, reason = work_through("partial", GRID)
    assert set(done) == {make_configuration(n, 4, b) for n in (1, 8) for b in (32, 256)}
    assert "corner" in str(reason)


def test_the_papers_search_profiles_two_opposite_corners():
    done, reason = work_through("paper", GRID)
    assert done == [make_configuration(8, 4, 256), make_configuration(1, 4, 32)]
    assert "corner" in str(reason)


@settings(max_examples=15, deadline=None)
@given(most=st.integers(1, 8), speed=st.floats(0.01, 100))
def test_adaptive_search_holds_the_largest_cluster_and_its_budget(most, speed):
    done, reason = work_through("adaptive", GRID, GOAL, PlanBudget(max_runs=most), lambda c: speed * step_time(c))
    assert done[0].num_nodes == 8
    assert len(done) == len(set(done)) <= most
    assert reason


@pytest.mark.parametrize("goal", [GOAL, replace(GOAL, objective="time"), KNEE])
def test_the_first_design_goes_in_parallel_and_does_not_depend_on_step_times(goal):
    first = plan("adaptive", GRID, goal=goal)
    assert len(first.runs) == 4
    assert plan("adaptive", GRID, goal=goal) == first
    claimed = [run.configuration for run in first.runs]
    waiting = plan("adaptive", GRID, goal=goal, pending=claimed)
    assert waiting.runs == ()
    assert waiting.stop_reason is None


@pytest.mark.parametrize("most", [None, 64])
def test_with_a_goal_the_largest_cluster_first_runs_the_batch_that_would_be_chosen_there(most):
    """The user's limit on the batch also applies before anything has been measured."""
    limit = None if most is None else 8 * 4 * most
    goal = Goal("time", Training(1e6), {"default": Offer()}, Limits(max_global_batch_size=limit))
    first = plan("adaptive", GRID, goal=goal).runs[0].configuration
    assert first == make_configuration(8, 4, most or 256)
    per_gb = Goal("cost", Training(1e6), {"default": Offer(usd_per_gb_hour=0.1)})
    assert plan("adaptive", GRID, goal=per_gb).runs[0].configuration.num_nodes == 8, "before memory is known"


def test_when_every_prediction_breaks_a_limit_the_likeliest_to_keep_it_is_tried_before_giving_up():
    """Only two nodes meet the deadline, and steps on them are shorter than the step-time model predicts."""

    def surprising(c: Configuration) -> float:
        return step_time(c) * (0.5 if c.num_nodes == 2 else 1.0) * (1.6 if c.num_nodes > 2 else 1.0)

    seconds = {c: surprising(c) * 1e6 / c.global_batch_size for c in GRID}
    fastest = min(seconds.values())
    goal = Goal("cost", Training(1e6), GOAL.offers, Limits(deadline_s=1.1 * fastest))
    done, reason = work_through("adaptive", GRID, goal, PlanBudget(max_runs=8), surprising)
    observed = StepTimeObservations.at(done, [surprising(c) for c in done])
    choice = recommend(GRID, fit_step_time(observed, candidates=GRID), goal)
    assert reason
    assert choice.chosen is not None
    assert seconds[choice.chosen.configuration] <= 1.1 * fastest


def test_a_price_per_gigabyte_hour_counts_as_one_gigabyte_a_rank():
    model = unmeasured_model(Priors({"default": generic_prior()}), GRID)
    rank, memory, nothing = (
        log_value(model, GRID, replace(GOAL, offers={"default": Offer(usd_per_node_hour=3.0, **more)}))
        for more in ({"usd_per_rank_hour": 0.5}, {"usd_per_gb_hour": 0.5}, {})
    )
    assert memory == pytest.approx(rank)
    assert memory - nothing == pytest.approx(np.log(5.0 / 3.0))


@pytest.mark.parametrize(
    "goal",
    [
        replace(GOAL, objective="time"),
        GOAL,
        replace(GOAL, objective="balanced"),
        replace(GOAL, objective="balanced", priced=False),
        replace(GOAL, objective="balanced", usd_per_hour_of_waiting=40.0),
        replace(GOAL, objective="balanced", steps_factor={c: 1.0 + c.global_batch_size / 1e4 for c in GRID}),
    ],
    ids=["time", "cost", "balanced", "without prices", "waiting", "more steps"],
)
def test_the_design_aims_at_what_the_choice_wants_small(goal):
    """Before any run, the design and the later choice value all candidates alike, up to a common factor."""
    model = unmeasured_model(Priors({"default": generic_prior()}), GRID)
    result = recommend(GRID, model, goal)
    wanted = np.log([goal.value(estimate).mean for estimate in result.estimates])
    assert np.ptp(log_value(model, GRID, goal) - wanted) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("objective", ["time", "cost", "balanced"])
@pytest.mark.parametrize("batches", [(8, 16, 32), (32, 64, 128, 256)])
def test_the_first_two_batches_are_four_apart_where_the_design_has_such(objective, batches):
    candidates = [make_configuration(nodes, 4, batch) for nodes in (1, 2) for batch in batches]
    runs = plan("adaptive", candidates, goal=replace(GOAL, objective=objective)).runs
    first, second = sorted(run.configuration.local_batch_size for run in runs[:2])
    assert second >= 4 * first


def test_the_recommendation_was_measured_and_is_near_the_best():
    done, reason = work_through("adaptive", GRID, GOAL)
    observed = StepTimeObservations.at(done, [step_time(c) for c in done])
    result = recommend(GRID, fit_step_time(observed, candidates=GRID), GOAL)
    assert result.chosen is not None
    assert result.chosen.configuration in done
    cost = {c: step_time(c) * c.num_nodes / c.global_batch_size for c in GRID}
    assert cost[result.chosen.configuration] <= 1.02 * min(cost.values())
    assert reason
    assert len(done) <= 6


def test_configurations_that_failed_are_neither_planned_nor_waited_for():
    lost = [c for c in GRID if c.local_batch_size == 256]
    done, _ = work_through("adaptive", GRID, GOAL, unavailable=lost)
    assert not set(done) & set(lost)
    with pytest.raises(ObservationError, match="the runs of all candidates have failed"):
        plan("adaptive", GRID, goal=GOAL, unavailable=GRID)


def test_a_spent_budget_of_gpu_seconds_ends_profiling():
    budget = PlanBudget(max_runs=100, max_gpu_seconds=100.0, spent_gpu_seconds=100.0)
    step = plan("adaptive", GRID, goal=GOAL, budget=budget)
    assert step.runs == ()
    assert "GPU-seconds" in str(step.stop_reason)


def test_a_choice_that_the_budget_cannot_measure_is_not_called_measured():
    slow = [c for c in GRID if c.num_nodes == 1]
    budget = PlanBudget(max_runs=100, max_gpu_seconds=100.0, spent_gpu_seconds=20.0)
    left = [*slow, make_configuration(2, 4, 32), make_configuration(8, 4, 256)]
    goal = Goal("time", Training(1e6), GOAL.offers)
    step = plan("adaptive", left, fitted(slow, left), goal=goal, budget=budget)
    assert step.runs == ()
    assert "is still a prediction" in str(step.stop_reason)


def test_every_instance_type_gets_its_largest_cluster():
    both = [*GRID, *(make_configuration(c.num_nodes, 8, c.local_batch_size, 1, "big") for c in GRID)]
    goal = Goal("time", Training(1e6), {"default": Offer(), "big": Offer()})
    first = plan("adaptive", both, goal=goal, budget=PlanBudget(max_runs=10))
    assert {c.configuration.instance_type for c in first.runs[:2]} == {"default", "big"}
    assert {c.configuration.num_nodes for c in first.runs[:2]} == {8}


def test_a_free_instance_type_is_worth_a_run_and_prices_of_zero_do_no_harm():
    both = [*GRID, *(make_configuration(c.num_nodes, 4, c.local_batch_size, 1, "free") for c in GRID)]
    offers = {"default": Offer(usd_per_node_hour=1.0), "free": Offer()}
    goal = Goal("cost", Training(1e6), offers)
    done, reason = work_through("adaptive", both, goal, PlanBudget(max_runs=9))
    assert reason
    observed = StepTimeObservations.at(done, [step_time(c) for c in done])
    chosen = recommend(both, fit_step_time(observed, candidates=both), goal).chosen
    assert chosen is not None
    assert chosen.configuration.instance_type == "free"


def test_a_limit_that_nothing_keeps_ends_the_search():
    goal = Goal("time", Training(1e6), {"default": Offer()}, Limits(deadline_s=1e-3))
    done, reason = work_through("adaptive", GRID, goal, PlanBudget(max_runs=100))
    assert len(done) < len(GRID)
    assert reason is None, "the choice has the reason"


@pytest.mark.parametrize("goal", [GOAL, replace(GOAL, objective="time"), KNEE])
def test_planned_launches_are_three_batches_of_each_cluster_within_the_budget_of_launches(goal):
    done, reason = work_through("adaptive", GRID, goal, PlanBudget(max_runs=3, share_launches=True))
    clusters = dict.fromkeys(c.num_nodes for c in done)
    assert list(clusters)[:2] == [8, 1]
    for nodes in (8, 1):
        assert {32, 256} < {c.local_batch_size for c in done if c.num_nodes == nodes}
    assert len(done) <= 3 * 3
    assert reason


def test_no_cluster_is_launched_in_the_hope_that_an_example_costs_less_there_than_on_a_smaller_one():
    def slow_links(c: Configuration) -> float:
        return math.hypot(0.02 + 0.001 * c.local_batch_size, 0.12 * (c.num_nodes > 1))

    grid = [c for c in GRID if c.local_batch_size != 64]
    shards = replace(GOAL, sharded=True)  # more ranks shorten the optimizer's part of a step
    for measured, goal, launched in (((1, 8), GOAL, set()), ((2, 8), GOAL, {1}), ((1, 8), shards, {2})):
        done = [c for c in grid if c.num_nodes in measured]
        budget = PlanBudget(share_launches=True)
        step = plan("adaptive", grid, fitted(done, grid, slow_links), goal=goal, budget=budget)
        assert {run.configuration.num_nodes for run in step.runs} == launched


def test_a_first_launch_that_told_the_split_fixes_no_other_before_its_result():
    budget = PlanBudget(max_runs=8, share_launches=True)
    done = [make_configuration(8, 4, batch) for batch in (32, 128, 256)]
    times = [step_time(c) for c in done]
    plain = fit_step_time(StepTimeObservations.at(done, times), candidates=GRID)
    told = fit_step_time(
        StepTimeObservations.at(done, times, exposed_comm_time_s=[0.1 * t for t in times]), candidates=GRID
    )
    goal = replace(GOAL, objective="time")
    without = plan("adaptive", GRID, plain, goal=goal, budget=budget)
    assert {run.configuration.num_nodes for run in without.runs} == {1}
    assert without.runs[0].purpose.startswith("Design")
    following = plan("adaptive", GRID, told, goal=goal, budget=budget)
    assert not any(run.purpose.startswith("Design") for run in following.runs)


def test_single_runs_include_the_smallest_cluster_after_the_largest():
    """Predictions are worst beyond the largest measured cluster."""
    for goal in (GOAL, replace(GOAL, objective="time"), KNEE):
        nodes = [run.configuration.num_nodes for run in plan("adaptive", GRID, goal=goal).runs]
        assert nodes[0] == 8
        assert 1 in nodes


def test_a_design_varies_the_micro_steps_of_a_job_that_accumulates():
    """Only runs with different numbers of micro-steps separate the time per step from the time per micro-step."""
    candidates = [make_configuration(nodes, 4, 32, steps) for nodes in (1, 2, 4, 8) for steps in (1, 2, 4, 8)]
    chosen = design(candidates, Priors(), 4)
    assert len({c.grad_accum_steps for c in chosen}) >= 2


def test_a_second_launch_of_a_cluster_counts_as_one():
    done = [make_configuration(nodes, 4, batch) for nodes in (1, 8) for batch in (32, 128, 256)]
    budget = PlanBudget(max_runs=3, share_launches=True)
    step = plan("adaptive", GRID, fitted(done, GRID), goal=GOAL, budget=budget)
    assert {c.configuration.num_nodes for c in step.runs} in ({2}, {4})
    done.append(make_configuration(8, 4, 64))
    spent = plan("adaptive", GRID, fitted(done, GRID), goal=GOAL, budget=budget)
    assert spent.stop_reason == "The budget of 3 launches (profiling.max_runs) is spent."


def test_of_probed_nodes_the_smallest_cluster_comes_first_and_then_what_would_be_chosen():
    priors = Priors({"default": generic_prior()}, probed=frozenset({"default"}))
    goal = Goal("time", Training(1e6), GOAL.offers)
    budget = PlanBudget(max_runs=3, share_launches=True)
    first = plan("adaptive", GRID, unmeasured_model(priors, GRID), goal=goal, budget=budget)
    done = [run.configuration for run in first.runs]
    assert done == [make_configuration(1, 4, batch) for batch in (32, 128, 256)]
    observed = StepTimeObservations.at(done, [step_time(c) for c in done])
    model = fit_step_time(observed, prior=priors, candidates=GRID)
    chosen = recommend(GRID, model, goal).chosen
    assert chosen is not None
    step = plan("adaptive", GRID, model, goal=goal, budget=budget)
    assert chosen.configuration in [run.configuration for run in step.runs]
    assert step.runs[0].purpose.startswith("Verification")


def test_no_launch_is_planned_while_another_is_pending():
    budget = PlanBudget(max_runs=8, share_launches=True)
    first = [run.configuration for run in plan("adaptive", GRID, goal=GOAL, budget=budget).runs]
    assert plan("adaptive", GRID, goal=GOAL, budget=budget, pending=first).runs == ()
    half = fitted(first[:3], GRID)
    assert plan("adaptive", GRID, half, goal=GOAL, budget=budget, pending=first[3:]).runs == ()


def test_a_launch_has_as_many_batches_as_the_gpu_seconds_pay_for():
    smallest = [c for c in GRID if c.num_nodes == 1]
    model = fitted([*smallest, make_configuration(2, 4, 32)], GRID)
    costs = [30 * 32 * t for t in model.predict([c for c in GRID if c.num_nodes == 8]).mean_s]
    budget = PlanBudget(max_runs=8, share_launches=True, max_gpu_seconds=1.01 * sum(costs[:2]))
    planned = [run.configuration for run in plan("adaptive", GRID, model, goal=GOAL, budget=budget).runs]
    assert planned == [make_configuration(8, 4, batch) for batch in (32, 64)]


def test_a_launch_that_was_cut_short_is_completed_with_what_the_design_still_needs():
    budget = PlanBudget(max_runs=3, share_launches=True)
    first = [run.configuration for run in plan("adaptive", GRID, goal=GOAL, budget=budget).runs]
    rest = plan("adaptive", GRID, fitted(first[1:], GRID), goal=GOAL, budget=budget)
    assert [run.configuration for run in rest.runs] == first[:1]


def test_a_launch_of_the_design_that_nothing_pays_for_is_left_out():
    smallest = [c for c in GRID if c.num_nodes == 1]
    model = fitted([*smallest, make_configuration(2, 4, 32)], GRID)
    (cost,) = 30 * 32 * model.predict([make_configuration(8, 4, 32)]).mean_s
    budget = PlanBudget(max_runs=8, share_launches=True, max_gpu_seconds=0.9 * cost)
    planned = plan("adaptive", GRID, model, goal=GOAL, budget=budget)
    assert all(run.configuration.num_nodes < 8 for run in planned.runs)
