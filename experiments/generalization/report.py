"""Table, figures of merit and their spread from single runs; selects on validation data, reports on test data."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.generalization.methods import METHODS, SMALL
from experiments.generalization.train import Result

WIDE_GAP = 8.0  # points by which the small batch must lead before a method is judged by the gap it closes
ANY_GAP = 2.0  # for the share over all cases; below it that is a ratio of two noises


@dataclass(frozen=True)
class Cell:
    """Mean and standard deviation over seeds, percent; `chosen`: the tuned multiplier that validation selected."""

    mean: float
    sd: float
    validation: float
    diverged: int
    chosen: str = ""


@dataclass(frozen=True)
class CaseReport:
    """One row of the table."""

    name: str
    learning_rate: float
    cells: Mapping[str, Cell]

    def test(self, method: str) -> float:
        """Mean test accuracy of `method`, percent."""
        return self.cells[method].mean

    @property
    def gap(self) -> float:
        """Small batch over LBT, points."""
        return self.test(SMALL.name) - self.test("LBT")


def report_case(name: str, results: Sequence[Result]) -> CaseReport:
    """Summarise one case; the tuned multiplier (1 included) is the one of best mean validation accuracy."""
    by_method: dict[str, list[Result]] = {}
    for result in results:
        by_method.setdefault(result.method, []).append(result)
    cells = {method: _cell(runs) for method, runs in by_method.items()}
    # The root is a constant multiplier too, so its runs count for hand tuning as well.
    candidates = {m: c for m, c in cells.items() if m in ("LBT", "sqrt LR") or (m.startswith("x") and m[1:2].isdigit())}
    if len(candidates) > 1:
        best = max(candidates, key=lambda method: candidates[method].validation)
        chosen = candidates[best]
        cells["tuned"] = Cell(chosen.mean, chosen.sd, chosen.validation, chosen.diverged, best)
    return CaseReport(name, results[0].learning_rate, cells)


def _cell(runs: Sequence[Result]) -> Cell:
    tests = [run.test for run in runs]
    sd = statistics.stdev(tests) if len(tests) > 1 else 0.0
    validation = statistics.fmean(run.validation for run in runs)
    return Cell(statistics.fmean(tests), sd, validation, sum(run.diverged for run in runs))


def figures(reports: Sequence[CaseReport], *, default: str = "Tula default") -> dict[str, float]:
    """The figures of merit, points of test accuracy except `gap_recovered` (a share); NaN where no case qualifies."""
    baselines = [method.name for method in METHODS if method.role == "baseline"]
    wide = [report for report in reports if report.gap >= WIDE_GAP]
    gapped = [report for report in reports if report.gap >= ANY_GAP]
    over_best = [report.test(default) - max(report.test(name) for name in baselines) for report in reports]
    values = {
        "default.gap_recovered.mean": _mean([_recovered(report, default) for report in wide]),
        "default.gap_recovered_any.mean": _mean([_recovered(report, default) for report in gapped]),
        "default.over_best_baseline.mean": _mean(over_best),
        "default.over_best_baseline.min": min(over_best, default=math.nan),
        "default.over_tuned.mean": _mean([r.test(default) - r.test("tuned") for r in reports]),
        "default.diverged": float(sum(report.cells[default].diverged for report in reports)),
        "cases": float(len(reports)),
        "cases.wide_gap": float(len(wide)),
    }
    for key, name in (("faithful", "AGS tensor"), ("faithful_element", "AGS element")):
        over = [report.test(name) - report.test("LBT") for report in wide]
        values[f"{key}.over_lbt.mean"] = _mean(over)
        values[f"{key}.over_lbt.min"] = min(over, default=math.nan)
    return values


def _recovered(report: CaseReport, method: str) -> float:
    return (report.test(method) - report.test("LBT")) / report.gap


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def markdown(reports: Sequence[CaseReport], values: Mapping[str, float], *, seeds: int) -> str:
    """The paper's Table I in our setting: test accuracy in percent, mean and standard deviation over seeds."""
    present = {name for report in reports for name in report.cells}
    columns = [name for name in (SMALL.name, *(method.name for method in METHODS), "tuned") if name in present]
    lines = [
        f"Test accuracy, %, mean ± standard deviation of {seeds} seeds; `!` marks a divergence.",
        "",
        "| case | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for report in reports:
        cells = [_cell_text(report.cells.get(column)) for column in columns]
        lines.append(f"| {report.name} | " + " | ".join(cells) + " |")
    lines += ["", "| figure | value |", "|---|---|"]
    lines += [f"| `{key}` | {value:.2f} |" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def _cell_text(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    return (
        f"{cell.mean:.1f}±{cell.sd:.1f}" + ("!" if cell.diverged else "") + (f" ({cell.chosen})" if cell.chosen else "")
    )


def as_json(reports: Sequence[CaseReport], values: Mapping[str, float]) -> dict[str, Any]:
    """All of the report, for a file."""
    rows = [
        {
            "case": report.name,
            "learning_rate": report.learning_rate,
            "methods": {name: vars(cell) for name, cell in report.cells.items()},
        }
        for report in reports
    ]
    return {**{key: None if math.isnan(value) else value for key, value in values.items()}, "rows": rows}
