"""Tests that figures in the documents equal those in the reports they name, and recomputes those that take seconds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import cold_start
from tula_service.analysis.scaling import MOST_TIMES, LearningRate
from tula_wire import ModelSpec

ROOT = Path(__file__).parents[1]
BLIND = json.loads((ROOT / "benchmarks" / "results" / "blind" / "2026-11-26.json").read_text(encoding="utf-8"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.endswith("json` |")]
SHORT = README.split("| | Tula |")[1].split("\n\n")[0].splitlines()[2:]
KEYS: dict[str, tuple[str, ...]] = {
    "step time predicted before any run": ("factor cold.same.0.0.median",),
    "step time of unprofiled configurations: median": (
        "share regular.adaptive4.median",
        "share regular.adaptive6.median",
        "share regular.ring.median",
    ),
    "step time of unprofiled configurations: 90th": ("share regular.adaptive4.p90", "share regular.adaptive6.p90"),
    "step time on hard grids": (
        "share hard.adaptive4.median",
        "share hard.adaptive6.median",
        "share hard.ring.median",
    ),
    "step time on one H100": ("share regular.adaptive4.median", "share regular.adaptive6.median"),
    "step time from Pollux's form": ("share regular.planned6.pollux.median",),
    "additional time": ("share regret.time.mean", "share regret.time.largest.mean"),
    "additional cost": ("share regret.cost.mean", "share regret.cost.largest.mean"),
    "`balanced`, the default": (
        "ratio balanced.time_over_least.mean",
        "ratio balanced.cost_over_least.mean",
        "ratio time.time_over_least.mean",
        "ratio time.cost_over_least.mean",
    ),
    "mean additional time and cost": tuple(
        f"share noise.regret.{name}.mean{end}" for name in ("time", "cost") for end in ("", ".low", ".high")
    ),
    "share of measured times inside": ("share coverage.regular", "share coverage.hard", "share noise.coverage.chosen"),
    "choice of nodes": (
        "share options.regret.time.mean",
        "share options.regret.cost.mean",
        *(f"ratio options.{of}.{number}" for of in ("launches", "exhaustive") for number in ("one", "two", "five")),
    ),
    "effect of an option's value": ("share options.effect.one_launch.median", "share options.effect.end.median"),
    "step time on eight or more GPUs": ("share lessons.median_error", "share without.median_error"),
    "the largest batch that fits": tuple(
        f"share {of}.{error}" for of in ("ceiling", "ceiling.counted") for error in ("median", "worst")
    ),
    "memory of the largest batch": ("share memory.largest.median",),
    "accuracy lost by a large batch": (
        "share default.gap_recovered.mean",
        "ratio default.over_best_baseline.mean",
    ),
    "the agent's CPU": (
        "ratio agent.cpu_us_per_step",
        "ratio agent.thread_us_per_step",
        "ratio agent.thread_begin_us_per_step",
    ),
}
"""How each row's figures are printed, in their order, and their keys in the report of that row."""
PRINTED = {"share": lambda value: 100 * value, "ratio": float, "factor": lambda value: 1 + value}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:40])
def test_a_row_of_the_page_of_figures_prints_those_of_its_report(row: str) -> None:
    about, ours, blind, instead, report = (cell.strip() for cell in row.strip("|").split("|"))
    keys = next(keys for start, keys in KEYS.items() if about.startswith(start))
    stored = json.loads((ROOT / report.strip("`")).read_text(encoding="utf-8"))
    texts = figures_in(f"{ours} {instead}".replace("8-14 % in the paper", ""))
    assert len(texts) == len(keys)
    for cells, printed in ((texts, stored), (figures_in(blind), BLIND)):
        assert printed["commit"]
        assert printed["command"].startswith(("python -m benchmarks.", "python -m experiments."))
        for text, (kind, key) in zip(cells, (each.split() for each in keys), strict=False):
            digits = len(text.partition(".")[2])
            assert round(PRINTED[kind](printed[key]), digits) == float(text), key


def figures_in(cell: str) -> list[str]:
    """Return the numbers in a cell of the table, as written."""
    return re.findall(r"[\d.]+", cell)


def test_every_row_has_its_keys_and_every_key_its_row() -> None:
    assert len(ROWS) == len(KEYS)


def test_the_readme_has_some_of_these_rows() -> None:
    assert len(SHORT) >= 3
    assert all(any(row.startswith(short.rstrip("|")) for row in ROWS) for short in SHORT)


def test_the_first_guess_is_still_as_far_off_as_the_page_says() -> None:
    """Without earlier jobs, nothing is drawn at random, so one score is enough; other figures take minutes."""
    found = cold_start.score(cold_start.read(cold_start.TABLE), 0, 0, True, 1)
    assert f"| {1 + found['cold.same.0.0.median']:.2f} |" in PAGE


OPTIMIZERS = {"transformer": "adam"}
"""Of the networks of the experiment on gradient scaling; the others use SGD with momentum."""


def test_no_rule_that_is_recommended_was_clearly_worse_than_another_in_the_experiment() -> None:
    """The other rules are baselines, AGS, the unscaled rate, and rates tuned by hand on validation data."""
    stored = json.loads((ROOT / "experiments" / "generalization" / "results" / "quick.json").read_text())
    for row in stored["rows"]:
        _, network, batch = row["case"].split("@")[0].split("/")
        model = ModelSpec(name=network, optimizer=OPTIMIZERS.get(network, "momentum"))
        times = int(batch) / (16 if network == "transformer" else 64)
        assert LearningRate(model, 64, times, None).rule == "gain"
        assert times <= MOST_TIMES
        for other in row["methods"].keys() - {"small batch", "Tula default"}:
            lead, half = row["default_minus"][other]
            the_same = lead == half == 0.0  # the default is this rule in this case
            assert lead > -half or the_same, (row["case"], other)
