"""Adds the results of `estimate_memory`, which needs no device and no launch, to a table of memory readings.

    python -m benchmarks._count_memory --grids FILE --out FILE [--models N]
    python -m benchmarks.memory --grids FILE

The second command then scores `memory.analytic.*` (the two smallest batches and the counted slope) and
`memory.counted_one.*` (the smallest batch alone and the counted slope). The output contains only networks whose name in
the table is also the name of a timm model. Images have timm's size for the model, and the optimizer is SGD with
momentum. This program needs timm and a torchvision that matches torch; the repository's own environment has neither.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

import torch

from benchmarks.support.grids import read_rows
from tula_agent import MemoryEstimate, estimate_memory

LARGEST = 90_000_000  # parameters; counting a larger network takes minutes
SEED = 3


def count(timm: ModuleType, network: str) -> MemoryEstimate | None:
    """Return the memory estimate for `network`, or None if timm has no such network or counting takes too long."""
    if not timm.is_model(network):
        return None
    model = timm.create_model(network)
    if sum(parameter.numel() for parameter in model.parameters()) > LARGEST:
        return None
    images = torch.zeros(2, *model.default_cfg["input_size"])
    return estimate_memory(model, images, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def counted(timm: ModuleType, rows: Sequence[dict[str, str]], models: int) -> Iterable[dict[str, str]]:
    """Return the rows of up to `models` networks (a fixed random choice), each with its `analytic_bytes`."""
    networks = sorted({row["model"] for row in rows})
    random.Random(SEED).shuffle(networks)
    left = models
    for network in networks:
        if left and (estimate := count(timm, network.removeprefix("timm/"))) is not None:
            left -= 1
            print(f"{network}: {estimate.activation_bytes_per_sample / 2**20:.1f} MiB per example", file=sys.stderr)
            for row in (row for row in rows if row["model"] == network):
                yield row | {"analytic_bytes": str(estimate.total_bytes(int(row["local_batch_size"])))}


def main(arguments: Sequence[str] | None = None) -> int:
    """Count the networks' memory, write the table, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks._count_memory", description=__doc__)
    parser.add_argument("--grids", type=Path, required=True, help="table of memory readings (CSV)")
    parser.add_argument("--out", type=Path, required=True, help="file for this table with a column analytic_bytes")
    parser.add_argument("--models", type=int, default=80, help="number of networks to count (80)")
    options = parser.parse_args(arguments)
    try:
        timm = importlib.import_module("timm")
    except ImportError:
        parser.error("timm is not installed. Install it with pip, together with a torchvision that matches torch.")
    rows = read_rows(options.grids)
    with options.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*rows[0], "analytic_bytes"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(counted(timm, rows, options.models))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
