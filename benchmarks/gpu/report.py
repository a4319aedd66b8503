"""The results of all parts as one page of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.gpu.store import Results, Row


def write_report(folder: Path, parts: Iterable[str]) -> None:
    """`report.md` from the JSON files of `parts` in `folder`."""
    found = {part: Results(folder, part) for part in parts}
    machine = next((results.machine for results in found.values() if results.machine), {})
    lines = [f"# Tula on {machine.get('device', 'no device')}", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items()]
    for part, results in found.items():
        lines += ["", f"## {part}", ""]
        lines += list(LAYOUTS[part](results.rows)) if results.rows else ["Nothing was measured."]
    (folder / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def table(header: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    """The lines of a Markdown table."""
    for cells in (header, ["---"] * len(header), *rows):
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _tables(rows: dict[str, Row]) -> Iterator[str]:
    failed = {name: row["failed"] for name, row in rows.items() if "failed" in row}
    whole = {name: row for name, row in rows.items() if name not in failed}
    largest = [
        [name, _size(row["largest_measured"])]
        + [_against(row[key], row["largest_measured"]) for key in ("largest_from_two", "largest_from_estimate")]
        for name, row in whole.items()
    ]
    yield from table(
        ["network", "largest batch", "predicted from two readings", "from `estimate_memory` alone"], largest
    )
    yield ""
    header = ["network", "batch", "step ms", "forward", "backward", "optimizer", "peak MiB", "reserved", "driver"]
    batches = [
        [name, size]
        + [f"{1e3 * read[key]:.2f}" for key in ("step_time_s", "forward_s", "backward_s", "optimizer_s")]
        + [_mib(read.get(key)) for key in ("peak_bytes", "reserved_bytes", "driver_bytes")]
        for name, row in whole.items()
        for size, read in row["batches"].items()
    ]
    yield from table(header, batches)
    yield from (f"- {name}: {why}" for name, why in failed.items())


def _tune(rows: dict[str, Row]) -> Iterator[str]:
    for name, row in rows.items():
        if "failed" in row:
            yield f"{name}: {row['failed']}"
            continue
        value, low, high = (1e3 * bound for bound in row["predicted_s"])
        measured = 1e3 * row["trained_s"]
        yield f"{name}: `tula tune` took {row['tune_s']:.0f} s. {row['why']}"
        yield ""
        yield (
            f"A batch of {row['chosen']} was predicted at {value:.2f} ms [{low:.2f}, {high:.2f}] a step, "
            f"and trained at {measured:.2f} ms ({_percent(value / measured - 1.0)})."
        )
        yield ""
        found = [
            [str(one["local_batch_size"]), str(one["state"]), f"{1e3 * one['step_s']:.2f}" if one["step_s"] else ""]
            for one in row["runs"]
        ]
        yield from table(["batch", "profiling run", "step ms"], found)


def _ranks(rows: dict[str, Row]) -> Iterator[str]:
    found = [
        [name, str(row.get("backend", "")), str(row.get("verdict", row.get("failed")))] for name, row in rows.items()
    ]
    return table(["ranks", "backend", "verdict"], found)


def _scaling(rows: dict[str, Row]) -> Iterator[str]:
    found = [
        [name, row["failed"], ""]
        if "failed" in row
        else [name, f"{1e3 * row['step_time_s']:.2f}", _percent(row["cost"])]
        for name, row in rows.items()
    ]
    return table(["policy", "bare step ms", "added"], found)


def _percent(share: float) -> str:
    return f"{100 * share:+.2f} %"


def _size(size: int | None) -> str:
    return "not reached" if size is None else str(size)


def _against(predicted: int | None, truth: int | None) -> str:
    if predicted is None or not truth:
        return _size(predicted) if predicted is not None else "none"
    return f"{predicted} ({_percent(predicted / truth - 1.0)})"


def _mib(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.0f}"


LAYOUTS = {"tables": _tables, "tune": _tune, "ranks": _ranks, "scaling": _scaling}
