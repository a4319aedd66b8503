"""Writes the results of all parts as one page of Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.gpu.store import Results, Row
from benchmarks.gpu.switches import predictions


def write_report(folder: Path, parts: Iterable[str]) -> None:
    """Write `report.md` from the JSON files of `parts` in `folder`."""
    found = {part: Results(folder, part) for part in parts}
    machine = next((results.machine for results in found.values() if results.machine), {})
    lines = [f"# Tula on {machine.get('device', 'no device')}", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items()]
    for part, results in found.items():
        lines += ["", f"## {part}", ""]
        lines += list(LAYOUTS[part](results.rows)) if results.rows else ["Nothing was measured."]
    (folder / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def table(header: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    for cells in (header, ["---"] * len(header), *rows):
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _tables(rows: dict[str, Row]) -> Iterator[str]:
    whole = {name: row for name, row in rows.items() if "failed" not in row}
    largest = [
        [name, _size(row["largest_measured"]), str(row.get("fits_steps", 1))]
        + [_against(row[key], row["largest_measured"]) for key in ("largest_from_two", "largest_from_estimate")]
        for name, row in whole.items()
    ]
    yield from table(
        ["network", "largest batch", "by steps", "predicted from two readings", "from `estimate_memory` alone"], largest
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
    yield from _failures(rows)


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
            f"A step with a batch of {row['chosen']} was predicted to take {value:.2f} ms [{low:.2f}, {high:.2f}], "
            f"and took {measured:.2f} ms in training ({_percent(value / measured - 1.0)})."
        )
        yield ""
        found = [
            [str(one["local_batch_size"]), str(one["state"]), f"{1e3 * one['step_s']:.2f}" if one["step_s"] else ""]
            for one in row["runs"]
        ]
        yield from table(["batch", "profiling run", "step ms"], found)


def _ranks(rows: dict[str, Row]) -> Iterator[str]:
    found = [
        [
            *(name, str(row.get("backend", "")), str(row.get("verdict", row.get("failed")))),
            *(str(len((row.get("timeline") or {}).get("ready_s", []))), _largest_reduction(row)),
        ]
        for name, row in rows.items()
    ]
    return table(["ranks", "backend", "verdict", "buckets timed", "largest all-reduce probed"], found)


def _largest_reduction(row: Row) -> str:
    readings = (row.get("probe") or {}).get("all_ranks", [])
    if not readings:
        return ""
    largest = max(readings, key=lambda reading: reading["size_bytes"])
    return f"{_mib(largest['size_bytes'])} MiB in {1e3 * largest['time_s']:.2f} ms"


def _scaling(rows: dict[str, Row]) -> Iterator[str]:
    measured = [
        [name, *(f"{1e3 * row[key]:.2f}" for key in ("step_time_s", "added_s"))]
        + [_percent(row[key]) for key in ("cost", "cost_of_micro_step")]
        for name, row in rows.items()
        if "added_s" in row
    ]
    for name, row in rows.items():
        if "host_s" in row:
            yield f"- {name}: {1e3 * row['seconds']:.2f} ms, of which the host takes {1e3 * row['host_s']:.2f} ms"
    yield ""
    yield from table(["policy", "bare step ms", "added ms", "of the step", "of a micro-step"], measured)
    yield from _failures(rows)


def _memory(rows: dict[str, Row]) -> Iterator[str]:
    header = ["network", "largest batch", "failed at", "allocated MiB", "reserved", "inactive splits", "retries"]
    measured = [
        [name, str(row["largest"]), str(row["failed_at"])]
        + [_mib(row.get(key)) for key in ("allocated_bytes", "reserved_bytes", "inactive_split_bytes")]
        + [str(row.get("alloc_retries", ""))]
        for name, row in rows.items()
        if "failed" not in row
    ]
    yield from table(header, measured)
    yield from _failures(rows)


def _first_guess(rows: dict[str, Row]) -> Iterator[str]:
    units = {"seconds": (1e6, "us"), "step_time_s": (1e3, "ms a step"), "seconds_per_example": (1e6, "us an example")}
    found = [
        [name, f"{factor * row[key]:.2f} {unit}"]
        for name, row in rows.items()
        for key, (factor, unit) in units.items()
        if key in row
    ]
    yield from table(["what", "time"], found)
    yield from _failures(rows)


def _switches(rows: dict[str, Row]) -> Iterator[str]:
    expected = predictions(rows)
    found = [
        [
            *(name, size, f"{1e3 * read['step_time_s']:.2f}", _mib(read.get("peak_bytes"))),
            _percent(expected[name][size] / read["step_time_s"] - 1.0) if size in expected.get(name, {}) else "",
        ]
        for name, row in rows.items()
        if "failed" not in row
        for size, read in row["batches"].items()
    ]
    yield from table(["network and switches", "batch", "step ms", "peak MiB", "sum of single effects"], found)
    yield from _failures(rows)


def _overhead(rows: dict[str, Row]) -> Iterator[str]:
    for name, row in rows.items():
        if "seconds" in row and "pairs" in row:
            low, high = (1e6 * bound for bound in row["interval_s"])
            yield f"- {name}: {1e6 * row['seconds']:+.1f} [{low:.1f}, {high:.1f}] us a step, {row['pairs']} pairs"
        elif "counter_j" in row:
            yield f"- {name}: {row['counter_j']:.0f} J from the counter, {row['samples_j']:.0f} J from power samples"
        else:
            yield f"- {name}: {row.get('verdict', row.get('failed'))}"


def _accuracy(rows: dict[str, Row]) -> Iterator[str]:
    measured = [
        [name, ", ".join(f"{test:.1f}" for test in tests), f"{statistics.fmean(tests):.1f}"]
        for row in rows.values()
        for name, tests in row.get("tests", {}).items()
    ]
    yield from table(["case and method", "test accuracy by seed, %", "mean"], measured)
    yield from _failures(rows)


def _failures(rows: dict[str, Row]) -> Iterator[str]:
    yield from (f"- {name}: {row['failed']}" for name, row in rows.items() if "failed" in row)


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


LAYOUTS = {
    "tune": _tune, "memory": _memory, "first_guess": _first_guess, "tables": _tables, "switches": _switches,
    "overhead": _overhead, "scaling": _scaling, "accuracy": _accuracy, "ranks": _ranks,
}  # fmt: skip
