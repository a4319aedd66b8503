"""What `estimate_memory` says, without a device, of the peaks that a device's report has.

    python -m benchmarks.gpu.estimates [benchmarks/results/gpu/DEVICE] [--only NAME] [--json FILE]

`ceiling.median` and `ceiling.worst` are the errors of the largest batch, `ceiling.used` the least share of the largest
that it promises, `ceiling.unsafe` the share of rows whose promise exceeds the largest that ran by more than a
sixteenth, the step of the search on the device. There one step ran after smaller batches, here three run in a fresh
process.

Each network is counted again by this checkout, at the largest batch that was measured and for the largest that fits;
the report keeps what was counted when it was measured. Networks of torchvision are left out where it is missing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.networks import networks
from benchmarks.gpu.store import Results
from benchmarks.gpu.tables import Trainer
from benchmarks.support.report import median, print_table, write_json
from tula_agent import estimate_memory

STORED = Path(__file__).parents[1] / "results" / "gpu" / "nvidia-h100-80gb-hbm3"
_SEARCH_STEP = 1.0 / 16.0


def errors(folder: Path, only: str = "") -> dict[str, tuple[float, float]]:
    """By network and precision: how far the peak at its largest batch, and the largest batch, are off (shares)."""
    found = {}
    known, cpu = networks(smoke=False), torch.device("cpu")
    for name, row in Results(folder, "tables").rows.items():
        network, precision = name.split()
        if network not in known or only not in name or not row.get("batches"):
            continue
        trainer = Trainer(known[network], precision, cpu)
        with trainer.autocast():
            estimate = estimate_memory(trainer.model, known[network].batch(2, cpu), trainer.optimizer)
        largest = max(map(int, row["batches"]))
        peak = row["batches"][str(largest)]["peak_bytes"]
        fits = estimate.largest_local_batch_size(row["capacity_bytes"])
        found[name] = (estimate.total_bytes(largest) / peak - 1.0, fits / row["largest_measured"] - 1.0)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the errors; answers the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.estimates", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=STORED, help="a device's report")
    parser.add_argument("--only", default="", help="only rows whose name has this in it")
    parser.add_argument("--json", type=Path, help="keep the figures in this file")
    options = parser.parse_args(arguments)
    found = errors(options.folder, options.only)
    if not found:
        parser.error(f"{options.folder} has no row whose network is known here and that --only names.")
    offs = [largest for _, largest in found.values()]
    figures = {
        "ceiling.median": median(list(map(abs, offs))),
        "ceiling.worst": max(map(abs, offs)),
        "ceiling.unsafe": sum(off > _SEARCH_STEP for off in offs) / len(offs),
        "ceiling.used": 1.0 + min(offs),
    }
    rows = [[name, f"{100 * peak:+.1f} %", f"{100 * largest:+.1f} %"] for name, (peak, largest) in found.items()]
    for label, place in (("median", 0), ("largest", -1)):
        values = [sorted(abs(each[which]) for each in found.values()) for which in (0, 1)]
        rows.append([label, *(f"{100 * (median(v) if place == 0 else v[-1]):.1f} %" for v in values)])
    print_table("estimate_memory against the device", ["network", "peak", "largest batch"], rows)
    print("; ".join(f"{name} {value:.3f}" for name, value in figures.items()))
    write_json(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
