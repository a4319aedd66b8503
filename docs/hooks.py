"""MkDocs hooks: pages list routes and calls as the application has them.

`python docs/hooks.py` writes into `docs/paper.md` the figures of the benchmarks' reports, and the first answers for the
paper's four networks.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OPENAPI = "<!-- openapi -->"
MEASURED = ("<!-- measured -->\n", "<!-- end of measured -->")
ANSWERED = ("<!-- answered -->\n", "<!-- end of answered -->")
METHODS = "<!-- methods of the client -->"

FIGURES: tuple[tuple[str, str, str], ...] = (
    ("Step time, four corners, the default form: median error", "regular.partial.median", "7.5-14 % (two points)"),
    ("The same with the paper's ring form", "regular.ring.median", "7.5-14 % (two points)"),
    ("Two points, equation 2 as printed (ring)", "paper.regular.two_points.ring.median", "7.5-14 % (two points)"),
    ("The same two points with the default form", "paper.regular.two_points.overlap.median", "7.5-14 % (two points)"),
    ("Full search (leave one out), equation 2 (ring): median error", "paper.regular.full.ring.median", "2-5 %"),
    ("Step time, full search (leave one out): median error", "regular.full.median", "2-5 %"),
    ("Step time, 4 adaptive runs: median error", "regular.adaptive4.median", ""),
    ("Step time, 6 adaptive runs: median error", "regular.adaptive6.median", ""),
    ("The same, 90th percentile over workloads", "regular.adaptive6.p90", ""),
    ("Pollux's step-time model on the same 6 runs: median error", "regular.planned6.pollux.median", ""),
    ("Step time, harder grids, four corners, the default form: median error", "hard.partial.median", ""),
    ("The same with the paper's ring form", "hard.ring.median", ""),
    ("Step time, harder grids, 6 adaptive runs: median error", "hard.adaptive6.median", ""),
    ("Share of measurements inside the 90 % interval", "coverage.regular", ""),
    ("Real DDP over limited links, 6 adaptive runs: median error", "adaptive.median_error", "2-5 % (full)"),
    ("The same with partial search", "partial.median_error", "7.5-14 % (two points)"),
    ("Share of the full search's time that those adaptive runs took", "adaptive.profiling_fraction", ""),
    ("Regret of taking the largest cluster and batch for least time, mean", "regret.time.largest.mean", ""),
    ("Regret of the least-time choice, mean", "regret.time.mean", ""),
    ("Regret of taking the largest for least cost, mean", "regret.cost.largest.mean", ""),
    ("Regret of the least-cost choice, mean", "regret.cost.mean", ""),
    ("Regret of the number of nodes at a fixed global batch, mean", "regret.best_num_nodes.mean", ""),
    ("Deadlines missed that were promised", "regret.deadline.violations", ""),
    ("Time of the balanced choice over the least, mean", "balanced.time_over_least.mean", ""),
    ("Cost of the balanced choice over the least, mean", "balanced.cost_over_least.mean", ""),
    ("Time of the knee over the least, mean", "knee.time_over_least.mean", ""),
    ("Time of Kneedle's knee (log-log) over the least, mean", "kneedle.time_over_least.mean", ""),
    ("First guess before any run, one earlier job on the device: off by, median", "cold.same.1.0.median", ""),
    ("Memory, largest batch from the two smallest: median error", "memory.largest.median", "8-14 %"),
    ("The same, 90th percentile", "memory.largest.p90", ""),
    ("Default gradient scaling in DDP: share of step time", "overhead.fraction", ""),
    ("Refresh of AGS: share of the step on which it happens", "overhead.ags_refresh_fraction", ""),
    (
        "AGS as printed over LBT, mean of 4 cases (points)",
        "ags.over_lbt.mean",
        "+8.8 (12 cases)",
    ),
)
"""What it is, its key in a report, and what the paper says of it."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marks; every other page stays as it is."""
    if OPENAPI in markdown:
        markdown = markdown.replace(OPENAPI, routes())
    if METHODS in markdown:
        markdown = markdown.replace(METHODS, methods())
    return markdown


def measured(root: Path) -> str:
    """Figures of the newest reports, each with its report; of one day's, that over more workloads (`NAME-72-grids`)."""
    found: dict[str, tuple[float, str]] = {}
    reports = (*(root / "benchmarks" / "results").glob("*.json"), *(root / "experiments").rglob("results/*.json"))
    for report in sorted(reports, key=lambda path: path.stem):
        figures = json.loads(report.read_text(encoding="utf-8"))
        for key, value in figures.items():
            if isinstance(value, float) and value == value:
                found[key] = (value, report.relative_to(root).as_posix())
    rows = [
        f"| {about} | {_formatted(about, found[key][0])} | {paper} | `{key}` in `{found[key][1]}` |"
        for about, key, paper in FIGURES
        if key in found
    ]
    return "| | measured | the paper | where |\n|---|---|---|---|\n" + "\n".join(rows)


def answered() -> str:
    """The service's first answers for the paper's four networks, beside the paper's."""
    if str(ROOT) not in sys.path:  # a script's path begins with its folder
        sys.path.append(str(ROOT))
    from benchmarks.paper_answers import HEADER, rows

    lines = (" | ".join(cells) for cells in (HEADER, ["---"] * len(HEADER), *rows()))
    return "\n".join(f"| {line} |" for line in lines)


def with_tables(page: str) -> str:
    """`docs/paper.md` with the newest figures and the first answers, each between its two marks."""
    for (begin, end), table in ((MEASURED, measured(ROOT)), (ANSWERED, answered())):
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n{table}\n\n{end}{after}"
    return page


def routes() -> str:
    """Routes by tag, as Markdown."""
    from tula_service.api.docs import document
    from tula_service.app import create_app
    from tula_service.settings import Settings
    from tula_service.store import Store
    from tula_service.store.migrations import upgrade_schema

    with tempfile.TemporaryDirectory() as folder:
        database = str(Path(folder) / "tula.db")
        store = Store.open(database)
        upgrade_schema(store.engine)
        store.close()
        app = create_app(Settings(database=database))
        paths = document(app)["paths"]
        app.state.services.store.close()
    by_tag: dict[str, list[str]] = {}
    for path, operations in paths.items():
        for method, operation in operations.items():
            description = " ".join(str(operation.get("description", "")).split())
            query = ", ".join(f"`{each['name']}`" for each in operation.get("parameters", []) if each["in"] == "query")
            row = f"| `{method.upper()} {path}` | {description} | {query} |"
            by_tag.setdefault(operation.get("tags", ["other"])[0], []).append(row)
    head = "| route | does | query |\n|---|---|---|"
    return "\n\n".join(f"## {tag.capitalize()}\n\n{head}\n" + "\n".join(rows) for tag, rows in sorted(by_tag.items()))


def methods() -> str:
    """The calls of `Client` and `AsyncClient`, which share their names, arguments and answers, as Markdown."""
    from tula_client import Client, _calls

    rows = []
    for name, build in vars(_calls).items():
        if inspect.isfunction(build) and hasattr(Client, name):
            signature = inspect.signature(build)
            arguments = re.sub(r"['\"]", "", str(signature.replace(return_annotation=signature.empty)))
            answer = re.sub(r"^Call\[(.*)\]$", r"\1", str(signature.return_annotation).strip("'\""))
            description = " ".join((build.__doc__ or "").split())
            rows.append(f"| `{name}{arguments}` | {description} | `{answer}` |")
    return "| call | does | answers |\n|---|---|---|\n" + "\n".join(rows)


def _formatted(about: str, value: float) -> str:
    return f"{value:+.1f}" if "(points)" in about else f"{100 * value:.1f} %"


if __name__ == "__main__":
    PAPER = ROOT / "docs" / "paper.md"
    PAPER.write_text(with_tables(PAPER.read_text(encoding="utf-8")), encoding="utf-8")
