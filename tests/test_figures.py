"""The figures of the documents are those of the reports that they name, and the quick ones are computed again."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cold_start, objectives
from experiments.generalization.cases import MODES
from experiments.generalization.data import load
from experiments.generalization.networks import build
from tula_service.analysis.scaling import MOST_TIMES, scaling_rule
from tula_wire import ModelSpec

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.endswith("json` |")]
SHORT = README.split("| | Tula |")[1].split("\n\n")[0].splitlines()[2:]
KEYS: dict[str, tuple[str, ...]] = {
    "step time before any run": ("factor cold.same.0.0.median",),
    "step time of what was not profiled": (
        "share regular.adaptive4.median",
        "share regular.adaptive6.median",
        "share regular.ring.median",
    ),
    "the same on one H100": ("share regular.adaptive4.median", "share regular.adaptive6.median"),
    "the same, Pollux's form": ("share regular.planned6.pollux.median",),
    "time of the choice": ("share time.tula.regret.mean", "share time.bayes.regret.mean"),
    "cost of the choice": ("share cost.tula.regret.mean", "share cost.bayes.regret.mean"),
    "`balanced`, the default": (
        "ratio balanced.time_over_least.mean",
        "ratio balanced.cost_over_least.mean",
        "ratio time.time_over_least.mean",
        "ratio time.cost_over_least.mean",
    ),
    "runs with 3 % noise": tuple(
        f"share noise.regret.{name}.mean{end}" for name in ("time", "cost") for end in ("", ".low", ".high")
    ),
    "90 % intervals hold": ("share coverage.regular", "share coverage.hard", "share noise.coverage.chosen"),
    "step time on eight GPUs": ("share lessons.median_error", "share without.median_error"),
    "memory of the largest batch": ("share memory.largest.median",),
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
    about, ours, instead, report = (cell.strip() for cell in row.strip("|").split("|"))
    keys = next(keys for start, keys in KEYS.items() if about.startswith(start))
    stored = json.loads((ROOT / report.strip("`")).read_text(encoding="utf-8"))
    assert stored["commit"]
    assert stored["command"].startswith("python -m benchmarks.")
    texts = re.findall(r"[\d.]+", f"{ours} {instead}".replace("8-14 % in the paper", ""))
    assert len(texts) == len(keys)
    for text, (kind, key) in zip(texts, (each.split() for each in keys), strict=True):
        digits = len(text.partition(".")[2])
        assert round(PRINTED[kind](stored[key]), digits) == float(text), key


def git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


@pytest.mark.skipif(
    git("rev-parse", "--is-shallow-repository") != "false", reason="a shallow clone or an sdist has no history"
)
def test_the_commit_of_every_stored_report_is_in_the_history_or_has_a_successor_there() -> None:
    listed = (ROOT / "benchmarks" / "results" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| ([\w-]+) \|$", listed, re.M)
    successor = {(commit, report): after for commit, after, report in rows}
    history, used = git("rev-list", "HEAD").splitlines(), set()
    reports = [*(ROOT / "benchmarks").glob("results/*.json"), *(ROOT / "experiments").rglob("results/*.json")]
    for report in reports:
        commit = json.loads(report.read_text(encoding="utf-8"))["commit"]
        name = report.stem.removeprefix(report.stem[:11]) if report.stem[:2] == "20" else report.stem
        known = successor.get((commit, name), commit)
        assert any(each.startswith(known) for each in history), f"{report.name}: its commit {commit} is not in history"
        used |= {(commit, name)}
    assert successor.keys() <= used, "a row of a report that was run again"


PROMISES = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8").split("| promise |")[1].split("\n\n")[0]


@pytest.mark.parametrize("row", PROMISES.splitlines()[2:], ids=lambda row: row.split("|")[1].strip()[:40])
def test_a_promise_names_tests_that_exist_and_commands_that_try_more(row: str) -> None:
    _, breaks, tried = (cell.strip() for cell in row.strip("|").split("|"))
    tests = [ROOT / path for path in re.findall(r"`(tests/[\w/]+\.py)`", breaks)]
    assert tests
    assert all(path.is_file() for path in tests)
    for variable in re.findall(r"`(TULA_\w+)=", tried):
        assert any(variable in path.read_text(encoding="utf-8") for path in tests)
    for benchmark in re.findall(r"python -m benchmarks\.(\w+)", tried):
        assert (ROOT / "benchmarks" / f"{benchmark}.py").is_file()
    for commit in re.findall(r"at commit (\w+)", tried):
        assert git("cat-file", "-t", commit) in ("commit", ""), "'' without a history"


def test_every_row_has_its_keys_and_every_key_its_row() -> None:
    assert len(ROWS) == len(KEYS)


def test_the_readme_has_some_of_these_rows() -> None:
    assert len(SHORT) >= 3
    assert all(any(row.startswith(short.rstrip("|")) for row in ROWS) for short in SHORT)


def test_the_first_guess_is_still_as_far_off_as_the_page_says() -> None:
    """Without history nothing is drawn, so one draw tells; the other figures take minutes or other machines."""
    found = cold_start.score(cold_start.read(cold_start.TABLE), 0, 0, True, 1)
    assert f"| {1 + found['cold.same.0.0.median']:.2f} |" in PAGE


@pytest.mark.parametrize(("name", "count"), [("README.md", 4), ("docs/figures.md", 4), ("docs/pay-the-bill.md", 6)])
def test_the_table_of_objectives_is_that_of_its_report(name: str, count: int) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    stored = json.loads((ROOT / re.search(r"(benchmarks/results/\S+?objectives\S*?\.json)", page)[1]).read_text())  # type: ignore[index]
    rows = re.findall(r"^\| `(\w+)`[^|]*\| ([\d.]+), ([\d.]+) \| ([\d.]+), ([\d.]+) \|(.*)$", page, re.M)
    assert len(rows) == count
    for objective, *printed, rest in rows:
        keys = [f"{objective}.{what}_over_least.{part}" for what in ("time", "cost") for part in ("mean", "p90")]
        values = [stored[key] for key in keys]
        assert [f"{value:.3g}" if value >= 10 else f"{value:.2f}" for value in values] == printed
        dominated, place = stored[f"{objective}.dominated"], stored[f"{objective}.place"]
        assert rest in ("", f" {dominated:.0%} | {place:.2f} |".replace("%", " %"))


def test_the_page_for_those_who_pay_says_how_steady_the_answer_is_as_its_report_does() -> None:
    page = " ".join((ROOT / "docs" / "pay-the-bill.md").read_text(encoding="utf-8").split())
    stored = json.loads((ROOT / re.search(r"`(benchmarks/results/.+?\.json)`", page)[1]).read_text())  # type: ignore[index]
    shares = [100 * stored[f"{name}.dominated"] for name in ("balanced", "measured")]
    assert f"Of its answers {shares[0]:.1f} % have" in page
    assert f"than the noise, {shares[1]:.1f} % when" in page
    assert f"(place {stored['balanced.place']:.2f}," in page
    assert f"a factor of up to {stored['sensitivity.balanced.p90']:.2f} in nine of ten moves" in page
    assert f"with every step time known the factor is {stored['sensitivity.balanced.known.p90']:.2f}." in page
    assert f"changes as much, by {stored['sensitivity.balanced.least.p90']:.2f}," in page
    assert f"changes nothing ({stored['sensitivity.balanced.answer_kept.p90']:.2f})" in page
    assert f"of the answers of `time` {100 * stored['time.dominated']:.1f} % have one" in page
    allowed = {name: stored[f"sensitivity.{name}.allowed.p90"] for name in objectives.SENSITIVE}
    assert f"factor is {allowed['balanced']:.2f} for `balanced` and {allowed['time']:.2f} for `time`" in page
    truth = [allowed[f"balanced.{name}"] for name in ("known", "product", "least")]
    assert "it is {:.2f} by the rule, {:.2f} by the least time × cost and {:.2f} by the least".format(*truth) in page


def test_the_page_of_questions_states_the_cost_of_the_agent_as_its_report_does() -> None:
    page = " ".join((ROOT / "docs" / "faq.md").read_text(encoding="utf-8").split())
    stored = json.loads((ROOT / "benchmarks" / "results" / "2026-11-26-agent_overhead.json").read_text())
    assert f"training thread {stored['agent.cpu_us_per_step']:.0f} microseconds" in page
    share = stored["agent.thread_us_per_step"] / 1e6 / stored["step.time_s"]
    assert f"{stored['agent.thread_us_per_step']:.0f} microseconds a step, {share:.2%}".replace("%", " %") in page
    assert f"({stored['agent.thread_begin_us_per_step']:.0f} in a run's first half minute" in page
    assert f"{stored['agent.memory_bytes'] / 1e6:.0f} MB" in page


PAPER = " ".join((ROOT / "docs" / "paper.md").read_text(encoding="utf-8").split())
EXPERIMENTS = ROOT / "experiments" / "generalization" / "results"


@pytest.mark.parametrize(
    ("sentence", "report", "keys"),
    [
        ("they give {} % with the ring form as printed", "paper_search", ["paper.regular.two_points.ring.median"]),
        ("as printed and {} % with our form", "paper_search", ["paper.regular.two_points.overlap.median"]),
        ("profiles, give {} and {} %", "step_time", ["regular.ring.median", "regular.partial.median"]),
        ("the ring is {} % off", "paper_search", ["paper.regular.full.ring.median"]),
        ("and the server {} %", "paper_search", ["paper.regular.full.parameter_server.median"]),
        ("({} against {} %). Exposed", "step_time", ["hard.ring.median", "hard.partial.median"]),
        ("two points, equation 2 (ring): **{} %**", "paper_search", ["paper.regular.two_points.ring.median"]),
        ("full search with the same: **{} %**", "paper_search", ["paper.regular.full.ring.median"]),
        ("our form two points {} %, full", "paper_search", ["paper.regular.two_points.overlap.median"]),
        ("full {} %, inside its range", "step_time", ["regular.full.median"]),
        ("four corners {} and {} %", "step_time", ["regular.ring.median", "regular.partial.median"]),
        ("six planned runs {} %", "step_time", ["regular.adaptive6.median"]),
    ],
)
def test_a_share_in_the_text_on_the_paper_is_that_of_its_report(sentence: str, report: str, keys: list[str]) -> None:
    stored = newest(report)
    assert sentence.format(*(f"{100 * stored[key]:.1f}" for key in keys)) in PAPER


def newest(report: str) -> dict[str, float]:
    paths = sorted((ROOT / "benchmarks" / "results").glob(f"*-{report}-72-grids.json"))
    return json.loads(paths[-1].read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def test_speed_ups_beside_the_papers_are_those_of_their_report() -> None:
    stored = newest("paper_search")
    assert f"best batch is {stored['paper.speed_up.batch.median']:.1f} times faster than the smallest" in PAPER
    assert f"best of a public grid is {stored['paper.speed_up.smallest.median']:.1f} times faster, median" in PAPER


def test_accuracy_over_batch_beside_figure_2_is_that_of_its_report() -> None:
    rows = {row["case"].split("/")[1]: row["methods"] for row in quick()["rows"] if row["case"].startswith("glyphs/")}
    for network, said in (("vgg", "vgg on glyphs {} → {} %"), ("resnet20", "resnet20 {} → {} %")):
        assert said.format(*(f"{rows[network][name]['mean']:.1f}" for name in ("small batch", "LBT"))) in PAPER


def quick() -> dict[str, Any]:
    return json.loads((EXPERIMENTS / "quick.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def test_the_page_on_the_paper_says_how_large_our_networks_are() -> None:
    sizes = {}
    for case in MODES["quick"].cases:
        data = load(case.dataset, num_train=64)
        network = build(case.network, num_classes=data.num_classes, side=data.side)
        sizes[case.name] = sum(p.numel() for p in network.parameters())
    sized = [f"{size:,}".replace(",", " ") for size in (min(sizes.values()), max(sizes.values()))]
    assert f"on networks of {sized[0]} to {sized[1]} parameters" in PAPER
    language = next(case.name for case in MODES["quick"].cases if case.adam)
    assert f"transformer over bytes of {sizes[language]:,} parameters".replace(",", " ") in PAPER


def test_the_words_beside_figures_6_to_8_hold_in_their_report() -> None:
    """The figures are written by docs/hooks.py; these are the words beside them."""
    stored = json.loads((EXPERIMENTS / "static.json").read_text(encoding="utf-8"))

    def gain(network: str, delta: str, factor: int, over: str = "lbt") -> float:
        return float(stored[f"static.{network}.{delta}.{factor}.test"] - stored[f"static.{network}.{over}.test"])

    assert stored["variability.residual.spike"] < 1.0
    assert stored["variability.vgg.spike"] > 2.0
    assert all(gain(network, "0.5", factor) < 0.0 for network in ("residual", "vgg") for factor in (4, 8, 16))
    assert gain("vgg", "0.5", 2) > 0.0
    assert all(gain("vgg", "0.2", factor, f"0.5.{factor}") > 0.0 for factor in (4, 8))
    assert gain("residual", "0.8", 4, "0.5.4") > 0.0


def test_figures_of_other_tools_on_the_page_that_compares_are_those_of_the_report() -> None:
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8").split("## The same two jobs")[1]
    stored = json.loads((ROOT / re.search(r"`(benchmarks/results/.+?\.json)`", page)[1]).read_text())  # type: ignore[index]
    rows = [
        line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ") and "table" not in line
    ]
    assert {row[0] for row in rows} == {key.split(".")[0] for key in stored} - {"commit", "command"}
    for peer, version, *cells in rows:
        assert version == stored.get(f"{peer}.version", "-")
        assert cells == [
            ", ".join(f"{scale * stored[f'{peer}.{key}']:.{digits}f}" for key in keys if f"{peer}.{key}" in stored)
            or "-"
            for keys, scale, digits in COMPARED
        ]


COMPARED = (
    (("table.time_over_least.mean", "table.cost_over_least.mean"), 1, 2),
    (("table.within5",), 100, 0),
    (("table.runs",), 1, 1),
    (("script.time_over_least", "script.cost_over_least"), 1, 2),
    (("script.runs",), 1, 0),
    (("script.seconds",), 1, 0),
    (("lines",), 1, 0),
)
"""The columns of the table of other tools: keys, what they are multiplied with, digits."""


OPTIMIZERS = {"transformer": "adam"}
"""Of the networks of the experiment on gradient scaling; the others use SGD with momentum."""


def test_no_rule_that_is_recommended_was_clearly_worse_than_another_in_the_experiment() -> None:
    """Than any other rule: baselines, AGS, the unscaled rate and what was tuned by hand on validation data."""
    stored = json.loads((ROOT / "experiments" / "generalization" / "results" / "quick.json").read_text())
    for row in stored["rows"]:
        _, network, batch = row["case"].split("@")[0].split("/")
        model = ModelSpec(name=network, optimizer=OPTIMIZERS.get(network, "momentum"))
        times = int(batch) / (16 if network == "transformer" else 64)
        assert scaling_rule(model, times) == "gain"
        assert times <= MOST_TIMES
        for other in row["methods"].keys() - {"small batch", "Tula default"}:
            lead, half = row["default_minus"][other]
            assert lead > -half, (row["case"], other)


def test_the_table_of_scaling_rules_in_the_documents_is_that_of_the_report() -> None:
    page = (ROOT / "docs" / "gradient-scaling.md").read_text(encoding="utf-8")
    stored = json.loads((ROOT / "experiments" / "generalization" / "results" / "quick.json").read_text())
    lines = [
        line.replace("**", "") for line in page.split("| case, global batch |")[1].splitlines() if line[:2] == "| "
    ]
    columns = ["small batch", "LBT", "linear, cut", "root", "LARS", "AGS", "Tula default", "tuned"]
    for line, row in zip(lines[: len(stored["rows"])], stored["rows"], strict=True):
        means = [row["methods"][name]["mean"] if name in row["methods"] else None for name in columns]
        expected = ["-" if mean is None else f"{mean:.1f}" for mean in means]
        assert [cell.strip() for cell in line.strip("|").split("|")][1:-1] == expected
