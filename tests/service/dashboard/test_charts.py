"""Tests that charts are valid Vega-Lite and show the data of their wire model."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import vl_convert
from hypothesis import given, settings
from hypothesis import strategies as st

import tula_wire as wire
from tests.service.dashboard import models
from tests.service.dashboard.drawing import compiles
from tula_service.dashboard.charts import candidates
from tula_service.dashboard.charts.accuracy import accuracy, accuracy_of_all, calibration
from tula_service.dashboard.charts.candidates import CANDIDATE_CHARTS
from tula_service.dashboard.charts.runs import RUN_CHARTS, QualityRun, drawn_columns, quality_chart, run_chart
from tula_service.dashboard.charts.vega import PALETTE, Spec, stacked
from tula_service.dashboard.format import configuration

GIB = 2**30
JOB_CHARTS = (*CANDIDATE_CHARTS, "accuracy")


def everything(job: wire.Job, found: wire.Recommendation) -> dict[str, Spec]:
    """Return all charts of a job."""
    drawn = {name: draw(job, found) for name, draw in CANDIDATE_CHARTS.items()}
    return drawn | {"accuracy": accuracy(job, models.ledger())}


@pytest.mark.parametrize("name", JOB_CHARTS)
def test_every_job_chart_is_drawn_by_vega(name: str) -> None:
    job = models.job(deadline_s=500.0, max_global_batch_size=2048)
    drawn = compiles(everything(job, models.recommendation())[name])
    assert "resnet50-cifar" in drawn
    assert drawn.count("<path") > 5


@pytest.mark.parametrize("name", RUN_CHARTS)
def test_every_run_chart_is_drawn_by_vega(name: str) -> None:
    found = {column: models.series(column) for column in drawn_columns(name)}
    drawn = compiles(run_chart(name, models.run(), found))
    assert "run_2" in drawn
    assert drawn.count("<path") > 3


@pytest.mark.parametrize("name", JOB_CHARTS)
def test_a_job_without_data_says_so_instead_of_drawing_nothing(name: str) -> None:
    job = models.job(plan=[])
    none = accuracy(job, wire.Ledger(entries=[]))
    spec = none if name == "accuracy" else CANDIDATE_CHARTS[name](job, models.recommendation([]))
    assert spec["usermeta"]["empty"] is True
    assert spec["usermeta"]["message"] in compiles(spec)


def test_a_run_without_the_column_says_which_it_waits_for() -> None:
    spec = run_chart("gradient", models.run(), {})
    assert "gradient_variability" in spec["usermeta"]["message"]


def test_cost_without_prices_is_explained() -> None:
    found = models.recommendation(models.grid(priced=False))
    cost = candidates.tradeoff(models.job(), found, quantity="cost")
    assert "no prices" in cost["usermeta"]["message"]


def test_memory_shows_the_ceiling_and_the_batch_that_ran_out() -> None:
    data = candidates.memory(models.job(), models.recommendation())["datasets"]
    assert [row["value"] for row in data["ceiling"]] == [pytest.approx(16)]
    assert [row["batch"] for row in data["crashes"]] == [512]
    assert [row["batch"] for row in data["curve"]] == [32, 64, 128, 256, 512]
    profiled = {c.configuration.local_batch_size for c in models.recommendation().candidates if c.profiled}
    assert {row["batch"] for row in data["curve"] if row["profiled"]} == profiled
    assert 0 < len(profiled) < 5


def test_memory_is_drawn_with_the_recommended_options_alone_and_with_the_first_values_where_none_is() -> None:
    def with_options(checkpointing: str, *candidates: wire.Candidate, **fields: object) -> list[wire.Candidate]:
        chosen = (("checkpointing", checkpointing),)
        return [
            c.model_copy(update={"configuration": replace(c.configuration, options=chosen), **fields})
            for c in candidates
        ]

    small, large = models.candidate(2, 32), models.candidate(2, 256)
    off, on = with_options("off", small, large, profiled=True), with_options("on", small, large, profiled=False)
    low = wire.Estimate(value=2**30, low=2**30, high=2**30)
    on = with_options("on", *on, memory_bytes=low)
    crashed = models.run("run_1", state="out_of_memory")
    crashed = crashed.model_copy(update={"configuration": off[1].configuration})
    job = models.job(plan=[crashed])
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"options": {"checkpointing": ["off", "on"]}})})
    for chosen, drawn, crashes in ((on[0], on, 0), (off[0], off, 1), (None, off, 1)):
        answer = models.recommendation([*off, *on]).model_copy(update={"chosen": chosen})
        data = candidates.memory(job, answer)["datasets"]
        assert [row["value"] * 2**30 for row in data["curve"]] == pytest.approx(
            [c.memory_bytes.value for c in drawn if c.memory_bytes is not None]
        )
        assert {row["profiled"] for row in data["curve"]} == {drawn[0].profiled}
        assert len(data["crashes"]) == crashes


def test_options_show_what_each_value_changes_and_which_was_launched() -> None:
    rows = candidates.options(models.job(), models.recommendation())["datasets"]["effects"]
    assert [(row["option"], row["against"], row["quantity"], row["launched"]) for row in rows] == [
        ("bf16", "fp32", "time", True),
        ("bf16", "fp32", "cost", True),
        ("bf16", "fp32", "memory", True),
        ("compiled", "not compiled", "time", False),
    ]
    assert [rows[0][end] for end in ("value", "low", "high")] == pytest.approx([-50.0, -55.0, -45.0])
    without = candidates.options(models.job(), models.recommendation().model_copy(update={"options": []}))
    assert "has no options" in without["usermeta"]["message"]


def test_the_parts_of_a_step_add_up_to_its_prediction() -> None:
    found = models.recommendation()
    rows = candidates.step_breakdown(models.job(), found)["datasets"]["parts"]
    assert found.chosen is not None
    first = [row["value"] for row in rows if row["place"] == 0]
    assert sum(first) / 1e3 == pytest.approx(found.chosen.step_time_s.value)


def test_candidates_are_named_in_full_above_their_bars_however_narrow_the_page() -> None:
    spec = candidates.step_breakdown(models.job(), models.recommendation())
    first = spec["datasets"]["labels"][0]
    assert (first["name"], first["landmarks"]) == ("8 nodes, global batch 1024 (local 128)", "recommended")
    for layer in spec["layer"]:
        assert layer["encoding"]["y"]["axis"] is None, "an axis would shorten its labels"
        assert "limit" not in layer["mark"]
    assert len(spec["datasets"]["labels"]) == len({row["place"] for row in spec["datasets"]["parts"]})


def test_a_part_of_a_stack_keeps_its_colour_whichever_others_are_there() -> None:
    parts = ("compute", "network", "input")
    rows = [{"part": part, "order": order, "value": 1.0} for order, part in enumerate(parts)]
    whole, less = (stacked(found, parts, "Time")["color"] for found in (rows, [rows[0], rows[2]]))
    colours = dict(zip(whole["scale"]["domain"], whole["scale"]["range"], strict=True))
    assert list(colours) == list(parts)
    assert less["scale"]["domain"] == ["compute", "input"]
    assert less["scale"]["range"] == [colours["compute"], colours["input"]]


def test_accuracy_counts_a_run_once_and_keeps_its_error() -> None:
    job = models.job(plan=[models.run("run_10"), models.run("run_3")])
    rows = accuracy(job, models.ledger())["datasets"]["runs"]
    assert [row["kind"] for row in rows] == ["inside the interval", "outside the interval", "no interval kept"]
    assert [row["error"] for row in rows] == pytest.approx([0.025, 0.3, 0.05])


def test_accuracy_counts_training_runs_and_says_why_there_are_none() -> None:
    none = wire.Ledger(entries=[])
    spec = accuracy(models.job(plan=[]), none, [models.run("run_9")])
    assert [row["error"] for row in spec["datasets"]["runs"]] == pytest.approx([0.05])
    early = models.run("run_1", predicted_step_time_s=None)
    spec = accuracy(models.job(plan=[early]), none)
    assert "No run with a prediction" in spec["usermeta"]["message"]


def test_calibration_says_how_often_intervals_of_every_width_held() -> None:
    entries = models.ledger().entries
    spec = calibration(entries)
    inside = {round(row["stated"], 2): row["inside"] for row in spec["datasets"]["levels"]}
    # 2.5 % off lies inside of a third of the intervals of +-10 % at 90 %, and 30 % off in none.
    assert (inside[0.3], inside[0.35], inside[0.95]) == (0, 0.5, 0.5)
    assert "2 runs" in compiles(spec)
    drawn = accuracy_of_all([("resnet50 on V100", entry) for entry in entries])["datasets"]["runs"]
    assert [row["error"] for row in drawn] == pytest.approx([0.025, 0.3])
    assert drawn[0]["configuration"].startswith("resnet50 on V100: 4 nodes")
    assert calibration([])["usermeta"]["empty"]


def test_a_trend_is_drawn_over_the_pale_series_it_sums_up() -> None:
    series, smooth = models.series("loss", points=1000, total=30_000), models.series("loss", points=150, total=30_000)
    spec = run_chart("loss", models.run(), {"loss": series}, {"loss": smooth})
    pale, line = spec["layer"][:2]
    assert (pale["data"]["name"], line["data"]["name"]) == ("loss", "loss_trend")
    assert pale["mark"]["opacity"] < line["mark"]["opacity"]
    assert "median of every 200 points" in spec["title"]["subtitle"]
    compiles(spec)


def test_a_thinned_series_says_how_many_points_there_were() -> None:
    spec = run_chart("loss", models.run(), {"loss": models.series("loss", points=1000, total=1_000_000)})
    assert "1,000 of 1,000,000" in spec["title"]["subtitle"]
    assert len(spec["datasets"]["loss"]) == 999, "all but the one without a value"


def test_a_value_at_every_tenth_step_is_drawn_as_a_line_with_its_points() -> None:
    """Vega-Lite draws no line between nulls, so the chart of a loss logged at every tenth step was once blank."""
    series = models.series("loss", points=120)
    sparse = series.model_copy(update={"values": [v if i % 10 == 5 else None for i, v in enumerate(series.values)]})
    spec = run_chart("loss", models.run(), {"loss": sparse})
    assert [row["step"] for row in spec["datasets"]["loss"]] == list(range(5, 120, 10))
    drawn = compiles(spec)
    (line,) = re.findall(r'aria-roledescription="line mark"[^>]* d="([^"]+)"', drawn)
    assert line.count("L") == 11
    assert drawn.count('aria-roledescription="point"') == 12


def test_any_column_is_drawn_by_its_name_and_on_a_logarithmic_axis() -> None:
    found = {"tokens_per_s": models.series("tokens_per_s", points=30, level=1e4)}
    spec = run_chart("tokens_per_s", models.run(), found, logarithmic=True)
    assert "tokens per s" in spec["title"]["text"]
    assert spec["layer"][0]["encoding"]["y"]["scale"]["type"] == "log"
    assert spec["usermeta"]["readout"] == [{"column": "tokens_per_s", "name": "tokens per s", "unit": ""}]
    compiles(spec)
    negative = {"reward": models.series("reward", points=30, level=-1.0)}
    spec = run_chart("reward", models.run(), negative, logarithmic=True)
    assert spec["layer"][0]["encoding"]["y"]["scale"]["type"] == "symlog"
    compiles(spec)


def test_runs_stand_side_by_side_over_epochs_or_steps() -> None:
    runs = [
        QualityRun(models.run(f"run_{method}", method=method), models.series("accuracy")) for method in ("lbt", "ags")
    ]
    runs.append(QualityRun(models.run("run_plain"), models.series("accuracy")))
    spec = quality_chart(models.job(), runs, logarithmic=True)
    assert {row["method"] for row in spec["datasets"]["runs"]} == {"lbt", "ags", "run_plain"}
    assert spec["encoding"]["x"]["field"] == "epoch"
    assert spec["transform"][1] == {"calculate": "(datum.step + 1) * datum.batch / 50000", "as": "epoch"}
    assert ">run_plain<" in compiles(spec)
    assert quality_chart(models.job(), runs, over="step")["encoding"]["x"]["field"] == "step"


def test_two_hundred_runs_are_thin_lines_drawn_as_pixels_without_a_legend_of_them_all() -> None:
    runs = [QualityRun(models.run(f"run_{at}"), models.series("loss", points=30)) for at in range(200)]
    spec = quality_chart(models.job(), runs)
    assert spec["usermeta"] == {"renderer": "canvas"}
    assert spec["encoding"]["color"]["legend"] is None
    assert compiles(spec).count('aria-roledescription="line mark"') == 200


@settings(max_examples=6, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 16]), st.sampled_from([1, 32, 48, 4096]), st.booleans(), st.booleans()),
        max_size=5,
    )
)
def test_any_set_of_candidates_is_drawn_and_none_is_invented(found: list[tuple[int, int, bool, bool]]) -> None:
    candidates = [
        models.candidate(nodes, local, priced=priced, excluded_by="it is too slow." if excluded else None)
        for nodes, local, priced, excluded in found
    ]
    for spec in everything(models.job(plan=[]), models.recommendation(candidates)).values():
        json.dumps(spec, allow_nan=False)
        vl_convert.vegalite_to_vega(spec)
        names = {configuration(candidate.configuration) for candidate in candidates}
        assert {row["configuration"] for row in spec["datasets"].get("candidates", [])} <= names


@pytest.mark.parametrize("ground", ["#ffffff", "#12181e"])
def test_every_series_colour_holds_three_to_one_on_both_grounds(ground: str) -> None:
    """WCAG 2.1 requires a contrast of 3:1 for graphical objects (1.4.11)."""
    for colour in PALETTE:
        assert contrast(colour, ground) >= 3.0, colour


def contrast(first: str, second: str) -> float:
    """Return the contrast ratio as WCAG 2.1 defines it."""
    lights = sorted((luminance(first), luminance(second)))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def luminance(colour: str) -> float:
    """Return the relative luminance as WCAG 2.1 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_runs_of_one_method_at_two_configurations_are_told_apart_in_the_legend() -> None:
    small, large = (models.run(f"run_{batch}", method="gain") for batch in (32, 64))
    other = replace(small.configuration, local_batch_size=2 * small.configuration.local_batch_size)
    runs = [
        QualityRun(run, models.series("accuracy")) for run in (small, large.model_copy(update={"configuration": other}))
    ]
    names = {row["method"] for row in quality_chart(models.job(), runs)["datasets"]["runs"]}
    assert names == {f"gain: {configuration(run.configuration)}" for run, _ in runs}
    assert len(names) == 2
