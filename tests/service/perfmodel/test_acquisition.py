"""Runs towards a choice: when the last run of the design is made, and what a job that strays from the form promises."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.configurations import make_configuration
from tula_service.domain import Objective, Search
from tula_service.perfmodel.acquisition import ModelDoubt, expected_improvements
from tula_service.perfmodel.choice import choose
from tula_service.perfmodel.intervals import Interval
from tula_service.perfmodel.planner import PlanBudget, plan
from tula_service.perfmodel.points import StepTimeObservations
from tula_service.perfmodel.pricing import Estimate, Offer, Training
from tula_service.perfmodel.recommend import Goal, Recommendation, recommend
from tula_service.perfmodel.residual_gp import SURPRISING
from tula_service.perfmodel.step_time_model import StepTimeModel, fit_step_time
from tula_wire import Configuration

GRID = [make_configuration(nodes, 4, batch) for nodes in (1, 2, 4, 8) for batch in (32, 64, 128, 256)]
OFFERS = {"default": Offer(usd_per_node_hour=12.0)}
TIME, COST = (Goal(objective, Training(1e6), OFFERS) for objective in (Objective.TIME, Objective.COST))


def step_time(c: Configuration) -> float:
    return ((0.02 + 0.001 * c.local_batch_size) ** 2 + (0.06 * (c.num_nodes > 1)) ** 2) ** 0.5


def mostly_launches(c: Configuration) -> float:
    """A device that small batches leave idle: nothing but the largest is worth choosing."""
    return 0.2 + 0.0002 * c.local_batch_size


def fitted(done, candidates, time=step_time) -> StepTimeModel | None:
    """The model of the measured configurations; None before the first."""
    if not done:
        return None
    return fit_step_time(StepTimeObservations.at(done, [time(c) for c in done]), candidates=candidates)


def following(done: list[Configuration], candidates, goal: Goal, most: int = 6, time=step_time, failed=()):
    budget = PlanBudget(max_runs=most)
    model = fitted(done, candidates, time)
    return plan(Search.ADAPTIVE, candidates, model, goal=goal, budget=budget, unavailable=failed)


def designed(candidates, goal: Goal) -> list[Configuration]:
    return [run.configuration for run in following([], candidates, goal).runs]


def chosen_after(done: list[Configuration], goal: Goal, time=step_time) -> Configuration:
    observed = StepTimeObservations.at(done, [time(c) for c in done])
    chosen = recommend(GRID, fit_step_time(observed, candidates=GRID), goal).choice.chosen
    assert chosen is not None
    return chosen.configuration


def test_where_the_choice_is_open_the_design_is_finished_before_it_is_verified():
    done = designed(GRID, COST)
    assert chosen_after(done, COST) not in done
    (run,) = following(done, GRID, COST).runs
    assert run.purpose.startswith("Design: ")


def test_the_last_run_of_a_budget_verifies_the_choice_rather_than_finish_the_design():
    done = designed(GRID, COST)
    (run,) = following(done, GRID, COST, most=len(done) + 1).runs
    assert run.purpose.startswith("Verification: ")
    assert run.configuration == chosen_after(done, COST)


def gpu_seconds(configurations: list[Configuration], time=step_time) -> float:
    return sum(time(c) * c.world_size for c in configurations)


def to_its_end(candidates, goal: Goal, most: int = 8, time=step_time) -> tuple[list[Configuration], list[str]]:
    """Every run in order with its purpose."""
    done, purposes = [], []
    while runs := following(done, candidates, goal, most, time).runs:
        done += [run.configuration for run in runs]
        purposes += [run.purpose for run in runs]
    return done, purposes


def test_a_choice_that_was_measured_still_gets_a_fourth_run_while_predictions_are_wide():
    done = designed(GRID, TIME)
    assert chosen_after(done, TIME, mostly_launches) in done
    (run,) = following(done, GRID, TIME, time=mostly_launches).runs
    assert "most informative for what it costs" in run.purpose
    assert run.configuration.num_nodes < 8, "a small cluster costs little"


@pytest.mark.parametrize("time", [step_time, mostly_launches])
def test_up_to_two_further_runs_each_add_at_most_a_fifth_to_what_was_spent(time):
    done, purposes = to_its_end(GRID, TIME, time=time)
    further = [row for row, why in enumerate(purposes) if row >= 4 and "most informative for what it costs" in why]
    assert further
    assert max(further) < 6
    for row in further:
        assert gpu_seconds([done[row]], time) <= 0.25 * gpu_seconds(done[:row], time)  # a fifth, by predicted times
    assert "stable" in str(following(done, GRID, TIME, 8, time).stop_reason)


def test_a_cheap_run_that_fails_counts_as_one():
    """Where none on small clusters can run, each of them would be tried in turn."""
    done, purposes = to_its_end(GRID, TIME)
    first = next(row for row, why in enumerate(purposes) if row >= 4 and "most informative for what it costs" in why)
    ended, failed = done[:first], []
    while runs := following(ended, GRID, TIME, 16, failed=failed).runs:
        assert all("most informative for what it costs" in run.purpose for run in runs)
        failed += [run.configuration for run in runs]
    assert len(failed) == 2


def test_where_every_run_is_dear_predictions_stay_wide():
    dear = [make_configuration(8, 4, batch) for batch in (16, 32, 64, 128, 256, 512)]

    def much_at_any_batch(c: Configuration) -> float:
        return 1.0 + 0.02 * (c.local_batch_size % 7)

    done, purposes = to_its_end(dear, TIME, time=much_at_any_batch)
    assert not any("most informative for what it costs" in why for why in purposes[4:])
    assert len(done) < len(dear)


def test_where_little_is_uncertain_three_runs_are_enough():
    similar = [make_configuration(1, 4, batch) for batch in (128, 160, 192, 256)]
    done = designed(similar, TIME)
    assert len(done) == 3
    assert "stable" in str(following(done, similar, TIME, time=mostly_launches).stop_reason)


def test_a_model_doubt_adds_a_tenth_of_its_expected_improvement():
    free = Interval(0.0, 0.0, 0.0)
    known, dear = Interval(1.0, 1.0, 1.0), Interval(3.0, 2.99, 3.01)
    measured, other = (
        Estimate(make_configuration(1, 1, batch), value, value, free, value, None, False, seen, {})
        for batch, value, seen in ((1, known, True), (2, dear, False))
    )
    choice = choose(Objective.TIME, [measured, other])

    def hope(doubt: ModelDoubt | None) -> float:
        doubts = {} if doubt is None else {other.configuration: doubt}
        ((found, _),) = expected_improvements(Recommendation((measured, other), choice), TIME, doubts=doubts)
        return found

    assert hope(None) == pytest.approx(0.0, abs=1e-6)
    assert hope(ModelDoubt(0.0, 0.01)) == pytest.approx(0.0, abs=1e-6)
    assert 0.001 < hope(ModelDoubt(0.0, 0.6)) < hope(ModelDoubt(0.0, 1.2)) < 0.1
    assert hope(ModelDoubt(-np.log(6.0), 0.001)) == pytest.approx(0.1 * 0.5, rel=0.01)


def test_a_job_that_strays_is_least_sure_of_clusters_that_were_not_run():
    done = [make_configuration(8, 4, 256), make_configuration(8, 4, 64), make_configuration(1, 4, 256)]
    observed = StepTimeObservations.at(done, [step_time(c) for c in done])
    seen, unseen = make_configuration(8, 4, 128), make_configuration(2, 4, 256)
    usual, surprising = (
        fit_step_time(observed, candidates=GRID, **beliefs).predict([seen, unseen]).log_sd
        for beliefs in ({}, {"hypotheses": (SURPRISING,)})
    )
    assert surprising[1] / usual[1] > surprising[0] / usual[0]
    assert surprising[1] > 0.3
