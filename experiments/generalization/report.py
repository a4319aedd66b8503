"""Writes tables and figures of merit from the results of runs; choices use validation data, results use test data."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from scipy.stats import t as student

from experiments.generalization.cases import CHOSEN
from experiments.generalization.methods import ADAM_METHODS, METHODS, SMALL
from experiments.generalization.train import Result

WIDE_GAP = 8.0  # points by which the small batch is better
ANY_GAP = 2.0  # with a smaller gap, a share of it is only noise divided by noise
DEFAULT = "Tula default"
NAMES = tuple(dict.fromkeys([SMALL.name, *(m.name for m in (*METHODS, *ADAM_METHODS)), "tuned"]))


@dataclass(frozen=True)
class Cell:
    """Accuracies in percent: `tests` has one accuracy per seed; `chosen` is the multiplier tuned on validation data."""

    tests: Mapping[int, float]
    mean: float
    sd: float
    validation: float
    diverged: int
    chosen: str = ""


class Interval(NamedTuple):
    """A mean difference and half the width of its 95 % interval (NaN with one seed), in points."""

    mean: float
    half: float


@dataclass(frozen=True)
class CaseReport:
    """The data of one row of the table."""

    name: str
    learning_rate: float
    cells: Mapping[str, Cell]

    @property
    def adam(self) -> bool:
        """Return True if the case is trained with AdamW."""
        return "/transformer/" in self.name

    def test(self, method: str) -> float:
        """Return the mean test accuracy of `method` in percent."""
        return self.cells[method].mean

    @property
    def gap(self) -> float:
        """Return the accuracy of the small batch minus that of LBT, in points."""
        return self.test(SMALL.name) - self.test("LBT")

    def paired(self, method: str, other: str) -> Interval:
        """Return the accuracy of `method` minus that of `other`, paired by seed, with Student's 95 % interval."""
        ours, theirs = self.cells[method].tests, self.cells[other].tests
        differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
        count = len(differences)
        if count < 2:
            return Interval(_mean(differences), math.nan)
        half = float(student.ppf(0.975, count - 1)) * statistics.stdev(differences) / math.sqrt(count)
        return Interval(_mean(differences), half)


def report_case(name: str, results: Sequence[Result]) -> CaseReport:
    """Summarise one case; `tuned` is the multiplier (possibly 1) with the best mean validation accuracy."""
    by_method: dict[str, list[Result]] = {}
    for result in results:
        by_method.setdefault(result.method, []).append(result)
    cells = {method: _cell(runs) for method, runs in by_method.items()}
    # The root and the linear rule are constant multipliers, too, so their runs are included in tuning by hand.
    constant = {"LBT", "root", "linear", "linear, cut"}
    candidates = {m: c for m, c in cells.items() if m in constant or (m.startswith("x") and m[1:2].isdigit())}
    if len(candidates) > 1:
        best = max(candidates, key=lambda method: candidates[method].validation)
        cells["tuned"] = replace(candidates[best], chosen=best)
    return CaseReport(name, results[0].learning_rate, cells)


def _cell(runs: Sequence[Result]) -> Cell:
    tests = [run.test for run in runs]
    sd = statistics.stdev(tests) if len(tests) > 1 else 0.0
    validation = statistics.fmean(run.validation for run in runs)
    by_seed = {run.seed: run.test for run in runs}
    return Cell(by_seed, statistics.fmean(tests), sd, validation, sum(run.diverged for run in runs))


def figures(reports: Sequence[CaseReport]) -> dict[str, float]:
    """Return the figures of merit over cases with a gap of at least ANY_GAP, in points of test accuracy.

    `gap_recovered` is a share; its key `.wide` covers cases with a gap of at least WIDE_GAP. Keys with `adam.` cover
    the cases with AdamW, and all others the cases with SGD. A figure is NaN if no case qualifies.
    """
    values: dict[str, float] = {}
    for prefix, adam in (("", False), ("adam.", True)):
        of_kind = [report for report in reports if report.adam == adam]
        gapped = [report for report in of_kind if report.gap >= ANY_GAP]
        over_best = [over_best_baseline(report).mean for report in gapped]
        wide = [_recovered(report) for report in gapped if report.gap >= WIDE_GAP]
        values |= {
            f"{prefix}default.gap_recovered.mean": _mean([_recovered(report) for report in gapped]),
            f"{prefix}default.gap_recovered.wide": _mean(wide),
            f"{prefix}default.over_best_baseline.mean": _mean(over_best),
            f"{prefix}default.over_best_baseline.min": min(over_best, default=math.nan),
            f"{prefix}default.over_best_rule.min": min([over_best_rule(r).mean for r in gapped], default=math.nan),
            f"{prefix}default.over_tuned.mean": _mean([r.paired(DEFAULT, "tuned").mean for r in gapped]),
            f"{prefix}default.diverged": float(sum(report.cells[DEFAULT].diverged for report in of_kind)),
            f"{prefix}ags.over_lbt.mean": _mean([r.paired("AGS", "LBT").mean for r in gapped]),
            f"{prefix}ags.over_lbt.min": min([r.paired("AGS", "LBT").mean for r in gapped], default=math.nan),
            f"{prefix}cases": float(len(of_kind)),
            f"{prefix}cases.gap": float(len(gapped)),
        }
    return values


def over_best_baseline(report: CaseReport) -> Interval:
    """Compare the default with the baseline that has the best mean test accuracy, which no user can know in advance."""
    baselines = {m.name for m in (ADAM_METHODS if report.adam else METHODS) if m.role == "baseline"}
    best = max(baselines & report.cells.keys(), key=report.test)
    return report.paired(DEFAULT, best)


def over_best_rule(report: CaseReport) -> Interval:
    """Compare the default with the best other rule, including the unscaled rate, AGS and the rule tuned by hand."""
    best = max(report.cells.keys() - {DEFAULT, SMALL.name}, key=report.test)
    return report.paired(DEFAULT, best)


def _recovered(report: CaseReport) -> float:
    return (report.test(DEFAULT) - report.test("LBT")) / report.gap


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def markdown(
    reports: Sequence[CaseReport], upper: Sequence[CaseReport], values: Mapping[str, float], *, seeds: int
) -> str:
    """Return a table like the paper's Table I, the default's paired differences, and both at the upper base rates."""
    lines = [f"Cases, grids and methods were fixed on {CHOSEN}, before any of them had been run in this form.", ""]
    lines += _tables(reports, f"{seeds} seeds, base rate of best validation accuracy")
    if upper:
        lines += _tables(upper, "base rate at the upper end of the flat optimum, if it differs")
    lines += ["| figure | value |", "|---|---|"]
    lines += [f"| `{key}` | {value:.2f} |" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def _tables(reports: Sequence[CaseReport], title: str) -> list[str]:
    present = {name for report in reports for name in report.cells}
    columns = [name for name in NAMES if name in present]
    others = [name for name in columns if name != DEFAULT]
    lines = [f"Test accuracy, %, mean ± standard deviation ({title}); `!` marks a divergence.", ""]
    lines += ["| case (base rate) | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for report in reports:
        cells = [_cell_text(report.cells.get(column)) for column in columns]
        lines.append(f"| {report.name} ({report.learning_rate:g}) | " + " | ".join(cells) + " |")
    lines += ["", f"{DEFAULT} minus each other method, in points, paired by seed, ± half of the 95 % interval.", ""]
    lines += ["| case | " + " | ".join(others) + " |", "|---" * (len(others) + 1) + "|"]
    for report in reports:
        found = [report.paired(DEFAULT, name) if name in report.cells else None for name in others]
        row = ["-" if x is None else f"{x.mean:+.1f}±{x.half:.1f}" for x in found]
        lines.append(f"| {report.name} | " + " | ".join(row) + " |")
    return [*lines, ""]


def _cell_text(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    chosen = f" ({cell.chosen})" if cell.chosen else ""
    return f"{cell.mean:.1f}±{cell.sd:.1f}" + ("!" if cell.diverged else "") + chosen


def as_json(reports: Sequence[CaseReport], upper: Sequence[CaseReport], values: Mapping[str, float]) -> dict[str, Any]:
    """Return the whole report as the content of a JSON file."""
    known = {key: None if math.isnan(value) else value for key, value in values.items()}
    return {**known, "chosen": CHOSEN, "rows": _rows(reports), "rows_at_upper_rate": _rows(upper)}


def _rows(reports: Sequence[CaseReport]) -> list[dict[str, Any]]:
    return [
        {
            "case": report.name,
            "learning_rate": report.learning_rate,
            "methods": {name: vars(cell) for name, cell in report.cells.items()},
            "default_minus": {
                name: [None if math.isnan(x) else x for x in report.paired(DEFAULT, name)] for name in report.cells
            },
        }
        for report in reports
    ]
