"""Tests that the recommended candidate follows from prices, frontier, knee and limits."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.configurations import make_configuration
from tula_service.perfmodel import choice as perfmodel_choice
from tula_service.perfmodel.choice import Choice
from tula_service.perfmodel.intervals import Interval
from tula_service.perfmodel.objectives import Goal
from tula_service.perfmodel.points import ObservationError
from tula_service.perfmodel.pricing import (
    Estimate,
    Limits,
    Offer,
    Spot,
    Training,
    build_menu,
    pareto_frontier,
    price,
    spot_slowdown,
    usd_per_hour_saved,
)
from tula_wire.enums import Objective

SPREAD = 1.2


def choose(objective: Objective, found: list[Estimate], **goal: Any) -> Choice:
    """Return the choice for a goal with these limits and prices; the estimates already include training and offers."""
    return perfmodel_choice.choose(Goal(objective, Training(1000, 2), {}, **goal), found)


PEAK = Interval(8e9, 7e9, 9e9)


def of_options(step_s: float, **options: str) -> Estimate:
    """Return an estimate for one node with these options and an interval of +- 20 %."""
    (estimate,) = estimates([(1, 64, step_s)])
    return replace(estimate, configuration=replace(estimate.configuration, options=tuple(sorted(options.items()))))


@pytest.mark.parametrize("objective", ["time", "cost", "balanced", "knee", "energy", "time_to_quality"])
def test_a_value_that_may_be_no_better_is_not_chosen_over_todays(objective: Objective) -> None:
    today, better, clearly_better = (of_options(s, kernel=word) for s, word in ((1.0, "z"), (0.992, "a"), (0.96, "b")))
    values = {"kernel": ["z", "a", "b"]}
    choice = choose(objective, [better, today], options=values)
    assert choice.chosen is today
    assert choice.expected_best is better
    assert choice.runner_up is (None if objective == "cost" else better)
    assert "clearly better" in choice.merit
    assert choose(objective, [better, today]).chosen is better, "without options, there are no values of today"
    exact = [replace(each, known_sd=0.001) for each in (better, today)]
    assert choose(objective, exact, options=values).chosen is exact[0]
    choice = choose(objective, [better, today, clearly_better], options=values)
    assert choice.chosen is choice.expected_best is clearly_better
    assert "clearly better" not in choice.merit


def test_of_values_that_may_be_as_good_the_fewest_changes_are_chosen_then_the_first_in_the_job() -> None:
    values = {"compile": ["off", "on"], "kernel": ["z", "b", "a"]}
    today, both = of_options(1.0, compile="off", kernel="z"), of_options(0.4, compile="on", kernel="a")
    last, first = (of_options(s, compile="off", kernel=word) for s, word in ((0.404, "a"), (0.406, "b")))
    assert choose("time", [both, today], options=values).chosen is both
    assert choose("time", [both, today, last], options=values).chosen is last
    assert choose("time", [both, last, first, today], options=values).chosen is first


def estimates(rows, offer=None, **options):
    """Return candidates from (nodes, local batch, step time), with one rank per node and intervals of +- 20 %."""
    offer = offer or Offer(usd_per_node_hour=3.6)
    return [
        price(
            make_configuration(nodes, 1, batch),
            Interval(t, t / SPREAD, t * SPREAD),
            Training(1000, 2),
            offer,
            **options,
        )
        for nodes, batch, t in rows
    ]


def test_time_and_cost_follow_equations_4a_and_4b():
    (one,) = estimates([(4, 25, 0.5)])
    assert one.time_s.mean == pytest.approx(2 * 1000 / 100 * 0.5)
    assert one.cost_usd.mean == pytest.approx(10.0 * 4 * 3.6 / 3600)
    assert one.epoch_time_s.mean == pytest.approx(5.0)
    assert one.time_s.high == pytest.approx(10.0 * SPREAD)


def test_memory_prices_count_every_ranks_peak_in_gigabytes():
    offer = Offer(usd_per_gb_hour=1.0, usd_per_rank_hour=2.0)
    (one,) = estimates([(4, 25, 0.5)], offer, peak_bytes=PEAK)
    assert one.cost_usd.mean == pytest.approx(10.0 / 3600 * 4 * (8.0 + 2.0))
    with pytest.raises(ObservationError, match="requires a memory prediction"):
        estimates([(4, 25, 0.5)], offer)


def test_spot_interruptions_lose_the_work_since_the_checkpoint():
    spot = Spot(interruptions_per_node_hour=0.1, checkpoint_interval_s=600, restart_s=120)
    rng = np.random.default_rng(5)
    rate = 8 * 0.1 / 3600
    simulated = []
    for _ in range(4000):
        elapsed = 0.0
        while (life := rng.exponential(1 / rate)) < 600:
            elapsed += life + 120
        simulated.append(elapsed + 600)
    assert spot_slowdown(spot, 8) == pytest.approx(np.mean(simulated) / 600, rel=0.03)
    assert spot_slowdown(None, 8) == 1.0
    assert spot_slowdown(spot, 16) > spot_slowdown(spot, 8) > 1.0


OFFERS = st.builds(
    Offer,
    usd_per_node_hour=st.floats(0, 100),
    usd_per_gb_hour=st.floats(0, 1),
    usd_per_rank_hour=st.floats(0, 10),
)
SPOTS = st.builds(
    Spot,
    interruptions_per_node_hour=st.floats(0, 2),
    checkpoint_interval_s=st.floats(1, 7200),
    restart_s=st.floats(0, 3600),
)


@settings(max_examples=60)
@given(OFFERS, st.floats(1, 7200), st.floats(0, 3600), st.integers(1, 64))
def test_without_interruptions_spot_costs_and_takes_what_on_demand_does(offer, interval, restart, nodes):
    calm = replace(offer, spot=Spot(0.0, interval, restart))
    (plain,), (spot,) = (estimates([(nodes, 25, 0.5)], one, peak_bytes=PEAK) for one in (offer, calm))
    assert (spot.spot, plain.spot) == (True, False)
    assert replace(spot, spot=False) == plain


@settings(max_examples=60)
@given(SPOTS, st.integers(1, 64), st.floats(1, 3))
def test_time_and_cost_never_fall_with_the_rate_the_nodes_the_restart_or_the_interval(spot, nodes, more):
    offer = Offer(usd_per_node_hour=1.0)

    def of(changed, count=nodes):
        (found,) = estimates([(count, 25, 0.5)], replace(offer, spot=changed))
        return found

    base = of(spot)
    assert spot_slowdown(spot, nodes) >= 1.0 - 1e-12
    rate, restart, interval = spot.interruptions_per_node_hour, spot.restart_s, spot.checkpoint_interval_s
    for worse in (
        of(replace(spot, interruptions_per_node_hour=rate * more)),
        of(replace(spot, restart_s=restart * more)),
        of(replace(spot, checkpoint_interval_s=interval * more)),
    ):
        assert worse.time_s.mean >= base.time_s.mean * (1 - 1e-9)
        assert worse.cost_usd.mean >= base.cost_usd.mean * (1 - 1e-9)
    assert spot_slowdown(spot, nodes * 2) >= spot_slowdown(spot, nodes) * (1 - 1e-9)


@given(st.floats(1e-12, 1e-6), st.floats(1, 7200), st.floats(0, 3600))
def test_a_rate_near_zero_is_near_no_interruptions_and_not_a_division_gone_wrong(rate, interval, restart):
    assert spot_slowdown(Spot(rate, interval, restart), 1) == pytest.approx(1.0, abs=1e-5)


@settings(max_examples=60)
@given(OFFERS, st.floats(0, 10), st.integers(1, 16))
def test_prices_add_up_and_scale_cost_but_never_time(offer, factor, nodes):
    rows = [(nodes, 25, 0.5)]
    (whole,) = estimates(rows, offer, peak_bytes=PEAK)
    parts = [
        estimates(rows, Offer(**{name: getattr(offer, name)}), peak_bytes=PEAK)[0]
        for name in ("usd_per_node_hour", "usd_per_gb_hour", "usd_per_rank_hour")
    ]
    assert whole.cost_usd.mean == pytest.approx(sum(part.cost_usd.mean for part in parts))
    assert {part.time_s for part in parts} == {whole.time_s}
    (dearer,) = estimates(rows, replace(offer, usd_per_gb_hour=offer.usd_per_gb_hour * factor), peak_bytes=PEAK)
    memory = parts[1].cost_usd.mean
    assert dearer.cost_usd.mean - whole.cost_usd.mean == pytest.approx((factor - 1) * memory, abs=1e-9)
    assert dearer.cost_usd.low <= dearer.cost_usd.mean <= dearer.cost_usd.high


def test_candidates_of_several_types_are_priced_by_their_own_offer_and_compete():
    small, large = make_configuration(2, 1, 25, 1, "small"), make_configuration(1, 4, 25, 1, "large")
    offers = {"small": Offer(1.0), "large": Offer(6.0, spot=Spot(0.1))}
    steps = {small: Interval(0.4, 0.3, 0.5), large: Interval(0.2, 0.1, 0.3)}
    found = [price(c, step, Training(1000), offers[c.instance_type]) for c, step in steps.items()]
    assert found[0].cost_usd.mean == pytest.approx(1000 / 50 * 0.4 * 2 * 1.0 / 3600)
    assert found[1].cost_usd.mean == pytest.approx(1000 / 100 * 0.2 * 6.0 / 3600 * spot_slowdown(Spot(0.1), 1))
    assert choose("time", found).chosen.configuration == large
    assert choose("cost", found).chosen.configuration == large
    dear = price(large, steps[large], Training(1000), Offer(60.0))
    assert choose("cost", [found[0], dear]).chosen.configuration == small


def test_a_hopeless_spot_job_is_excluded_and_not_an_overflow():
    offer = Offer(usd_per_node_hour=1.0, spot=Spot(1e6))
    choice = choose("time", estimates([(4, 25, 0.5)], offer))
    assert choice.chosen is None
    assert choice.excluded[0].limit == "interruptions"
    assert math.isinf(spot_slowdown(Spot(1e6), 4))


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=20))
def test_the_frontier_is_exactly_what_nothing_dominates(points):
    (one,) = estimates([(1, 25, 0.5)])
    found = [replace(one, time_s=Interval(a, a, a), cost_usd=Interval(b, b, b)) for a, b in points]
    kept = [(e.time_s.mean, e.cost_usd.mean) for e in pareto_frontier(found)]
    for a, b in points:
        assert any(x <= a and y <= b for x, y in kept)
    for i, (a, b) in enumerate(kept):
        assert not any(x <= a and y <= b for j, (x, y) in enumerate(kept) if j != i)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=20), st.data())
def test_a_menu_has_up_to_five_points_of_the_frontier_its_ends_and_the_chosen_one(points, data):
    rows = estimates([(1, 25 + row, 0.5) for row in range(len(points))])
    found = [
        replace(one, time_s=Interval(a, a, a), cost_usd=Interval(b, b, b))
        for one, (a, b) in zip(rows, points, strict=True)
    ]
    frontier = pareto_frontier(found)
    chosen = data.draw(st.sampled_from(frontier))
    menu = build_menu(frontier, chosen)
    assert len(menu) == min(5, len(frontier))
    assert {frontier[0].key, frontier[-1].key, chosen.key} <= {e.key for e in menu} <= {e.key for e in frontier}
    assert [e.time_s.mean for e in menu] == sorted(e.time_s.mean for e in menu)
    for faster, slower in pairwise(menu):
        paid = usd_per_hour_saved(faster, slower) * (slower.time_s.mean - faster.time_s.mean) / 3600
        assert paid == pytest.approx(faster.cost_usd.mean - slower.cost_usd.mean)


def test_each_objective_takes_its_best_and_names_the_runner_up():
    rows = [(1, 64, 0.4), (2, 64, 0.41), (4, 64, 0.6), (8, 64, 1.3)]
    found = estimates(rows)
    fastest, cheapest = choose("time", found), choose("cost", found)
    assert fastest.chosen.configuration.num_nodes == 4
    assert fastest.runner_up.configuration.num_nodes == 8
    assert cheapest.chosen.configuration.num_nodes == 1
    assert fastest.least_cost == cheapest.chosen
    assert [e.configuration.num_nodes for e in fastest.frontier] == [4, 2, 1]


def test_a_limit_excludes_by_the_upper_end_of_the_interval():
    found = estimates([(1, 64, 0.4), (2, 64, 0.41), (4, 64, 0.6)])
    times = {e.configuration.num_nodes: e.time_s for e in found}
    limits = Limits(deadline_s=times[2].mean * 1.05, max_global_batch_size=128)
    choice = choose("cost", found, limits=limits)
    by_nodes = {e.estimate.configuration.num_nodes: e for e in choice.excluded}
    assert by_nodes[4].limit == "max_global_batch_size"
    assert by_nodes[1].certain
    assert not by_nodes[2].certain
    assert by_nodes[2].share == pytest.approx(times[2].high / limits.deadline_s)
    assert choice.chosen.configuration.num_nodes == 2
    assert not choice.within_limits_is_likely
    safe = choose("cost", found[:2], limits=Limits(deadline_s=times[2].high * 1.01))
    assert safe.chosen.configuration.num_nodes == 2
    assert safe.within_limits_is_likely


def test_the_runner_up_of_least_cost_is_not_predicted_to_be_cheaper():
    sure, unsure, third = estimates([(1, 64, 0.4), (2, 64, 0.41), (4, 64, 0.6)])
    cost = sure.cost_usd.mean
    unsure = replace(unsure, cost_usd=Interval(0.99 * cost, 0.3 * cost, 3.0 * cost))
    choice = choose("cost", [sure, unsure, third])
    assert choice.chosen is sure, "by expected cost"
    assert choice.runner_up is third
    assert choose("cost", [sure, unsure]).runner_up is None


def test_a_candidate_that_surely_breaks_the_budget_is_no_hope_for_the_deadline():
    (found,) = estimates([(2, 64, 0.4)])
    limits = Limits(deadline_s=found.time_s.mean * 1.05, budget_usd=found.cost_usd.mean / 2)
    choice = choose("time", [found], limits=limits)
    assert choice.chosen is None
    assert [(each.limit, each.certain) for each in choice.excluded] == [("budget_usd", True), ("deadline_s", False)]


def test_every_limit_that_a_candidate_breaks_is_found():
    slow, fast, large = estimates([(1, 64, 0.4), (4, 64, 0.6), (4, 128, 0.6)])
    limits = Limits(deadline_s=fast.time_s.mean / 2, budget_usd=slow.cost_usd.mean / 2, max_global_batch_size=256)
    choice = choose("cost", [slow, fast, large], limits=limits)
    broken = {(each.estimate.key, each.limit) for each in choice.excluded}
    assert broken >= {(one.key, limit) for one in (slow, fast, large) for limit in ("deadline_s", "budget_usd")}


def test_when_nothing_fits_nothing_is_recommended():
    choice = choose("time", estimates([(1, 64, 0.4)]), limits=Limits(budget_usd=1e-9))
    assert choice.chosen is None
    assert [each.limit for each in choice.excluded] == ["budget_usd"]


TABLES = st.lists(
    st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([32, 64, 128, 256]), st.floats(0.01, 1.0)),
    min_size=1,
    max_size=16,
    unique_by=lambda row: row[:2],
)


@settings(max_examples=100)
@given(TABLES, st.booleans(), st.none() | st.floats(0.01, 1e4))
def test_a_compromise_is_never_dominated_and_gives_up_at_most_a_tenth_for_a_smaller_batch(rows, priced, waiting):
    found = estimates(rows)
    choice = choose("balanced", found, priced=priced, usd_per_hour_of_waiting=waiting)
    chosen, value = choice.chosen, choice.goal.value
    assert chosen in choice.frontier
    fastest = choose("time", found, priced=priced, usd_per_hour_of_waiting=waiting)
    assert fastest.balanced.configuration == chosen.configuration, "every choice names the compromise"
    least = min(value(e).expected for e in choice.frontier)
    assert value(chosen).expected <= (1.0 if priced and waiting else 1.1) * least * (1 + 1e-9)
    if not (priced and waiting):
        near = [e for e in choice.frontier if value(e).expected <= 1.1 * least]
        assert chosen.configuration.global_batch_size == min(e.configuration.global_batch_size for e in near)


@settings(max_examples=50)
@given(TABLES, st.floats(0.1, 10.0), st.floats(0.1, 100.0))
def test_the_product_of_time_and_cost_knows_no_unit(rows, slower, dearer):
    plain = choose("balanced", estimates(rows))
    scaled = estimates([(n, b, t * slower) for n, b, t in rows], Offer(usd_per_node_hour=3.6 * dearer))
    other = choose("balanced", scaled)
    products = sorted(plain.goal.value(e).expected for e in plain.frontier)
    clear = all(abs(p / (1.1 * products[0]) - 1.0) > 1e-6 for p in products) and len(set(products)) == len(products)
    if clear:  # otherwise, rounding would decide
        assert other.chosen.configuration == plain.chosen.configuration


def test_without_prices_a_compromise_is_nearly_the_least_time():
    fast, slow = estimates([(8, 64, 0.5), (1, 64, 0.1)])
    assert choose("balanced", [fast, slow], priced=False).chosen is fast
    assert choose("balanced", [fast, slow]).chosen is slow
