"""Tests the sentences that say why a candidate or none was chosen, which limits decided this, and what they cost."""

from __future__ import annotations

import math
import re
from typing import Any, get_args

import pytest

from tests.support.configurations import make_configuration
from tula_service.analysis.explanation import breach, explain_choice, nearest_misses
from tula_service.perfmodel.choice import Choice, choose
from tula_service.perfmodel.intervals import Interval
from tula_service.perfmodel.objectives import Goal
from tula_service.perfmodel.pricing import Estimate, Limits, Offer, Training, price
from tula_wire.enums import Objective
from tula_wire.format import duration, money


def chosen_for(objective: Objective, found: list[Estimate], **limits: Any) -> Choice:
    return choose(Goal(objective, Training(1000, 2), {}, Limits(**limits)), found)


def estimates(*rows: tuple[int, int, float]) -> list[Estimate]:
    """Return candidates from (nodes, local batch, step time), with one rank per node and intervals of +- 20 %."""
    return [
        price(make_configuration(nodes, 1, batch), Interval(t, t / 1.2, t * 1.2), Training(1000, 2), Offer(3.6))
        for nodes, batch, t in rows
    ]


def test_a_limit_that_only_the_upper_end_breaks_is_said_to_be_so():
    (found,) = estimates((2, 64, 0.41))
    most = found.time_s.mean * 1.05
    choice = chosen_for("cost", [found], deadline_s=most)
    mean, high, limit = map(duration, (found.time_s.mean, found.time_s.high, most))
    said = breach(choice.excluded[0], choice.goal.limits)
    assert f"is {mean}, but {high} at the upper end of its interval, above the deadline of {limit}" in said


def test_a_limit_that_is_missed_by_less_than_a_text_shows_is_said_in_full():
    (late,) = estimates((1, 64, 461.76))
    choice = chosen_for("cost", [late], deadline_s=14_400.0)
    assert duration(late.time_s.mean) == duration(14_400.0)
    assert "14,430.0000 s, is above the deadline of 14,400.0000 s" in breach(choice.excluded[0], choice.goal.limits)


@pytest.mark.parametrize("objective", get_args(Objective))
def test_where_nothing_keeps_the_limits_safely_the_reason_says_only_that_with_the_chance(objective):
    found = estimates((1, 64, 0.4), (2, 64, 0.3))
    mean, high = found[1].time_s.mean, found[1].time_s.high
    chances = []
    for limit in (mean * 1.001, math.sqrt(mean * high), high * 0.999):
        choice = chosen_for(objective, found, deadline_s=limit)
        assert choice.chosen.configuration.num_nodes == 2
        assert "within the limits" not in explain_choice(choice)
        assert f"the fastest takes {duration(mean)}, or {duration(high)} at the upper end" in explain_choice(choice)
        chances.append(int(re.search(r"with a probability of (\d+) %", explain_choice(choice))[1]))
    assert chances[0] == 50
    assert chances == sorted(chances)
    assert chances[-1] == pytest.approx(95, abs=1)


def test_where_nothing_keeps_the_limits_the_reason_names_them_and_what_they_would_have_to_be():
    slow, fast, large = estimates((1, 64, 0.4), (4, 64, 0.6), (4, 128, 0.6))
    limits = {"deadline_s": fast.time_s.mean / 2, "budget_usd": slow.cost_usd.mean / 2, "max_global_batch_size": 256}
    choice = chosen_for("cost", [slow, fast, large], **limits)
    reason, nearest = explain_choice(choice), nearest_misses(choice)
    assert "(budget_usd, deadline_s, max_global_batch_size): the fastest takes" in reason
    assert f"the cheapest costs {money(slow.cost_usd.mean)}," in reason
    assert [nearest[limit].estimate for limit in limits] == [fast, slow, large], "no deadline lets the larger batch in"
    assert all(each.limit == limit for limit, each in nearest.items())
    assert nearest["deadline_s"].share == pytest.approx(fast.time_s.high / limits["deadline_s"])
    assert nearest_misses(chosen_for("cost", [slow, fast])) == {}
    small, large = estimates((1, 64, 0.4), (1, 128, 0.4))
    both = explain_choice(chosen_for("time", [small, large], deadline_s=1e-3, max_global_batch_size=64))
    assert f"the fastest takes {duration(small.time_s.mean)}" in both, "no deadline lets the larger batch in"


@pytest.mark.parametrize(("objective", "limit"), [("cost", "deadline_s"), ("time", "budget_usd")])
def test_the_least_time_is_said_where_a_limit_excludes_what_would_else_be_chosen(objective, limit):
    slow, fast = estimates((1, 64, 0.4), (4, 64, 0.6))
    tight = {"deadline_s": fast.time_s.high * 1.01, "budget_usd": slow.cost_usd.high * 1.01}[limit]
    said = f"Without deadline and budget, the fastest takes {fast.time_s.mean:.3g} s, or {fast.time_s.high:.3g} s at"
    limited = chosen_for(objective, [slow, fast], **{limit: tight})
    assert limited.within_limits_is_likely
    assert said in explain_choice(limited)
    assert ("the cheapest costs" in explain_choice(limited)) is (limit == "budget_usd")
    other = "time" if objective == "cost" else "cost"
    assert "Without" not in explain_choice(chosen_for(other, [slow, fast], **{limit: tight})), "it excludes no best"


@pytest.mark.parametrize(
    ("objective", "rows", "words"),
    [
        ("balanced", [(8, 64, 0.5), (1, 64, 0.1)], "the best compromise"),
        ("balanced", [(1, 64, 0.1), (4, 64, 0.195)], "the smallest batch"),
        ("knee", [(8, 64, 0.5), (1, 64, 0.1)], "; no knee"),
        ("cost", [(8, 64, 0.5), (1, 64, 0.1)], "the cheapest"),
        ("time", [(8, 64, 0.5), (1, 64, 0.1)], "the fastest of the candidates within the limits."),
    ],
)
def test_the_reason_names_the_measure_in_which_the_chosen_candidate_is_best(objective, rows, words):
    assert words in explain_choice(chosen_for(objective, estimates(*rows)))
