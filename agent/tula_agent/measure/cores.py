"""Counts the CPU cores that a rank can use exclusively."""

from __future__ import annotations

import os


def cores_of_rank(allowed: int, of_node: int | None, ranks_per_node: int) -> int:
    """Return how many of a rank's `allowed` cores no other rank uses; at least 1.

    A process that may use every core of its node shares the cores with the other ranks on that node. A process that is
    bound to fewer cores (numactl, `srun --cpu-bind`) does not share them. `of_node` is the node's number of cores, or
    None if it is unknown.
    """
    shared = of_node is None or allowed >= of_node
    return max(1, allowed // ranks_per_node) if shared else allowed


def own_cores(ranks_per_node: int) -> int:
    """Return the number of CPU cores that no other rank uses, according to this process's CPU affinity."""
    return cores_of_rank(len(os.sched_getaffinity(0)), os.cpu_count(), ranks_per_node)
