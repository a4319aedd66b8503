"""The trade-off curve: its points, bands, limits and landmarks, with labels that never cover each other."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tula_wire as wire
from tests.service.dashboard import models
from tests.service.dashboard.drawing import compiles
from tula_service.dashboard import charts
from tula_service.dashboard.charts.style import log_ticks


def test_tradeoff_holds_the_best_candidate_of_every_cluster_and_batch_with_its_interval() -> None:
    found = models.recommendation()
    slower = models.candidate(2, 64).model_copy(
        update={"configuration": wire.Configuration(num_nodes=2, local_batch_size=32, grad_accum_steps=2)}
    )
    slow = slower.model_copy(update={"total_time_s": wire.Estimate(value=1e6, low=9e5, high=2e6)})
    spec = charts.job_chart(
        "tradeoff", models.job(), found.model_copy(update={"candidates": [*found.candidates, slow]}), models.ledger()
    )
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
    marks = charts.job_chart("tradeoff", models.job(), same, models.ledger())["datasets"]["landmarks"]
    assert [mark["label"] for mark in marks] == ["recommended, least time"]


def test_no_knee_no_rule() -> None:
    with_knee = charts.job_chart("tradeoff", models.job(), models.recommendation(), models.ledger())
    without = charts.job_chart("tradeoff", models.job(), models.recommendation(knee=False), models.ledger())
    assert with_knee["datasets"]["rules"] == [{"batch": 900.0, "label": "knee", "place": 0}]
    assert without["datasets"]["rules"] == []
    assert len(without["layer"]) == len(with_knee["layer"]) - 3  # the rule, its label and the label's outline


def ruled(sensible: int | None, *, knee: float | None = 900.0) -> charts.Spec:
    """The trade-off where more than `sensible` examples hardly help a step and the knee is at `knee`."""
    found = models.recommendation(knee=knee is not None)
    changes = {"max_sensible_batch_size": sensible, "knee": found.knee.model_copy(update={"global_batch_size": knee})}
    return charts.job_chart("tradeoff", models.job(), found.model_copy(update=changes), models.ledger())


@pytest.mark.parametrize("sensible", [32, 700, 900, 1000, 1800, 4096])
def test_the_largest_sensible_batch_is_ruled_beside_the_knee_and_no_label_covers_another(sensible: int) -> None:
    spec = ruled(sensible)
    rules = {row["label"]: row for row in spec["datasets"]["rules"]}
    if sensible == 900:
        assert [(row["batch"], row["label"]) for row in rules.values()] == [(900.0, "knee, largest sensible batch")]
    else:
        assert {label: row["batch"] for label, row in rules.items()} == {
            "knee": 900,
            "largest sensible batch": sensible,
        }
    drawn = [
        (layer["mark"], row)
        for layer in spec["layer"]
        for row in spec["datasets"]["rules"]
        if layer.get("data") == {"name": "rules"}
        and layer["transform"] == [{"filter": f"datum.place === {row['place']}"}]
    ]
    assert sum(mark["type"] == "rule" for mark, _ in drawn) == len(rules)
    texts = [(mark, row) for mark, row in drawn if mark["type"] == "text" and "style" not in mark]
    boxes = [text_box(mark, row, frame=440.0) for mark, row in texts]
    for left, _, right, _ in boxes:
        assert 0 <= left < right <= 440
    for one, other in itertools.combinations(boxes, 2):
        assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
    assert "largest sensible batch" in compiles(spec)


def text_box(mark: charts.Spec, row: charts.Spec, *, frame: float) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of an italic label of 11 points in a frame of batches from 32 to 4096."""
    x = frame * math.log2(row["batch"] / 32) / math.log2(4096 / 32) + mark["dx"]
    wide = 5.5 * len(row["label"])
    return (
        (x - wide, mark["y"], x, mark["y"] + 12)
        if mark["align"] == "right"
        else (x, mark["y"], x + wide, mark["y"] + 12)
    )


def test_a_largest_sensible_batch_outside_the_frame_is_said_and_stretches_nothing() -> None:
    for outside in (8, 100_000):
        spec = ruled(outside)
        assert [row["label"] for row in spec["datasets"]["rules"]] == ["knee"]
        assert f"largest sensible batch {outside:,}" in spec["title"]["subtitle"]
    assert "sensible" not in ruled(None)["title"]["subtitle"]
    assert [row["label"] for row in ruled(700, knee=None)["datasets"]["rules"]] == ["largest sensible batch"]


def test_limits_are_shaded_only_where_they_bind() -> None:
    def shades(job: wire.Job) -> int:
        spec = charts.job_chart("tradeoff", job, models.recommendation(), models.ledger())
        return sum(layer["mark"]["type"] == "rect" for layer in spec["layer"])

    assert shades(models.job()) == 0
    assert shades(models.job(deadline_s=500.0)) == 1
    assert shades(models.job(deadline_s=500.0, max_global_batch_size=512)) == 2
    assert shades(models.job(deadline_s=3e8, max_global_batch_size=10**6)) == 0


def test_a_limit_outside_the_frame_shades_all_of_it_and_stretches_nothing() -> None:
    spec = charts.job_chart("tradeoff", models.job(deadline_s=1.0), models.recommendation(), models.ledger())
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
    spec = charts.job_chart(
        "tradeoff", models.job(), found.model_copy(update={"candidates": candidates}), models.ledger()
    )
    encoding = next(layer for layer in spec["layer"] if layer["mark"]["type"] == "line")["encoding"]
    names = encoding["color"]["scale"]["domain"]
    colours, dashes = encoding["color"]["scale"]["range"], encoding["strokeDash"]["scale"]["range"]
    assert len({(colour, tuple(dash)) for colour, dash in zip(colours, dashes, strict=True)}) == len(names) == 10
    assert colours[names.index("4 × p3")] == colours[names.index("4 × g5")]


@given(st.floats(1e-6, 1e9), st.floats(1.0001, 1e6))
def test_ticks_of_a_logarithmic_axis_are_few_round_and_inside(low: float, ratio: float) -> None:
    ticks = log_ticks(low, low * ratio)
    assert all(low <= tick <= low * ratio for tick in ticks)
    assert len(ticks) <= 12
    assert ratio < 4 or len(ticks) >= 3


def test_labels_of_landmarks_do_not_cover_each_other() -> None:
    found = models.recommendation()
    times = [wire.Estimate(value=value, low=value * 0.9, high=value * 1.1) for value in (400.0, 404.0, 408.0)]
    near = [models.candidate(4, 64, total_time_s=time) for time in times]
    close = found.model_copy(
        update={"chosen": near[0], "runner_up": near[1], "least_time": near[2], "least_cost": None}
    )
    marks = charts.job_chart("tradeoff", models.job(), close, models.ledger())["datasets"]["landmarks"]
    assert len(marks) == len({mark["place"] for mark in marks}) == 3


def test_labels_of_landmarks_at_the_edge_stay_inside_of_the_frame() -> None:
    """Beyond it, a phone drew the whole chart at half its width to make room for one label."""
    found = models.recommendation()
    times = [wire.Estimate(value=value, low=value * 0.9, high=value * 1.1) for value in (300.0, 300.4, 300.8)]
    near = [models.candidate(8, 512, total_time_s=time) for time in times]
    close = found.model_copy(
        update={"chosen": near[0], "runner_up": near[1], "least_time": near[2], "least_cost": None}
    )
    marks = charts.job_chart("tradeoff", models.job(), close, models.ledger())["datasets"]["landmarks"]
    assert {mark["batch"] for mark in marks} == {4096}
    assert {mark["place"] for mark in marks} <= {1, 3}, "left of the point, which stands at the right edge"
