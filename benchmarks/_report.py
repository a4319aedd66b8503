"""Prints figures as a table and writes them as JSON; shared by the benchmarks of the performance model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

__all__ = ["mean", "median", "percentile", "print_table", "write_json"]


def median(values: Sequence[float]) -> float:
    """The median, NaN of nothing."""
    return float(np.median(values)) if len(values) else float("nan")


def mean(values: Sequence[float]) -> float:
    """The mean, NaN of nothing."""
    return float(np.mean(values)) if len(values) else float("nan")


def percentile(values: Sequence[float], share: float) -> float:
    """The quantile at this share, NaN of nothing."""
    return float(np.quantile(values, share)) if len(values) else float("nan")


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A plain aligned table on standard output."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    print(f"\n{title}")
    for row in (header, *rows):
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  " + "  ".join([row[0].ljust(widths[0]), *rest]) if rest else "  " + first)


def write_json(path: Path | None, figures: Mapping[str, float]) -> None:
    """The figures under their keys; NaN (nothing to measure) is written as null."""
    if path is None:
        return
    clean = {key: None if value != value else round(value, 6) for key, value in figures.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(clean, indent=2) + "\n", encoding="utf-8")
