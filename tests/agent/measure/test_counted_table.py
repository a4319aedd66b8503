"""Tests that counted bytes per example and one memory reading predict the memory that larger batches need."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks import _count_memory, memory

GIB = 2**30


def network(name: str) -> torch.nn.Module:
    width = int(name.removeprefix("net"))
    model = torch.nn.Sequential(torch.nn.Conv2d(3, width, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(width, 8, 3))
    model.default_cfg = {"input_size": (3, 32, 32)}  # type: ignore[assignment]
    return model


LIBRARY: Any = SimpleNamespace(is_model=lambda name: name.startswith("net"), create_model=network)


def rows_of(name: str, slope: int) -> list[dict[str, str]]:
    head = {"workload": name, "source": "s", "gpu": "X-40GB", "model": f"timm/{name}", "precision": "fp32"}
    return [head | {"local_batch_size": str(b), "memory_bytes": str(GIB + slope * b)} for b in (8, 64, 512)]


def test_a_counted_slope_carries_one_reading_to_the_largest_batch(tmp_path: Path) -> None:
    rows = rows_of("unheard-of", 1)
    for name in ("net16", "net64"):
        estimate = _count_memory.count(LIBRARY, name)
        assert estimate is not None
        rows += rows_of(name, estimate.activation_bytes_per_sample)
    counted = list(_count_memory.counted(LIBRARY, rows, models=2))
    assert sorted({row["workload"] for row in counted}) == ["net16", "net64"]
    table = tmp_path / "counted.csv"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, counted[0])
        writer.writeheader()
        writer.writerows(counted)
    assert memory.main(["--grids", str(table), "--json", str(tmp_path / "out.json")]) == 0
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["memory.counted_one.workloads"] == 2
    assert figures["memory.counted_one.largest.p90"] < 0.05
