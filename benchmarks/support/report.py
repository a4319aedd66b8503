"""Defines the options of all benchmarks, and functions that print tables and write figures to JSON files."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np


def make_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has; pass `options.json` to `write_json`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument(
        "--smoke", action="store_true", help="run for a few seconds, only to check that the benchmark works"
    )
    return parser


def median(values: Sequence[float]) -> float:
    """Return the median, or NaN if there are no values."""
    return float(np.median(values)) if len(values) else float("nan")


def mean(values: Sequence[float]) -> float:
    """Return the mean, or NaN if there are no values."""
    return float(np.mean(values)) if len(values) else float("nan")


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive values, or NaN if there are none; a few large values affect it little."""
    return float(np.exp(np.mean(np.log(values)))) if len(values) else float("nan")


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of a 90 % bootstrap interval for the mean (a thousand resamples), or NaN without values."""
    if not len(values):
        return float("nan"), float("nan")
    generator = np.random.default_rng(0)
    means = generator.choice(np.asarray(values, dtype=np.float64), (1000, len(values))).mean(axis=1)
    return percentile(means.tolist(), 0.05), percentile(means.tolist(), 0.95)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the quantile at `share`, or NaN if there are no values."""
    return float(np.quantile(values, share)) if len(values) else float("nan")


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a plain table with aligned columns on standard output."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    print(f"\n{title}")
    for row in (header, *rows):
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  " + "  ".join([row[0].ljust(widths[0]), *rest]) if rest else "  " + first)


def write_json(path: Path | None, figures: Mapping[str, float | str]) -> None:
    """Write the figures with the commit and the command as JSON; NaN (nothing was measured) is written as null."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = {key: value if isinstance(value, str) else round(value, 6) for key, value in figures.items()}
    clean = {key: value if value == value else None for key, value in numbers.items()}
    path.write_text(json.dumps(clean | provenance(), indent=2) + "\n", encoding="utf-8")


def provenance() -> dict[str, str]:
    """Return the `command` as typed, and this checkout's `commit` (with `-dirty` after changes; empty without git)."""
    describe, commit = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"], ""
    with contextlib.suppress(OSError):  # git is not installed
        done = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        commit = done.stdout.strip()
    return {"commit": commit, "command": shlex.join(["python", *sys.orig_argv[1:]])}
