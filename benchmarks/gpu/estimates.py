"""Measures how well the largest batch that fits on a device is predicted, from memory readings and without a run.

    python -m benchmarks.gpu.estimates [benchmarks/results/gpu/DEVICE] [--only NAME] [--json FILE]

The true largest batch is the largest batch with which three steps fitted into memory, starting with an empty allocator.
The allocator's segments could grow, as `tula tune` and `tula run` configure them. This batch comes from the report's
`memory.json`, which states it to within 1/32.

`ceiling.*` are predicted from memory readings at two batches, and from the bytes of parameters, gradients and optimizer
that `estimate_memory` counts. The larger batch is four times the smaller one, and its peak is at most about a quarter
of the memory if possible. `ceiling.launch.*` are predicted from readings at the batches that the first launch of a plan
measures: the smallest batch, and 8 and 32 times this batch if they were measured. `ceiling.counted.*` are predicted by
`estimate_memory` alone. `ceiling.replayed.*` are predicted by its replay of an allocator whose segments do not grow,
and compared with the largest batch in the older tables; these tables were measured with one step per batch, after steps
with smaller batches. `peak.*` are the errors of the allocated bytes at the largest batch of the older tables, as
predicted by `estimate_memory`, and `peak.read.*` are the same errors as predicted from the readings of `ceiling.*`. For
each ceiling, `median` and `worst` are the errors of the largest batch that is expected to fit, and `unsafe` is the
share of rows where the promised batch is no smaller than the smallest batch that failed. The promised batch fits with a
probability of 95 %, or is the `safe_local_batch_size` of `estimate_memory`. `used` and `least_used` are the median and
the minimum of the promised batch divided by the true largest batch.

Each network is counted again with the code of this checkout; the counts in the report come from the report's commit.
Torchvision's networks are omitted if torchvision is missing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.networks import networks
from benchmarks.gpu.store import H100, Results, Row
from benchmarks.gpu.tables import BISECTIONS, Trainer
from benchmarks.support.report import median, print_table, write_json
from tula_agent import MemoryEstimate, estimate_memory
from tula_service.analysis.evidence import GROWING_SD
from tula_service.perfmodel.memory_model import Beside, MemoryObservations, fit_memory
from tula_wire.memory import ALLOCATOR_VARIABLES, GROWING_SEGMENTS

_QUARTER, _APART = 0.26, 4
_AS_LIKELY_AS_NOT, _SAFETY = 0.5, 0.95


@dataclass(frozen=True)
class Ceiling:
    """Batches of one row as fractions of the largest batch that ran.

    `expected` is the predicted largest batch, `promised` is the largest batch that is promised to fit, and `failed` is
    the smallest batch that failed.
    """

    expected: float
    promised: float
    failed: float


def counted(row: Row, estimate: MemoryEstimate, truth: Row) -> Ceiling:
    """Return the ceiling that `estimate_memory` predicts without a run."""
    capacity = row["capacity_bytes"]
    return _ceiling(truth, estimate.largest_local_batch_size(capacity), estimate.safe_local_batch_size(capacity))


def read(row: Row, estimate: MemoryEstimate, batches: Sequence[int], truth: Row) -> tuple[Ceiling, float]:
    """Return the service's ceiling from readings at `batches`, and the relative error of the largest batch's peak."""
    at = [row["batches"][str(batch)] for batch in batches]
    static = estimate.parameter_bytes + estimate.gradient_bytes + estimate.optimizer_bytes
    observed = MemoryObservations(batches, [float(reading["peak_bytes"]) for reading in at], static_bytes=float(static))
    context = float(max(reading["context_bytes"] for reading in at))
    model = fit_memory(observed, beside=Beside(context, 0.0, 1.0, GROWING_SD))
    bounds = (
        model.max_local_batch_size(row["capacity_bytes"], safety_probability=p) for p in (_AS_LIKELY_AS_NOT, _SAFETY)
    )
    largest = max(map(int, row["batches"]))
    allocated = model.predict(largest).mean - context
    return _ceiling(truth, *bounds), allocated / row["batches"][str(largest)]["peak_bytes"] - 1.0


def batches_to_read(row: Row) -> list[int]:
    """Return a batch and four times this batch, which needs at most about a quarter of the memory if possible."""
    batches = sorted(map(int, row["batches"]))
    small = [b for b in batches if row["batches"][str(b)]["peak_bytes"] <= _QUARTER * row["capacity_bytes"]]
    larger = max(small[1:], default=batches[1])
    return [max((b for b in batches if _APART * b <= larger), default=batches[0]), larger]


def batches_of_launch(row: Row) -> list[int]:
    """Return the smallest batch and, if they were measured, 8 and 32 times this batch."""
    batches = sorted(map(int, row["batches"]))
    return [batch for batch in batches if batch in (batches[0], 8 * batches[0], 32 * batches[0])]


def _ceiling(truth: Row, expected: int, promised: int) -> Ceiling:
    largest = truth["largest"]
    return Ceiling(expected / largest, promised / largest, truth["failed_at"] / largest)


def _of_tables(row: Row) -> Row:
    """Return the largest batch in the tables, and the smallest batch that is known to fail."""
    largest = row["largest_measured"]
    return {"largest": largest, "failed_at": largest + max(1, max(map(int, row["batches"])) >> BISECTIONS)}


@dataclass(frozen=True)
class Errors:
    """Errors of one network in one precision.

    `peak` and `peak_read` are the relative errors of the peak at the largest batch, as predicted by `estimate_memory`
    and from readings, respectively. `read`, `launch` and `counted` are the ceilings with growing segments, as predicted
    from readings, from a launch's readings, and by `estimate_memory`, respectively. `replayed` is the ceiling that
    `estimate_memory` predicts with segments that do not grow.
    """

    peak: float
    peak_read: float
    read: Ceiling
    launch: Ceiling
    counted: Ceiling
    replayed: Ceiling


@contextmanager
def segments_growing() -> Iterator[None]:
    """Make estimates in this context assume that the allocator's segments grow, as in runs that `tula` launches."""
    before = os.environ.get(ALLOCATOR_VARIABLES[0])
    os.environ[ALLOCATOR_VARIABLES[0]] = GROWING_SEGMENTS
    try:
        yield
    finally:
        if before is None:
            del os.environ[ALLOCATOR_VARIABLES[0]]
        else:
            os.environ[ALLOCATOR_VARIABLES[0]] = before


def errors(folder: Path, only: str = "") -> dict[str, Errors]:
    """Return the errors of predictions for a device's report, keyed by network and precision."""
    rows, fitting = {}, Results(folder, "memory").rows
    known, cpu = networks(smoke=False), torch.device("cpu")
    for name, row in Results(folder, "tables").rows.items():
        network, precision = name.split()
        if network not in known or only not in name or not row.get("batches"):
            continue
        trainer = Trainer(known[network], precision, cpu)
        with trainer.autocast():
            estimate = estimate_memory(trainer.model, known[network].batch(2, cpu), trainer.optimizer)
        largest = max(map(int, row["batches"]))
        peak = estimate.total_bytes(largest) / row["batches"][str(largest)]["peak_bytes"] - 1.0
        truth = fitting[f"{name}, growing segments"]
        ceiling, peak_read = read(row, estimate, batches_to_read(row), truth)
        launch, _ = read(row, estimate, batches_of_launch(row), truth)
        replayed = counted(row, estimate, _of_tables(row))
        with segments_growing():
            rows[name] = Errors(peak, peak_read, ceiling, launch, counted(row, estimate, truth), replayed)
    return rows


def figures_of(prefix: str, ceilings: Sequence[Ceiling]) -> dict[str, float]:
    """Return the figures of `ceilings` that the module's docstring lists."""
    offs, used = [abs(each.expected - 1.0) for each in ceilings], [each.promised for each in ceilings]
    return {
        f"{prefix}.median": median(offs),
        f"{prefix}.worst": max(offs),
        f"{prefix}.unsafe": sum(each.promised >= each.failed for each in ceilings) / len(ceilings),
        f"{prefix}.used": median(used),
        f"{prefix}.least_used": min(used),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the errors; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.estimates", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=H100, help="folder with a device's report")
    parser.add_argument("--only", default="", help="use only rows whose name contains this")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    of_rows = errors(options.folder, options.only)
    if not of_rows:
        parser.error(f"{options.folder} has no row with a known network and a name that contains {options.only!r}.")
    scored = [*of_rows.values()]
    figures: dict[str, float] = {}
    for prefix, off in (("peak", [row.peak for row in scored]), ("peak.read", [row.peak_read for row in scored])):
        figures |= {f"{prefix}.median": median([*map(abs, off)]), f"{prefix}.worst": max(map(abs, off))}
    figures |= figures_of("ceiling", [row.read for row in scored])
    figures |= figures_of("ceiling.launch", [row.launch for row in scored])
    figures |= figures_of("ceiling.counted", [row.counted for row in scored])
    figures |= figures_of("ceiling.replayed", [row.replayed for row in scored])
    cells = [[name, *(f"{100 * off:+.1f} %" for off in _parts(row))] for name, row in of_rows.items()]
    header = ["network", "peak", "from readings", "readings: expected", "promised"]
    header += ["launch: expected", "promised", "no run: expected", "promised", "replayed: expected", "promised"]
    print_table("errors relative to the device's measurements", header, cells)
    print("; ".join(f"{name} {value:.3f}" for name, value in figures.items()))
    write_json(options.json, figures)
    return 0


def _parts(row: Errors) -> list[float]:
    ceilings = (row.read, row.launch, row.counted, row.replayed)
    return [row.peak, row.peak_read, *(part - 1.0 for c in ceilings for part in (c.expected, c.promised))]


if __name__ == "__main__":
    sys.exit(main())
