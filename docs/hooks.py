"""Defines MkDocs hooks that list the routes and the client's calls on pages, and also publish each page as Markdown.

`python docs/hooks.py` writes the figures of the benchmarks' reports into `docs/paper.md`, and adds a comparison of our
experiments on gradient scaling with the paper's Table I.
"""

from __future__ import annotations

import csv
import inspect
import json
import re
import statistics
import tempfile
import textwrap
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

ROOT = Path(__file__).resolve().parents[1]
OPENAPI = "<!-- openapi -->"
MEASURED = ("<!-- measured -->\n", "<!-- end of measured -->")
COMPARED = ("<!-- compared -->\n", "<!-- end of compared -->")
STATIC = ("<!-- static -->\n", "<!-- end of static -->")
TRAINED = ("<!-- trained -->\n", "<!-- end of trained -->")
METHODS = ("<!-- methods of the client -->", "<!-- methods of a handle -->")

FIGURES: tuple[tuple[str, str, str], ...] = (
    ("Step time after four corners, default form: median error", "regular.partial.median", "7.5-14 % (two points)"),
    (
        "Step time after four corners, the paper's ring form: median error",
        "regular.ring.median",
        "7.5-14 % (two points)",
    ),
    (
        "Step time after two points, equation 2 as printed (ring): median error",
        "paper.regular.two_points.ring.median",
        "7.5-14 % (two points)",
    ),
    (
        "Step time after two points, default form: median error",
        "paper.regular.two_points.overlap.median",
        "7.5-14 % (two points)",
    ),
    (
        "Step time after full search (leave one out), equation 2 (ring): median error",
        "paper.regular.full.ring.median",
        "2-5 %",
    ),
    ("Step time after full search (leave one out): median error", "regular.full.median", "2-5 %"),
    ("Step time after 4 adaptive runs: median error", "regular.adaptive4.median", ""),
    ("Step time after 6 adaptive runs: median error", "regular.adaptive6.median", ""),
    ("Step time after 6 adaptive runs: 90th percentile of the errors over workloads", "regular.adaptive6.p90", ""),
    ("Pollux's step-time model after the same 6 runs: median error", "regular.planned6.pollux.median", ""),
    ("Step time on harder grids after four corners, default form: median error", "hard.partial.median", ""),
    ("Step time on harder grids after four corners, the paper's ring form: median error", "hard.ring.median", ""),
    ("Step time on harder grids after 6 adaptive runs: median error", "hard.adaptive6.median", ""),
    ("Share of measurements inside their 90 % intervals", "coverage.regular", ""),
    (
        "Real DDP on limited links, without process priority, after 6 adaptive runs: median error",
        "adaptive.median_error",
        "2-5 % (full)",
    ),
    ("Real DDP on limited links after partial search: median error", "partial.median_error", "7.5-14 % (two points)"),
    ("Time of these 6 adaptive runs as a share of the full search's time", "adaptive.profiling_fraction", ""),
    ("Mean regret of the largest cluster and batch for the objective `time`", "regret.time.largest.mean", ""),
    ("Mean regret of the choice for the objective `time`", "regret.time.mean", ""),
    ("Mean regret of the largest cluster and batch for the objective `cost`", "regret.cost.largest.mean", ""),
    ("Mean regret of the choice for the objective `cost`", "regret.cost.mean", ""),
    ("Mean regret of the choice of the number of nodes at a fixed global batch", "regret.best_num_nodes.mean", ""),
    ("Share of promised deadlines that were missed", "regret.deadline.violations", ""),
    ("Mean time of the balanced choice, relative to the shortest time", "balanced.time_over_least.mean", ""),
    ("Mean cost of the balanced choice, relative to the lowest cost", "balanced.cost_over_least.mean", ""),
    (
        "Mean time at Kneedle's knee of the curve of time over batch, relative to the shortest time",
        "kneedle.time_over_least.mean",
        "",
    ),
    ("First guess before any run, after one earlier job on the device: median error", "cold.same.1.0.median", ""),
    (
        "Memory at the largest batch, predicted from the two smallest batches: median error",
        "memory.largest.median",
        "8-14 %",
    ),
    (
        "Memory at the largest batch, predicted from the two smallest batches: 90th percentile of the errors",
        "memory.largest.p90",
        "",
    ),
    (
        "Time that the default gradient scaling spends measuring, as a share of a short CPU step",
        "overhead.fraction",
        "",
    ),
    ("Time to turn the updates of matrices, as a share of the same step", "overhead.direction_fraction", ""),
    ("Time to refresh the factors of AGS, as a share of the same step", "overhead.ags_refresh_fraction", ""),
    ("Mean accuracy gain of AGS over LBT in the cases with a gap (points)", "ags.over_lbt.mean", "+8.8 (12 cases)"),
)
"""Description of each figure, its key in a report, and the paper's figure."""
REPEATED: dict[str, str] = {
    "adaptive.median_error": "adaptive: median error",
    "partial.median_error": "partial: median error",
    "adaptive.profiling_fraction": "adaptive: share of the full search's node-seconds",
}
"""Figures that vary between runs, and their rows in the newest text on the cluster, which has three runs."""


def on_nav(nav: Any, config: Any, **_: Any) -> None:
    """Write `llms.txt` (llmstxt.org), which lists the Markdown of all pages, each with its first sentence."""
    lines, section = [f"# {config.site_name}", "", f"> {config.site_description}", ""], None
    for page in nav.pages:
        if page.parent is not section:
            section = page.parent
            lines += ["", f"## {section.title}", ""]
        address = urljoin(config.site_url or "", page.file.src_uri)
        lines.append(f"- [{page.title}]({address}){first_sentence(page.file.content_string)}")
    write(Path(config.site_dir, "llms.txt"), "\n".join(lines) + "\n")


def on_page_content(html: str, page: Any, config: Any, **_: Any) -> str:
    """Write the page's Markdown to `PAGE.md`, the target of links in the sources, and return the HTML unchanged."""
    write(Path(config.site_dir, page.file.src_uri), page.markdown)
    return html


def first_sentence(markdown: str) -> str:
    """Return a colon and the first sentence of a page without its links, or "" if no paragraph begins with text."""
    paragraph = next((part for part in markdown.split("\n\n") if re.match(r"[\w*`\[]", part)), "")
    text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", " ".join(paragraph.split()))
    return f": {re.split(r'(?<=[.?!]) ', text)[0].rstrip(':')}" if text else ""


def write(path: Path, text: str) -> None:
    """Write a file of the site, and create its folders if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page with its marks replaced by lists of routes and calls."""
    if OPENAPI in markdown:
        markdown = markdown.replace(OPENAPI, routes())
    if METHODS[0] in markdown:
        from tula_client import Client, JobHandle

        for mark, kind in zip(METHODS, (Client, JobHandle), strict=True):
            markdown = markdown.replace(mark, methods(*kind.__mro__))
    return markdown


def measured(root: Path) -> str:
    """Return a table of the figures in the newest reports, and the report that contains each figure.

    If a benchmark has several reports from one day, the report that covers more workloads (`NAME-72-grids`) is used.
    """
    found: dict[str, tuple[float, str]] = {}
    reports = (*(root / "benchmarks" / "results").glob("*.json"), *(root / "experiments").rglob("results/*.json"))
    for report in sorted(reports, key=lambda path: path.stem):
        figures = json.loads(report.read_text(encoding="utf-8"))
        for key, value in figures.items():
            if isinstance(value, float) and value == value:
                found[key] = (value, report.relative_to(root).as_posix())
    text = max((root / "benchmarks" / "results").glob("*-cluster.md")).read_text(encoding="utf-8")
    rows = [
        f"| {about} | {_formatted(about, found[key][0])}{_range(text, key, found[key][0])} | {paper} "
        f"| `{key}` in `{found[key][1]}` |"
        for about, key, paper in FIGURES
        if key in found
    ]
    return "| | measured | the paper | where |\n|---|---|---|---|\n" + "\n".join(rows)


RESULTS = ROOT / "experiments" / "generalization" / "results"
PAPERS = ("linear", "LARS", "post-local SGD")
"""Baselines of Table I other than the unchanged large batch."""
BASELINES = (*PAPERS, "linear, cut", "root", "Muon")
COLUMNS = ("small batch", "LBT", *BASELINES, "AGS", "Tula default")
NEAR = 0.5
"""Difference of accuracy, in percentage points, up to which two methods count as equal."""
FACTORS = ("2", "4", "8", "16")


def cases() -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the report of the experiments on gradient scaling, its SGD cases, and its AdamW cases."""
    stored: dict[str, Any] = json.loads((RESULTS / "quick.json").read_text(encoding="utf-8"))
    adam = [row for row in stored["rows"] if "/transformer/" in row["case"]]
    return stored, [row for row in stored["rows"] if row not in adam], adam


def compared() -> str:
    """Return two paragraphs on the differences between the experiments and Table I."""
    stored, sgd, _ = cases()
    ags, lbt = ([row["methods"][name] for row in sgd] for name in ("AGS", "LBT"))
    behind = [
        [each["mean"] - max(row["methods"][name]["mean"] for name in names) for each, row in zip(ags, sgd, strict=True)]
        for names in (BASELINES, PAPERS)
    ]
    below, above = (sum(sign * lead > NEAR for lead in behind[0]) for sign in (-1, 1))
    gains = [a["mean"] - b["mean"] for a, b in zip(ags, lbt, strict=True)]
    noisy = sum(gain <= max(a["sd"], b["sd"]) for gain, a, b in zip(gains, ags, lbt, strict=True))
    return paragraphs(
        f"**AGS compared with the best baseline.** In {below} of our {len(sgd)} SGD cases, AGS is more than {NEAR} "
        f"points below the best baseline; in {above} cases AGS is more than {NEAR} points above the best baseline. The "
        f"mean difference is {statistics.fmean(behind[0]):+.1f} points, or {statistics.fmean(behind[1]):+.1f} points "
        "if only the paper's three baselines count. In Table I, AGS is the best method in 7 of 12 rows, and on average "
        "0.08 points below the best other method.",
        f"**AGS compared with plain large batches (LBT).** The mean gain is {statistics.fmean(gains):+.1f} points over "
        f"our SGD cases ({stored['ags.over_lbt.mean']:+.1f} over the {stored['cases.gap']:.0f} cases in which the "
        "small batch is at least 2 points better than LBT), "
        f"and {stored['adam.ags.over_lbt.mean']:+.1f} under AdamW; over the paper's twelve cases, the mean gain is "
        f"+8.8 points. {noisy} of the {len(gains)} gains are no larger than the spread over seeds.",
    )


def trained() -> str:
    """Return our rows for Table I, and a paragraph on plain large batches, linear scaling and real DDP ranks."""
    stored, sgd, adam = cases()
    lines = [f"| ours, batch | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in (*sgd, *adam):
        means = {name: row["methods"][name]["mean"] for name in COLUMNS if name in row["methods"]}
        best = max(value for name, value in means.items() if name != COLUMNS[0])
        cells = [f"{means[name]:.1f}" if name in means else "-" for name in COLUMNS]
        cells = [f"**{cell}**" if means.get(name) == best else cell for name, cell in zip(COLUMNS, cells, strict=True)]
        lines.append(f"| {row['case'].partition('@')[0].replace('/', ', ')} | {' | '.join(cells)} |")
    worst = sum(min(COLUMNS[1:], key=lambda name: row["methods"][name]["mean"]) == "LBT" for row in sgd)
    linear = [row["methods"]["linear"]["mean"] - row["methods"]["LBT"]["mean"] for row in (*sgd, *adam)]
    real = {name: stored.get(f"real_ddp.{name}") for name in ("LBT", "AGS", "Tula default")}
    ranks = ", ".join(f"{name} {mean:.1f}" for name, mean in real.items() if mean is not None)
    text = paragraphs(
        f"The last row is a byte-level transformer with AdamW; the other rows are image networks with SGD. On four "
        f"real DDP ranks, the accuracies for vgg on digits at batch 256 are {ranks}. LBT is the worst method in "
        f"{worst} of our {len(sgd)} SGD rows; in the paper, some baseline is worse than LBT in every row. Linear "
        f"scaling differs from LBT by {min(linear[: len(sgd)]):+.1f} to {max(linear[: len(sgd)]):+.1f} points with SGD "
        f"and by {linear[-1]:+.1f} points with AdamW; in the paper, training with linear scaling fails on VGG11, and "
        "on MobileNetV3 at batches of 2048 and more."
    )
    return "\n".join(lines) + "\n\n" + text


def factors() -> str:
    """Return the table of static factors on our networks, and a comparison with the paper's figures 6 to 8."""
    table = [line for line in (RESULTS / "static.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    stored = json.loads((RESULTS / "static.json").read_text(encoding="utf-8"))
    with (RESULTS / "static-steps.csv").open(encoding="utf-8") as file:
        steps = list(csv.DictReader(file))
    shares = [value for key, value in stored.items() if ".0.5." in key and key.endswith("scaled_share")]
    text = [
        f"The cells contain the test accuracy in percent on digits at batch 256 (mean ± standard deviation of "
        f"{stored['seeds']} seeds), and the share of scaled steps, which is {100 * min(shares):.0f} to "
        f"{100 * max(shares):.0f} % at δ = 0.5."
    ]
    for network, theirs in (("residual", "every factor helps ResNet-50"), ("vgg", "only 2 helps AlexNet")):
        tests = {
            delta: [stored[f"static.{network}.{delta}.{factor}.test"] for factor in FACTORS]
            for delta in ("0.2", "0.5", "0.8")
        }
        lbt = stored[f"static.{network}.lbt.test"]
        helping = [factor for factor, test in zip(FACTORS, tests["0.5"], strict=True) if test > lbt + NEAR]
        against = {
            delta: ", ".join(f"{x - y:+.1f}" for x, y in zip(tests[delta], tests["0.5"], strict=True))
            for delta in ("0.2", "0.8")
        }
        usual, decay, other = at_decay([step for step in steps if step["network"] == network])
        text.append(
            f"**{network}.** Figure 7: among the factors {', '.join(FACTORS)}, the accuracy of the large batch "
            f"improves by more than {NEAR} points with {', '.join(helping) or 'none'} (in the paper, {theirs}). "
            f"Figure 8: compared with δ = 0.5, δ = 0.8 changes the accuracy at these factors by {against['0.8']} "
            f"points, and δ = 0.2 by {against['0.2']} points (in the paper, 0.8 harms ResNet-50 and 0.2 helps VGG11). "
            f"Figure 6: the largest variability is {decay / usual:.1f} times the usual value in the epoch of the first "
            f"learning-rate decay, and {other / usual:.1f} times in the epochs without a decay; the usual value is "
            "the median of the largest values of the three epochs before the decay."
        )
    return "\n".join(table) + "\n\n" + paragraphs(*text)


def at_decay(steps: list[dict[str, str]]) -> tuple[float, float, float]:
    """Return three values of an epoch's largest variability: the median of the three epochs before the first decay, the
    value of the epoch with that decay, and the maximum of the epochs without a decay.
    """
    largest: dict[int, float] = {}
    rates = {int(step["epoch"]): float(step["rate_factor"]) for step in steps}
    for step in steps:
        epoch = int(step["epoch"])
        largest[epoch] = max(largest.get(epoch, 0.0), float(step["variability"]))
    decays = [epoch for epoch, rate in rates.items() if rate < rates.get(epoch - 1, rate)]
    usual = statistics.median(largest[epoch] for epoch in range(decays[0] - 3, decays[0]))
    return usual, largest[decays[0]], max(value for epoch, value in largest.items() if epoch not in decays)


def paragraphs(*texts: str) -> str:
    """Return the texts as paragraphs, wrapped at the width of the documents."""
    return "\n\n".join(textwrap.fill(text, 120, break_on_hyphens=False) for text in texts)


def with_tables(page: str) -> str:
    """Return `docs/paper.md` with the texts and tables made from reports inserted between their marks."""
    parts = (
        (MEASURED, measured(ROOT)),
        (COMPARED, compared()),
        (TRAINED, trained()),
        (STATIC, factors()),
    )
    for (begin, end), table in parts:
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n{table}\n\n{end}{after}"
    return page


def routes() -> str:
    """Return Markdown tables of the routes, one for each tag."""
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
    head = "| route | description | query |\n|---|---|---|"
    return "\n\n".join(f"## {tag.capitalize()}\n\n{head}\n" + "\n".join(rows) for tag, rows in sorted(by_tag.items()))


def methods(*kinds: type) -> str:
    """Return a Markdown table of the calls that a class and its asynchronous counterpart share."""
    rows = []
    for name, member in {name: one for kind in kinds for name, one in vars(kind).items()}.items():
        if hasattr(member, "build"):
            signature = inspect.signature(member.build)
            parameters = list(signature.parameters.values())[1:]  # without the object
            arguments = re.sub(r"['\"]|wire\.", "", str(inspect.Signature(parameters)))
            answer = re.sub(r"^\w+\[|\]$|['\"]|wire\.", "", str(signature.return_annotation))
            description = " ".join((member.build.__doc__ or "").split())
            rows.append(f"| `{name}{arguments}` | {description} | `{answer}` |")
    return "| call | description | returns |\n|---|---|---|\n" + "\n".join(rows)


def _range(text: str, key: str, value: float) -> str:
    """Return the range over the three runs and the given value, or "" for a figure without repeated runs."""
    if key not in REPEATED:
        return ""
    row = next(line for line in text.splitlines() if line.startswith(f"| {REPEATED[key]} |"))
    values = [float(re.findall(r"[\d.]+", cell)[0]) for cell in row.strip("|").split("|")[3:]]
    return f" ({min(*values, 100 * value):.1f} to {max(*values, 100 * value):.1f} over runs)"


def _formatted(about: str, value: float) -> str:
    return f"{value:+.1f}" if "(points)" in about else f"{100 * value:.1f} %"


if __name__ == "__main__":
    PAPER = ROOT / "docs" / "paper.md"
    PAPER.write_text(with_tables(PAPER.read_text(encoding="utf-8")), encoding="utf-8")
