"""Tests the trade-off curve: its points, bands, limits, rules and landmarks."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import tula_wire as wire
from tests.service.dashboard import models
from tests.service.dashboard.drawing import compiles
from tula_service.dashboard.charts.candidates import tradeoff
from tula_service.dashboard.charts.vega import Spec, log_ticks


def test_tradeoff_holds_the_best_candidate_of_every_cluster_and_batch_with_its_interval() -> None:
    found = models.recommendation()
    slower = models.candidate(2, 64).model_copy(
        update={"configuration": wire.Configuration(num_nodes=2, local_batch_size=32, grad_accum_steps=2)}
    )
    slow = slower.model_copy(update={"total_time_s": wire.Estimate(value=1e6, low=9e5, high=2e6)})
    spec = tradeoff(models.job(), found.model_copy(update={"candidates": [*found.candidates, slow]}))
    rows = spec["datasets"]["candidates"]
    by_place = {(row["cluster"], row["batch"]): row for row in rows}
    assert len(rows) == len(by_place) == len(found.candidates)
    for candidate in found.candidates:
        count = candidate.configuration.num_nodes
        row = by_place[f"{count} node" if count == 1 else f"{count} nodes", candidate.global_batch_size]
        for part in ("value", "low", "high"):
            assert row[part] * 60 == pytest.approx(getattr(candidate.total_time_s, part))
        assert row["profiled"] == candidate.profiled
        assert row["excluded"] == (candidate.excluded_by or "")


def test_tradeoff_names_what_coincides_once() -> None:
    found = models.recommendation()
    same = found.model_copy(update={"chosen": found.least_time, "runner_up": None, "least_cost": None})
    marks = tradeoff(models.job(), same)["datasets"]["landmarks"]
    assert [mark["label"] for mark in marks] == ["recommended, least time"]


def test_no_knee_no_rule() -> None:
    with_knee = tradeoff(models.job(), models.recommendation())
    without = tradeoff(models.job(), models.recommendation(knee=False))
    assert with_knee["datasets"]["rules"] == [{"batch": 900.0, "label": "knee", "left": True, "line": 0}]
    assert without["datasets"]["rules"] == []
    assert len(without["layer"]) == len(with_knee["layer"]) - 3  # the rule, its label and the label's outline


def ruled(sensible: int | None, *, knee: float | None = 900.0) -> Spec:
    """Return the chart for a largest sensible batch of `sensible` examples and a knee at a batch of `knee` examples."""
    found = models.recommendation(knee=knee is not None)
    changes = {"max_sensible_batch_size": sensible, "knee": found.knee.model_copy(update={"global_batch_size": knee})}
    return tradeoff(models.job(), found.model_copy(update=changes))


@pytest.mark.parametrize("sensible", [32, 700, 900, 1000, 1800, 4096])
def test_the_largest_sensible_batch_is_ruled_beside_the_knee_and_each_name_has_a_line(sensible: int) -> None:
    spec = ruled(sensible)
    rules = {row["label"]: row for row in spec["datasets"]["rules"]}
    if sensible == 900:
        assert [(row["batch"], row["label"]) for row in rules.values()] == [(900.0, "knee, largest sensible batch")]
    else:
        assert {label: row["batch"] for label, row in rules.items()} == {
            "knee": 900,
            "largest sensible batch": sensible,
        }
    for row in rules.values():
        assert row["left"] is (row["batch"] > (32 * 4096) ** 0.5), "its name stands on the wider side"
    assert sorted(row["line"] for row in rules.values()) == list(range(len(rules)))
    assert "largest sensible batch" in compiles(spec)


def test_a_largest_sensible_batch_outside_the_frame_is_said_and_stretches_nothing() -> None:
    for outside in (8, 100_000):
        spec = ruled(outside)
        assert [row["label"] for row in spec["datasets"]["rules"]] == ["knee"]
        assert f"largest sensible batch {outside:,}" in spec["title"]["subtitle"]
    assert "sensible" not in ruled(None)["title"]["subtitle"]
    assert [row["label"] for row in ruled(700, knee=None)["datasets"]["rules"]] == ["largest sensible batch"]


def test_limits_are_shaded_only_where_they_bind() -> None:
    def shades(job: wire.Job) -> int:
        spec = tradeoff(job, models.recommendation())
        return sum(layer["mark"]["type"] == "rect" for layer in spec["layer"])

    assert shades(models.job()) == 0
    assert shades(models.job(deadline_s=500.0)) == 1
    assert shades(models.job(deadline_s=500.0, max_global_batch_size=512)) == 2
    assert shades(models.job(deadline_s=3e8, max_global_batch_size=10**6)) == 0


def test_a_limit_outside_the_frame_shades_all_of_it_and_stretches_nothing() -> None:
    spec = tradeoff(models.job(deadline_s=1.0), models.recommendation())
    shade = next(layer for layer in spec["layer"] if layer["mark"]["type"] == "rect")
    line = next(layer for layer in spec["layer"] if layer["mark"]["type"] == "line")
    assert shade["data"]["values"][0]["value"] == pytest.approx(line["encoding"]["y"]["scale"]["domain"][0])


def test_lines_differ_in_look_and_equal_clusters_share_a_colour() -> None:
    found = models.recommendation()
    kinds = ("p3", "g5")
    candidates = [
        models.candidate(
            nodes, 64, configuration=wire.Configuration(num_nodes=nodes, local_batch_size=64, instance_type=kind)
        )
        for kind in kinds
        for nodes in (1, 2, 4, 8, 16)
    ]
    spec = tradeoff(models.job(), found.model_copy(update={"candidates": candidates}))
    encoding = next(layer for layer in spec["layer"] if layer["mark"]["type"] == "line")["encoding"]
    names = encoding["color"]["scale"]["domain"]
    colours, dashes = encoding["color"]["scale"]["range"], encoding["strokeDash"]["scale"]["range"]
    assert len({(colour, tuple(dash)) for colour, dash in zip(colours, dashes, strict=True)}) == len(names) == 10
    assert colours[names.index("4 nodes of p3")] == colours[names.index("4 nodes of g5")]


@given(st.floats(1e-6, 1e9), st.floats(1.0001, 1e6))
@example(700000001.0, 4.0)
def test_ticks_of_a_logarithmic_axis_are_few_round_and_inside(low: float, ratio: float) -> None:
    ticks = log_ticks(low, low * ratio)
    assert all(low <= tick <= low * ratio for tick in ticks)
    assert len(ticks) <= 12
    assert ratio < 4 or len(ticks) >= 3


def test_the_legend_names_landmarks_each_with_a_shape_of_its_own() -> None:
    found = models.recommendation()
    marks = tradeoff(models.job(), found)
    labels = [row["label"] for row in marks["datasets"]["landmarks"]]
    (shape,) = [layer["encoding"]["shape"] for layer in marks["layer"] if "shape" in layer["encoding"]]
    assert shape["scale"]["domain"] == labels
    assert len(set(shape["scale"]["range"])) == len(labels) > 1
    drawn = compiles(marks)
    assert all(f">{label}<" in drawn for label in labels)
