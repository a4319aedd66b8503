"""Finds the largest batch with which three steps fit into an empty allocator, with and without growing segments.

One process tries all networks with growing segments, and another tries all networks with fixed segments. Before each
attempt, the process frees all its memory, so that the device is in the same state as at the start of training. The
search starts at the largest batch in the stored H100 report and ends when the result is known to within 1/32 of this
batch.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.gpu.networks import networks
from benchmarks.gpu.store import H100, Results, Row
from benchmarks.gpu.tables import Trainer, free_memory
from tula_wire.memory import GROWING_SEGMENTS

T = TypeVar("T")
SEGMENTS = {"growing": GROWING_SEGMENTS, "fixed": "expandable_segments:False"}
"""The values of PYTORCH_CUDA_ALLOC_CONF; the first is the value that `tula tune` and `tula run` set."""
WITHIN, SMOKE_LARGEST = 32, 5
READ = {
    "reserved_bytes": "reserved_bytes.all.peak",
    "allocated_bytes": "allocated_bytes.all.peak",
    "inactive_split_bytes": "inactive_split_bytes.all.peak",
    "alloc_retries": "num_alloc_retries",
}


def in_fresh_process(work: Callable[..., T], *arguments: Any) -> T:
    """Return the result of `work` in a new process that has imported torch but has not used a device.

    The caller must not have used a device, either.
    """
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.gpu.memory"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work, *arguments).result()


def largest_fitting(fits: Callable[[int], bool], start: int, ends: float) -> tuple[int, int] | None:
    """Return the largest batch known to fit (0: none) and the smallest batch known to fail.

    The two differ by at most 1/32 of `start`, or by 1. The distance from `start` doubles until a batch that fits and a
    batch that fails are known; then the interval between them is halved repeatedly. Returns None if the search is not
    finished at `ends` (monotonic time).
    """
    step = finest = max(1, start // WITHIN)
    fitted, failed = 0, 0
    size = start
    while not failed or failed - fitted > finest:
        if time.monotonic() > ends:
            return None
        if fits(size):
            fitted = size
            size = (fitted + failed) // 2 if failed else size + step
        else:
            failed = size
            size = (fitted + failed) // 2 if fitted or size <= step else size - step
        step *= 2
    return fitted, failed


def measure(name: str, start: int, device: torch.device, ends: float, smoke: bool) -> Row | None:
    """Return the largest batch that fits, the allocator's statistics for this batch, and the smallest failed batch."""
    network, precision = name.split()
    known = networks(smoke)[network]
    held: Row = {}

    def fits(size: int) -> bool:
        nonlocal held
        if smoke and size > SMOKE_LARGEST:
            return False  # never exhaust the memory of a host
        free_memory(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            torch.cuda.reset_accumulated_memory_stats(device)
        if not Trainer(known, precision, device).fits(size):
            return False
        if device.type == "cuda":
            stats = torch.cuda.memory_stats(device)
            held = {column: stats.get(key) for column, key in READ.items()}
        return True

    found = largest_fitting(fits, start, ends)
    free_memory(device)
    return None if found is None else {"largest": found[0], "failed_at": found[1]} | held


def measure_all(folder: Path, segments: str, device: torch.device, seconds: float, smoke: bool) -> None:
    """Add a row for each network and precision with a stored largest batch; add only one row in a smoke run."""
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = SEGMENTS[segments]  # read when CUDA is first used
    ends, results = time.monotonic() + seconds, Results(folder, "memory")
    stored = {} if smoke else Results(H100, "tables").rows
    starts = {name: row["largest_measured"] for name, row in stored.items() if name.split()[0] in networks(smoke)}
    starts = starts or {"gpt2+checkpointing fp32": SMOKE_LARGEST - 1}
    rows = {f"{name}, {segments} segments": name for name in starts}
    for label in results.missing(rows, ends):
        name = rows[label]
        row = measure(name, starts[name], device, ends, smoke)
        if row is None:
            results.end_row(None)  # the next session measures this row
            return
        results.add(label, row)


def run(results: Results, device: torch.device, seconds: float, smoke: bool) -> None:
    """Measure all networks with growing segments and then with fixed segments."""
    ends = time.monotonic() + seconds
    results.end_row(None)  # writes a description of the machine, which the other processes keep
    for segments in SEGMENTS:
        in_fresh_process(measure_all, results.folder, segments, device, ends - time.monotonic(), smoke)
