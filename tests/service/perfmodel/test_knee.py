"""Tests that the knee lies on the job's frontier of cost against time, or that a sentence says why there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.configurations import make_configuration
from tula_service.perfmodel.choice import choose
from tula_service.perfmodel.intervals import Interval
from tula_service.perfmodel.objectives import Goal, find_knee
from tula_service.perfmodel.pricing import Estimate, Training


def exactly(value: float) -> Interval:
    return Interval(value, value, value)


def estimate(time_s: float, cost_usd: float, batch: int = 32) -> Estimate:
    time, configuration = exactly(time_s), make_configuration(1, 1, batch)
    return Estimate(configuration, exactly(0.1), time, exactly(cost_usd), time, None)


FRONTIER = [
    estimate(*point, batch)
    for point, batch in zip([(10, 64), (12, 24), (16, 18), (25, 15)], (256, 128, 64, 32), strict=True)
]


def test_the_knee_is_where_time_stops_buying_much_money():
    knee = find_knee(FRONTIER)
    assert knee.estimate is FRONTIER[1]
    assert "costs 2.7 times as much" in knee.reason


@given(time=st.floats(1e-3, 1e6), cost=st.floats(1e-3, 1e6))
def test_units_of_time_and_money_do_not_move_the_knee(time, cost):
    scaled = [replace(e, time_s=e.time_s.scaled(time), cost_usd=e.cost_usd.scaled(cost)) for e in FRONTIER]
    assert find_knee(scaled).estimate is scaled[1]


def test_what_takes_over_three_times_the_least_time_does_not_move_the_knee():
    assert find_knee([*FRONTIER, estimate(31, 0.01), estimate(300, 0.001)]).estimate is FRONTIER[1]


@pytest.mark.parametrize("frontier", [FRONTIER[:1], FRONTIER[:2], [FRONTIER[0], estimate(31, 2), estimate(40, 1)]])
def test_fewer_than_three_points_have_no_knee_and_a_sentence_says_so(frontier):
    knee = find_knee(frontier)
    assert knee.estimate is None
    assert "fewer than three points" in knee.reason


def test_a_straight_frontier_has_no_knee():
    assert find_knee([estimate(10.0 * 1.2**i, 64.0 / 1.2**i) for i in range(5)]).estimate is None


def test_without_a_knee_the_objective_takes_the_least_time_times_cost_and_says_so():
    found = [estimate(10, 64, 256), estimate(30, 16, 128)]
    choice = choose(Goal("knee", Training(1000), {}), found)
    assert choice.chosen is found[1]
    assert "time multiplied by its cost is the smallest" in choice.merit
    assert "no knee" in choice.merit


def test_the_objective_takes_the_knee():
    choice = choose(Goal("knee", Training(1000), {}), FRONTIER)
    assert choice.chosen is FRONTIER[1]
    assert choice.merit.startswith("it is the candidate at the knee")
