"""Tests the runs that refine a choice: first the choice itself, then the candidate with the lowest confidence bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.configurations import make_configuration
from tula_service.perfmodel.choice import Choice, choose, recommend
from tula_service.perfmodel.intervals import Interval
from tula_service.perfmodel.objectives import Goal
from tula_service.perfmodel.planner import PlanBudget, expected_gain, most_promising, plan
from tula_service.perfmodel.points import StepTimeObservations
from tula_service.perfmodel.pricing import Estimate, Limits, Offer, Training
from tula_service.perfmodel.step_time_model import StepTimeModel, fit_step_time
from tula_wire import Configuration

GRID = [make_configuration(nodes, 4, batch) for nodes in (1, 2, 4, 8) for batch in (32, 64, 128, 256)]
OFFERS = {"default": Offer(usd_per_node_hour=12.0)}
TIME, COST = (Goal(objective, Training(1e6), OFFERS) for objective in ("time", "cost"))


def step_time(c: Configuration) -> float:
    return ((0.02 + 0.001 * c.local_batch_size) ** 2 + (0.06 * (c.num_nodes > 1)) ** 2) ** 0.5


def mostly_launches(c: Configuration) -> float:
    """Return a step time that hardly grows with the batch, so that only the largest batch is worth choosing."""
    return 0.2 + 0.0002 * c.local_batch_size


def fitted(done, candidates, time=step_time) -> StepTimeModel | None:
    """Return the model fitted to the measured configurations, or None if there are none."""
    if not done:
        return None
    return fit_step_time(StepTimeObservations.at(done, [time(c) for c in done]), candidates=candidates)


def following(done: list[Configuration], candidates, goal: Goal, most: int = 6, time=step_time, failed=()):
    budget = PlanBudget(max_runs=most)
    model = fitted(done, candidates, time)
    return plan("adaptive", candidates, model, goal=goal, budget=budget, unavailable=failed)


def designed(candidates, goal: Goal) -> list[Configuration]:
    return [run.configuration for run in following([], candidates, goal).runs]


def chosen_after(done: list[Configuration], goal: Goal, time=step_time) -> Configuration:
    observed = StepTimeObservations.at(done, [time(c) for c in done])
    chosen = recommend(GRID, fit_step_time(observed, candidates=GRID), goal).chosen
    assert chosen is not None
    return chosen.configuration


def test_a_design_of_four_comes_before_the_verification_of_the_choice():
    done = designed(GRID, COST)
    assert len(done) == 4
    (run,) = following(done[:3], GRID, COST).runs
    assert run.purpose.startswith("Design: ")


def test_the_choice_is_verified_before_any_contender():
    done = [make_configuration(8, 4, 256), make_configuration(8, 4, 32), make_configuration(4, 4, 64)]
    done.append(make_configuration(4, 4, 256))
    assert chosen_after(done, COST) not in done
    (run,) = following(done, GRID, COST).runs
    assert run.purpose.startswith("Verification: ")
    assert run.configuration == chosen_after(done, COST)


def estimates(*values: tuple[float, float, bool], limits: Limits | None = None) -> Choice:
    """Return the choice among candidates, each given as (seconds, upper end of its interval as a ratio, measured).

    The n-th candidate has a batch of n examples.
    """
    free = Interval(0.0, 0.0, 0.0)
    found = []
    for place, (mean, factor, measured) in enumerate(values):
        time = Interval(mean, mean / factor, mean * factor)
        c = make_configuration(1, 1, place + 1)
        found.append(Estimate(c, time, time, free, time, None, measured=measured))
    return choose(replace(TIME, limits=limits or Limits()), found)


def place_of_most_promising(choice: Choice, open_places=None) -> int:
    runnable = [e.configuration for e in choice.estimates]
    if open_places is not None:
        runnable = [runnable[place] for place in open_places]
    best = most_promising(choice, runnable)
    assert best is not None
    return best.configuration.local_batch_size - 1


def test_the_most_promising_candidate_has_the_lowest_confidence_bound():
    sure, hopeful, hopeless = (1.05, 1.01, False), (1.2, 1.5, False), (3.0, 1.5, False)
    assert place_of_most_promising(estimates((1.0, 1.04, True), sure, hopeful, hopeless)) == 2
    assert place_of_most_promising(estimates((1.0, 1.04, True), sure, hopeless)) == 0, "no other may be better"
    assert place_of_most_promising(estimates((1.0, 1.04, True), sure, hopeful), open_places=[1]) == 0


def test_a_measured_candidate_counts_with_its_mean_however_wide_its_interval():
    assert place_of_most_promising(estimates((1.0, 2.0, True), (1.1, 1.3, False))) == 1


def test_limits_come_before_the_value():
    limits = Limits(deadline_s=0.9)
    promising = estimates((1.0, 1.04, True), (2.0, 1.2, False), (1.1, 1.5, False), limits=limits)
    assert place_of_most_promising(promising) == 2, "only this candidate may meet the deadline"


def test_the_expected_gain_of_a_launch_sums_the_expected_improvements_of_its_batches():
    hopeful, level, hopeless, measured = (1.1, 1.5, False), (1.0, 1.1, False), (3.0, 1.1, False), (2.0, 4.0, True)
    found = estimates((1.0, 1.04, True), hopeful, level, hopeless, measured)
    draws = np.random.default_rng(1).standard_normal(400_000)
    improvements = [np.maximum(0.0, -np.log(mean) - draws * np.log(high) / 1.7) for mean, high, _ in (hopeful, level)]
    runnable = [e.configuration for e in found.estimates]
    assert expected_gain(found, runnable) == pytest.approx(sum(each.mean() for each in improvements), rel=0.01)
    assert expected_gain(found, runnable[3:]) == pytest.approx(0.0, abs=1e-6)
    late = estimates((1.0, 1.04, True), hopeless, limits=Limits(deadline_s=0.5))
    assert expected_gain(late, runnable) > 1.0, "the choice exceeds the deadline"


@pytest.mark.parametrize(("num_nodes", "ranks", "hopeful"), [(8, 1, False), (2, 8, True)])
def test_a_step_may_be_shorter_on_more_ranks_only_where_they_take_fewer_nodes(num_nodes, ranks, hopeful):
    (seen, other), free = estimates((1.0, 1.04, True), (1.0, 1.1, False)).estimates, Interval(0.0, 0.0, 0.0)
    seen = replace(seen, configuration=make_configuration(4, 1, 32), known_sd=0.001)
    other = replace(other, configuration=make_configuration(num_nodes, ranks, 32), cost_usd=free)
    gain = expected_gain(choose(TIME, [seen, other]), [other.configuration])
    assert (gain > 0.01) == hopeful


@pytest.mark.parametrize("deadline_s", [None, 0.8])
def test_no_candidate_is_promising_whose_step_would_be_shorter_than_on_fewer_ranks(deadline_s):
    found = estimates((0.9, 1.04, True), (1.0, 1.04, True), (1.0, 1.5, False)).estimates
    places = [make_configuration(4, 1, 64), make_configuration(4, 1, 32), make_configuration(8, 1, 32)]
    found = [replace(e, configuration=c, known_sd=0.001) for e, c in zip(found, places, strict=True)]
    goal = replace(TIME, limits=Limits(deadline_s=deadline_s))
    assert most_promising(choose(goal, found), places) is found[0]
    assert most_promising(choose(replace(goal, sharded=True), found), places) is found[2]


def test_a_price_of_memory_is_not_bounded_by_a_step():
    (seen, other) = estimates((1.0, 1.04, True), (1.0, 1.1, False)).estimates
    seen = replace(seen, configuration=make_configuration(1, 1, 32), known_sd=0.001, cost_usd=seen.time_s)
    other = replace(other, configuration=make_configuration(2, 1, 32), cost_usd=other.time_s)
    of_memory = replace(other, cost_usd=Interval(1.0, 0.7, 1.4))
    gains = [expected_gain(choose(COST, [seen, e]), [other.configuration]) for e in (other, of_memory)]
    assert gains[0] < 0.005 < 0.05 < gains[1]


def test_the_expected_gain_counts_a_batch_once_at_its_better_offer():
    on_demand = estimates((1.0, 1.04, True), (1.1, 1.5, False), (1.2, 1.5, False))
    runnable = [e.configuration for e in on_demand.estimates]
    slower = [replace(e, time_s=e.time_s.scaled(1.05), spot=True) for e in on_demand.estimates]
    for both in ((*on_demand.estimates, *slower), (*slower, *on_demand.estimates)):
        found = replace(on_demand, estimates=both)
        assert expected_gain(found, runnable) == pytest.approx(expected_gain(on_demand, runnable))


@pytest.mark.parametrize(("mean", "share_launches", "runs"), [(1.02, False, 1), (1.02, True, 0), (0.99, True, 1)])
def test_a_launch_for_a_contender_must_promise_more_than_one_percent(mean, share_launches, runs):
    found = estimates((1.3, 1.04, True), (mean, 1.05, False), (1.2, 1.04, True), (1.0, 1.04, True))
    candidates = [e.configuration for e in found.estimates]
    model = fitted([e.configuration for e in found.estimates if e.measured], candidates)
    budget = PlanBudget(share_launches=share_launches)
    step = plan("adaptive", candidates, model, goal=TIME, recommendation=found, budget=budget)
    assert [run.configuration for run in step.runs] == [candidates[1]] * runs


def test_where_little_is_uncertain_four_runs_are_enough():
    similar = [make_configuration(1, 4, batch) for batch in (128, 144, 160, 192, 224, 256)]
    done = designed(similar, TIME)
    assert len(done) == 4
    assert "stable" in str(following(done, similar, TIME, time=mostly_launches).stop_reason)
