"""MkDocs hooks: pages list routes and calls as the application has them, and exist as Markdown for language models.

`python docs/hooks.py` writes into `docs/paper.md` the figures of the benchmarks' reports, and how the report of the
experiments on gradient scaling compares with Table I.
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
    ("Real DDP, limited links, no priority, 6 adaptive runs: median error", "adaptive.median_error", "2-5 % (full)"),
    ("The same with partial search", "partial.median_error", "7.5-14 % (two points)"),
    ("Share of the full search's time that those adaptive runs took", "adaptive.profiling_fraction", ""),
    ("Regret of taking the largest cluster and batch for least time, mean", "regret.time.largest.mean", ""),
    ("Regret of the least-time choice, mean", "regret.time.mean", ""),
    ("Regret of taking the largest for least cost, mean", "regret.cost.largest.mean", ""),
    ("Regret of the least-cost choice, mean", "regret.cost.mean", ""),
    ("Regret of the number of nodes at a fixed global batch, mean", "regret.best_num_nodes.mean", ""),
    ("Promised deadlines that were missed", "regret.deadline.violations", ""),
    ("Time of the balanced choice over the least, mean", "balanced.time_over_least.mean", ""),
    ("Cost of the balanced choice over the least, mean", "balanced.cost_over_least.mean", ""),
    ("Time of Kneedle's knee on time over batch over the least, mean", "kneedle.time_over_least.mean", ""),
    ("First guess before any run, one earlier job on the device: off by, median", "cold.same.1.0.median", ""),
    ("Memory, largest batch from the two smallest: median error", "memory.largest.median", "8-14 %"),
    ("The same, 90th percentile", "memory.largest.p90", ""),
    ("Measuring for the default gradient scaling: share of a short CPU step", "overhead.fraction", ""),
    ("Turning the updates of matrices: share of the same step", "overhead.direction_fraction", ""),
    ("Refresh of AGS: share of the step on which it happens", "overhead.ags_refresh_fraction", ""),
    ("AGS over LBT, mean of the cases with a gap (points)", "ags.over_lbt.mean", "+8.8 (12 cases)"),
)
"""What it is, its key in a report, and what the paper says of it."""
REPEATED: dict[str, str] = {
    "adaptive.median_error": "adaptive: median error",
    "partial.median_error": "partial: median error",
    "adaptive.profiling_fraction": "adaptive: share of the full search's node-seconds",
}
"""Figures of which one run says little: their rows in the newest text on the cluster, which has three runs."""


def on_nav(nav: Any, config: Any, **_: Any) -> None:
    """Write `llms.txt` (llmstxt.org): all pages of the navigation as Markdown, each with its first sentence."""
    lines, section = [f"# {config.site_name}", "", f"> {config.site_description}", ""], None
    for page in nav.pages:
        if page.parent is not section:
            section = page.parent
            lines += ["", f"## {section.title}", ""]
        address = urljoin(config.site_url or "", page.file.src_uri)
        lines.append(f"- [{page.title}]({address}){first_sentence(page.file.content_string)}")
    write(Path(config.site_dir, "llms.txt"), "\n".join(lines) + "\n")


def on_page_content(html: str, page: Any, config: Any, **_: Any) -> str:
    """Write the page's Markdown to `PAGE.md`, where the links among the sources lead; the page stays as it is."""
    write(Path(config.site_dir, page.file.src_uri), page.markdown)
    return html


def first_sentence(markdown: str) -> str:
    """The first sentence of a page's text after a colon, without links; nothing for a page that begins otherwise."""
    paragraph = next((part for part in markdown.split("\n\n") if re.match(r"[\w*`\[]", part)), "")
    text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", " ".join(paragraph.split()))
    return f": {re.split(r'(?<=[.?!]) ', text)[0].rstrip(':')}" if text else ""


def write(path: Path, text: str) -> None:
    """Write a file of the site, in folders that may not exist yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marks; every other page stays as it is."""
    if OPENAPI in markdown:
        markdown = markdown.replace(OPENAPI, routes())
    if METHODS[0] in markdown:
        from tula_client import Client, JobHandle

        for mark, kind in zip(METHODS, (Client, JobHandle), strict=True):
            markdown = markdown.replace(mark, methods(*kind.__mro__))
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
"""The baselines of Table I beside the unchanged large batch."""
BASELINES = (*PAPERS, "linear, cut", "root", "Muon")
COLUMNS = ("small batch", "LBT", *BASELINES, "AGS", "Tula default")
NEAR = 0.5
"""Points of accuracy within which two methods count as equal."""
FACTORS = ("2", "4", "8", "16")


def cases() -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """The report of the experiments on gradient scaling, and its cases of SGD and of AdamW."""
    stored: dict[str, Any] = json.loads((RESULTS / "quick.json").read_text(encoding="utf-8"))
    adam = [row for row in stored["rows"] if "/transformer/" in row["case"]]
    return stored, [row for row in stored["rows"] if row not in adam], adam


def compared() -> str:
    """Where the experiments and Table I differ, in two paragraphs."""
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
        f"**AGS against the best baseline.** In {below} of our {len(sgd)} SGD cases, AGS is more than {NEAR} points "
        f"below the best baseline; in {above} it is more than {NEAR} points above it. The mean difference is "
        f"{statistics.fmean(behind[0]):+.1f} points, and {statistics.fmean(behind[1]):+.1f} if only the paper's three "
        "baselines count. In Table I, AGS is the best method in 7 of 12 rows, and 0.08 points below the best other "
        "method on average.",
        f"**Its gain over plain large batches (LBT)** is {statistics.fmean(gains):+.1f} points over these cases "
        f"({stored['ags.over_lbt.mean']:+.1f} over the {stored['cases.gap']:.0f} in which the small batch leads LBT by "
        f"2 points, {stored['adam.ags.over_lbt.mean']:+.1f} under AdamW), against +8.8 over the paper's twelve. "
        f"{noisy} of the {len(gains)} gains are no larger than the spread over seeds.",
    )


def trained() -> str:
    """Our rows of Table I, and what they say of the plain large batch, of linear scaling and of real ranks."""
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
        f"The last row is a transformer over bytes under AdamW; the others are image networks under SGD. On four real "
        f"DDP ranks digits, vgg, 256 gives {ranks}. LBT is the worst of {worst} of the {len(sgd)} rows of SGD; in the "
        f"paper a baseline is below it in every row. Linear scaling differs from LBT by {min(linear[: len(sgd)]):+.1f} "
        f"to {max(linear[: len(sgd)]):+.1f} points under SGD and by {linear[-1]:+.1f} under AdamW; in the paper it "
        "collapses on VGG11, and on MobileNetV3 from 2048."
    )
    return "\n".join(lines) + "\n\n" + text


def factors() -> str:
    """Figures 6 to 8 on our networks: the table of static factors, and what it says beside the paper."""
    table = [line for line in (RESULTS / "static.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    stored = json.loads((RESULTS / "static.json").read_text(encoding="utf-8"))
    with (RESULTS / "static-steps.csv").open(encoding="utf-8") as file:
        steps = list(csv.DictReader(file))
    shares = [value for key, value in stored.items() if ".0.5." in key and key.endswith("scaled_share")]
    text = [
        f"Test accuracy in percent on digits at batch 256, mean ± standard deviation of {stored['seeds']} seeds; share "
        f"of scaled steps, which is {100 * min(shares):.0f} to {100 * max(shares):.0f} % at δ = 0.5."
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
            f"**{network}.** Figure 7: the factors that improve on the large batch alone by more than {NEAR} points "
            f"are {', '.join(helping) or 'none'} (of {', '.join(FACTORS)}; the paper: {theirs}). Figure 8: at each "
            "factor, "
            f"δ = 0.8 against 0.5 gives {against['0.8']} points and δ = 0.2 {against['0.2']} (0.8 hurts ResNet-50, 0.2 "
            "helps VGG11). Figure 6: in the epoch of the first decay of the rate the variability reaches "
            f"{decay / usual:.1f} times what is usual in the three epochs before; in the epochs without a decay it "
            f"reaches {other / usual:.1f} times that."
        )
    return "\n".join(table) + "\n\n" + paragraphs(*text)


def at_decay(steps: list[dict[str, str]]) -> tuple[float, float, float]:
    """Largest variability of an epoch: median of the three before the first decay, in it, and the most without one."""
    largest: dict[int, float] = {}
    rates = {int(step["epoch"]): float(step["rate_factor"]) for step in steps}
    for step in steps:
        epoch = int(step["epoch"])
        largest[epoch] = max(largest.get(epoch, 0.0), float(step["variability"]))
    decays = [epoch for epoch, rate in rates.items() if rate < rates.get(epoch - 1, rate)]
    usual = statistics.median(largest[epoch] for epoch in range(decays[0] - 3, decays[0]))
    return usual, largest[decays[0]], max(value for epoch, value in largest.items() if epoch not in decays)


def paragraphs(*texts: str) -> str:
    """Each text in lines of the width of the documents."""
    return "\n\n".join(textwrap.fill(text, 120, break_on_hyphens=False) for text in texts)


def with_tables(page: str) -> str:
    """`docs/paper.md` with everything that is written from reports, each part between its two marks."""
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


def methods(*kinds: type) -> str:
    """The calls that a class and its asynchronous twin share, with names, arguments and answers, as Markdown."""
    rows = []
    for name, member in {name: one for kind in kinds for name, one in vars(kind).items()}.items():
        if hasattr(member, "build"):
            signature = inspect.signature(member.build)
            parameters = list(signature.parameters.values())[1:]  # without the object
            arguments = re.sub(r"['\"]|wire\.", "", str(inspect.Signature(parameters)))
            answer = re.sub(r"^\w+\[|\]$|['\"]|wire\.", "", str(signature.return_annotation))
            description = " ".join((member.build.__doc__ or "").split())
            rows.append(f"| `{name}{arguments}` | {description} | `{answer}` |")
    return "| call | does | answers |\n|---|---|---|\n" + "\n".join(rows)


def _range(text: str, key: str, value: float) -> str:
    """Least and most of the three runs and this one, for figures that are repeated."""
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
