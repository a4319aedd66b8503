"""Tests the chart of time against cost: all candidates, the frontier, and the names of the points to choose from."""

from __future__ import annotations

import itertools

import pytest

import tula_wire as wire
from tests.service.dashboard import models
from tests.service.dashboard.drawing import compiles
from tula_service.dashboard.charts.candidates import frontier
from tula_service.dashboard.charts.vega import Spec


def marked(candidates: list[wire.Candidate]) -> list[wire.Candidate]:
    """Return the candidates with `dominated` set as the service sets it."""

    def beaten(one: wire.Candidate) -> bool:
        others = [(each.total_time_s.value, usd(each)) for each in candidates if each.excluded_by is None]
        return any(
            time <= one.total_time_s.value and cost <= usd(one) and (time, cost) != (one.total_time_s.value, usd(one))
            for time, cost in others
        )

    return [each.model_copy(update={"dominated": beaten(each)}) for each in candidates]


def usd(candidate: wire.Candidate) -> float:
    assert candidate.cost_usd is not None
    return candidate.cost_usd.value


def frontier_of(found: wire.Recommendation) -> Spec:
    return frontier(models.job(), found)


def test_every_candidate_is_a_point_and_the_line_holds_those_that_none_beats() -> None:
    found = models.recommendation(marked(models.grid()))
    data = frontier_of(found)["datasets"]
    assert [row["x"] for row in data["candidates"]] == [usd(each) for each in found.candidates]
    best = [each for each in found.candidates if not (each.dominated or each.excluded_by)]
    assert 1 < len(best) < len(found.candidates) / 2
    assert [row["x"] for row in data["frontier"]] == [usd(each) for each in best]
    ordered = sorted(data["frontier"], key=lambda row: row["x"])
    assert all(one["y"] > other["y"] for one, other in itertools.pairwise(ordered)), "dearer is faster"
    crossed = [row for row in data["candidates"] if row["crossed"]]
    assert len(best) <= len(crossed) <= len(best) + 6
    assert all(row["x_low"] < row["x"] < row["x_high"] and row["y_low"] < row["y"] < row["y_high"] for row in crossed)


def test_the_points_that_one_chooses_among_are_named() -> None:
    found = models.recommendation(marked(models.grid()))
    middle = found.candidates[7]
    changed = {"balanced": middle, "knee": found.knee.model_copy(update={"configuration": middle.configuration})}
    spec = frontier_of(found.model_copy(update=changed))
    named = {name: row for row in spec["datasets"]["landmarks"] for name in row["label"].split(", ")}
    assert set(named) == {"recommended", "runner-up", "least time", "least cost", "balanced", "knee"}
    assert named["balanced"] == named["knee"]
    assert named["balanced"]["x"] == usd(middle)
    drawn = compiles(spec)
    for name in ("recommended", "least cost", "90 % intervals"):
        assert name in drawn
    assert drawn.count(">4 nodes<") == 1, "one legend for colour, shape and fill"


def test_node_hours_stand_for_the_cost_of_a_job_without_prices() -> None:
    found = models.recommendation(models.grid(priced=False))
    spec = frontier_of(found)
    assert "node-hours" in spec["title"]["subtitle"]
    for row, each in zip(spec["datasets"]["candidates"], found.candidates, strict=True):
        assert row["x"] == pytest.approx(each.total_time_s.value * each.configuration.num_nodes / 3600)
        assert "node-hours" in row["cost"]


def test_a_price_of_nothing_is_drawn_on_a_linear_axis() -> None:
    free = wire.Estimate(value=0.0, low=0.0, high=0.0)
    spec = frontier_of(models.recommendation([models.candidate(nodes, 64, cost_usd=free) for nodes in (1, 2)]))
    assert "recommended" in compiles(spec)
