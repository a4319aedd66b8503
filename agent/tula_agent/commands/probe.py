"""What `tula probe` starts on each rank: times all-reduces for some seconds; the first rank prints the probe."""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import tula_wire as wire
from tula_wire.fabrics import PROBE_MARK

_SMALLEST_BYTES, _GROWTH = 2**10, 4
_LARGEST_BYTES = {"nccl": 2**28, "gloo": 2**26}
_LEAST_REPEATS, _MOST_REPEATS, _WARM_UP = 3, 20, 2
_LEAST_SIZES = 3
_SD_PER_DEVIATION = 1.48  # standard deviation over the median absolute deviation, of normal values


def main() -> None:
    """Measure for as many seconds as the argument says, and print one line on the first rank."""
    total_s = float(sys.argv[1])
    backend: wire.Backend = "nccl" if torch.cuda.is_available() else "gloo"
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        sys.exit("tula probe: one rank reduces nothing: launch two ranks or more, as in -- torchrun --nproc-per-node 2")
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    try:
        probe = _measure(backend, device, total_s)
    finally:
        dist.destroy_process_group()
    if probe is not None:
        print(f"{PROBE_MARK}{probe.model_dump_json(exclude_none=True)}", flush=True)


def _measure(backend: wire.Backend, device: torch.device, total_s: float) -> wire.FabricProbe | None:
    """Over all ranks, and over those of each node where that differs; None on ranks other than the first.

    Exits where nodes have different numbers of ranks.
    """
    nodes: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(nodes, _node())
    ranks = Counter(nodes)
    if len(set(ranks.values())) > 1:
        sys.exit(f"tula probe: nodes have {sorted(ranks.values())} ranks: launch as many on each node")
    per_node = ranks[nodes[0]]
    apart = len(ranks) > 1 and per_node > 1
    budget_s = total_s / 2.0 if apart else total_s
    all_ranks = _readings(dist.group.WORLD, backend, device, budget_s)
    in_node = None
    if apart:
        for name in ranks:  # every rank takes part in making every group
            members = [rank for rank, node in enumerate(nodes) if node == name]
            group = dist.new_group(members)
            if dist.get_rank() in members:
                mine = group
        in_node = _readings(mine, backend, device, budget_s)
    if dist.get_rank():
        return None
    return wire.FabricProbe(
        backend=backend, num_nodes=len(ranks), ranks_per_node=per_node, all_ranks=all_ranks, in_node=in_node
    )


def _node() -> str:
    """What the launcher calls this rank's node, else the host's name."""
    return os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or socket.gethostname()


def _readings(group: Any, backend: str, device: torch.device, budget_s: float) -> list[wire.AllReduceReading]:
    """From small to large, until the next size would exceed the time; every rank takes the same decisions."""
    found: list[wire.AllReduceReading] = []
    size, end = _SMALLEST_BYTES, time.monotonic() + budget_s
    while size <= _LARGEST_BYTES[backend]:
        buffer = torch.zeros(size // 4, device=device)
        once_s = _slowest(group, device, _times(buffer, group, _WARM_UP))[-1]
        left_s = _slowest(group, device, [end - time.monotonic()], least=True)[0]
        repeats = max(_LEAST_REPEATS, min(_MOST_REPEATS, int(left_s / _GROWTH / once_s)))
        times = _slowest(group, device, _times(buffer, group, repeats))
        middle = statistics.median(times)
        spread = _SD_PER_DEVIATION * statistics.median(abs(each - middle) for each in times) / middle
        reading = wire.AllReduceReading(size_bytes=size, time_s=middle, relative_sd=spread, repeats=len(times))
        found.append(reading)
        size *= _GROWTH
        needed_s = middle * _GROWTH * (_WARM_UP + _LEAST_REPEATS)
        left_s = _slowest(group, device, [end - time.monotonic() - needed_s], least=True)[0]
        if left_s < 0.0 and len(found) >= _LEAST_SIZES:
            break
    return found


def _times(buffer: torch.Tensor, group: Any, repeats: int) -> list[float]:
    """Seconds of each all-reduce on this rank."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        dist.all_reduce(buffer, group=group)
        if buffer.is_cuda:
            torch.cuda.synchronize(buffer.device)
        found.append(time.perf_counter() - start)
    return found


def _slowest(group: Any, device: torch.device, seconds: Sequence[float], *, least: bool = False) -> list[float]:
    """The largest value over the ranks of the group, or the least."""
    values = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MIN if least else dist.ReduceOp.MAX, group=group)
    return [float(value) for value in values.tolist()]


if __name__ == "__main__":
    main()
