"""Probes the links between the ranks of a profiling run by timing all-reduces after the run's warm-up."""

from __future__ import annotations

import math
import os
import socket
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tula_agent.measure.launches import launch_time_s

_SMALLEST_BYTES, _GROWTH = 2**10, 4
_LARGEST_BYTES = {"nccl": 2**28, "gloo": 2**26}
_LEAST_REPEATS, _MOST_REPEATS, _WARM_UP = 3, 20, 2
_LEAST_SIZES = 3
_SD_PER_DEVIATION = 1.48  # ratio of standard deviation to median absolute deviation of a normal distribution
_GROUP_WITHIN = timedelta(seconds=60)


def time_all_reduces(device: torch.device, total_s: float) -> dict[str, Any]:
    """Time all-reduces on all ranks for about `total_s` seconds; return the fields of `tula_wire.AllReduces`.

    All ranks of the default group must call this function at the same point, and all get the same result. The function
    creates separate groups, so that a missing rank does not disturb the training run's collectives. Raises ValueError
    if the backend is neither gloo nor NCCL, or if nodes have different numbers of ranks.
    """
    nodes: list[str] = [""] * dist.get_world_size()
    every = dist.new_group(timeout=_GROUP_WITHIN)
    groups = [every]
    try:
        # The launcher's name for this rank's node, or else the host's name.
        node = os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or socket.gethostname()
        dist.all_gather_object(nodes, node, group=every)
        ranks = Counter(nodes)
        if len(set(ranks.values())) > 1:
            raise ValueError(f"the nodes have {sorted(ranks.values())} ranks: start the same number on each node")
        per_node = ranks[nodes[0]]
        apart = len(ranks) > 1 and per_node > 1
        budget_s = total_s / 2.0 if apart else total_s
        launch_s = _mean(every, device, [_own_launch_time_s(device)])[0]
        fields: dict[str, Any] = {
            "backend": _backend(every, device),
            "num_nodes": len(ranks),
            "ranks_per_node": per_node,
            "launch_time_s": None if math.isnan(launch_s) else launch_s,
            "all_ranks": _readings(every, device, budget_s),
        }
        if apart:
            for name in ranks:  # every rank takes part in creating every group
                members = [rank for rank, node in enumerate(nodes) if node == name]
                group = dist.new_group(members, timeout=_GROUP_WITHIN)
                if dist.get_rank() in members:
                    groups.append(group)
            fields["in_node"] = _readings(groups[-1], device, budget_s)
    finally:
        for group in groups:
            dist.destroy_process_group(group)
    return fields


def _own_launch_time_s(device: torch.device) -> float:
    """Return the launch time in seconds, or NaN if measuring fails, since an exception would leave ranks waiting."""
    try:
        return launch_time_s(device)
    except Exception:
        return math.nan


def _backend(group: Any, device: torch.device) -> str:
    """Return the backend for tensors on `device`, according to a configuration such as `cpu:gloo,cuda:nccl`."""
    backend = dict(part.split(":") for part in str(dist.get_backend_config(group)).split(","))[device.type]
    if backend not in _LARGEST_BYTES:
        raise ValueError(f"the backend {backend} cannot be probed: use {' or '.join(_LARGEST_BYTES)}")
    return backend


def _readings(group: Any, device: torch.device, budget_s: float) -> list[dict[str, float]]:
    """Return how long all-reduces of increasing sizes take, measured within about `budget_s` seconds.

    The ranks decide together whether there is time for the next size.
    """
    readings: list[dict[str, float]] = []
    size, end = _SMALLEST_BYTES, time.monotonic() + budget_s
    largest = _LARGEST_BYTES[_backend(group, device)]
    while size <= largest:
        buffer = torch.zeros(size // 4, device=device)
        once_s = _mean(group, device, _times(buffer, group, _WARM_UP))[-1]
        left_s = _reduced(group, device, [end - time.monotonic()], dist.ReduceOp.MIN)[0]
        repeats = max(_LEAST_REPEATS, min(_MOST_REPEATS, int(left_s / _GROWTH / once_s)))
        times = _mean(group, device, _times(buffer, group, repeats))
        middle = statistics.median(times)
        spread = _SD_PER_DEVIATION * statistics.median(abs(time_s - middle) for time_s in times) / middle
        readings.append({"size_bytes": size, "time_s": middle, "relative_sd": spread, "repeats": len(times)})
        size *= _GROWTH
        needed_s = middle * _GROWTH * (_WARM_UP + _LEAST_REPEATS)
        left_s = _reduced(group, device, [end - time.monotonic() - needed_s], dist.ReduceOp.MIN)[0]
        if left_s < 0.0 and len(readings) >= _LEAST_SIZES:
            break
    return readings


def _times(buffer: torch.Tensor, group: Any, repeats: int) -> list[float]:
    """Return how long each of `repeats` all-reduces takes on this rank, in seconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        dist.all_reduce(buffer, group=group)
        if buffer.is_cuda:
            torch.cuda.synchronize(buffer.device)
        times.append(time.perf_counter() - start)
    return times


def _mean(group: Any, device: torch.device, seconds: Sequence[float]) -> list[float]:
    """Return the mean of each value over the ranks of the group; the result is the same on all ranks.

    A rank that arrives early at an all-reduce waits for the others, and a late rank does not. So over successive
    repeats, the sum of the means is the elapsed time, but the sum of the maxima is larger.
    """
    ranks = dist.get_world_size(group)
    return [value / ranks for value in _reduced(group, device, seconds, dist.ReduceOp.SUM)]


def _reduced(group: Any, device: torch.device, seconds: Sequence[float], operation: Any) -> list[float]:
    """Return the values, each reduced over the ranks of the group."""
    values = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(values, op=operation, group=group)
    return [float(value) for value in values.tolist()]
