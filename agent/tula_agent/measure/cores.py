"""The CPU cores that a rank has for itself."""

from __future__ import annotations

import os


def cores_of_rank(allowed: int, of_node: int | None, ranks_per_node: int) -> int:
    """Return how many of the `allowed` cores of a rank's process are its own, at least 1.

    A process that may use every core of its node shares them with the other ranks there. A process that is bound to
    fewer (numactl, `srun --cpu-bind`) was given its own. `of_node` is None where the number is unknown.
    """
    shared = of_node is None or allowed >= of_node
    return max(1, allowed // ranks_per_node) if shared else allowed


def own_cores(ranks_per_node: int) -> int:
    """Return the number of CPU cores that this process has for itself, by its affinity."""
    return cores_of_rank(len(os.sched_getaffinity(0)), os.cpu_count(), ranks_per_node)
