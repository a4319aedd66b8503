"""Tries what fits a device: the promised, the replayed and the largest known batch, with and without growing segments.

Each attempt takes three steps in a fresh process, as a training at its largest batch does: a process that has survived
an out-of-memory error, or has trained at a smaller batch, holds other segments.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import torch

from benchmarks.gpu.networks import networks
from benchmarks.gpu.store import H100, Results, Row
from benchmarks.gpu.tables import Trainer
from tula_agent import estimate_memory
from tula_agent.allocations import CachingAllocator, OutOfMemory
from tula_agent.measure.estimate import MemoryEstimate
from tula_wire.memory import assumed_context_bytes, usable_bytes

T = TypeVar("T")
SEGMENTS = {"fixed": "expandable_segments:False", "expandable": "expandable_segments:True"}
REHEARSED_BYTES = 80 * 2**30
"""Memory of the device that a rehearsal on a CPU stands for."""
READ = {
    "reserved_bytes": "reserved_bytes.all.peak",
    "allocated_bytes": "allocated_bytes.all.peak",
    "inactive_split_bytes": "inactive_split_bytes.all.peak",
    "alloc_retries": "num_alloc_retries",
}


def in_fresh_process(work: Callable[..., T], *arguments: Any) -> T:
    """Return what `work` returns in a process that has imported torch and used no device, as the caller has not."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.gpu.memory"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work, *arguments).result()


def three_steps(name: str, size: int, device: torch.device, segments: str, smoke: bool) -> Row:
    """Return what the allocator held over three steps of `size` examples, and whether they fitted."""
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = SEGMENTS[segments]  # read when CUDA is first used
    network, precision = name.split()
    trainer = Trainer(networks(smoke)[network], precision, device)
    row: Row = {"fits": trainer.fits(size)}
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        row |= {name: stats.get(key) for name, key in READ.items()}
    return row


def attempt(name: str, size: int, device: torch.device, segments: str, smoke: bool) -> Row:
    """Return what `three_steps` returns; a batch at which the process died did not fit."""
    try:
        return in_fresh_process(three_steps, name, size, device, segments, smoke)
    except BrokenProcessPool as error:
        return {"fits": False, "failed": str(error)}


def replay(estimate: MemoryEstimate, size: int, capacity: int) -> Row | None:
    """Return what the allocator is expected to reserve for `size` examples; None where that does not fit."""
    if estimate.allocations is None:
        return None
    allocator = CachingAllocator(usable_bytes(capacity) - assumed_context_bytes(capacity))
    try:
        allocator.replay(estimate.allocations.events(size))
    except OutOfMemory:
        return None
    return {"reserved_bytes": allocator.most_reserved, "alloc_retries": allocator.retries}


def measure(name: str, largest: int | None, capacity: int, device: torch.device, smoke: bool) -> Row:
    """Return the outcome of each attempt by kind of segments and batch, and what a replay reserves at each batch."""
    network, precision = name.split()
    cpu = Trainer(networks(smoke)[network], precision, torch.device("cpu"))
    with cpu.autocast():
        estimate = estimate_memory(cpu.model, cpu.network.batch(2, cpu.device), cpu.optimizer)
    promised = 4 if smoke else estimate.safe_local_batch_size(capacity)
    replayed = 4 if smoke else estimate.largest_local_batch_size(capacity)
    sizes = sorted({promised, replayed, largest or promised} - {0})
    return {
        "promised": promised,
        "replayed": {str(size): replay(estimate, size, capacity) for size in sizes},
        "attempts": {
            segments: {str(size): attempt(name, size, device, segments, smoke) for size in sizes}
            for segments in SEGMENTS
        },
    }


def run(results: Results, device: torch.device, seconds: float, smoke: bool) -> None:
    """Add a row for each network and precision whose largest batch is stored, or for the first two in a rehearsal."""
    ends = time.monotonic() + seconds
    stored = Results(H100, "tables").rows
    largest = {name: row.get("largest_measured") for name, row in stored.items() if name.split()[0] in networks(smoke)}
    names = ["gpt2+checkpointing fp32"] if smoke else list(largest)
    for name in results.missing(names, ends):
        capacity = results.machine.get("memory_bytes", REHEARSED_BYTES)
        results.add(name, measure(name, None if smoke else largest[name], capacity, device, smoke))
