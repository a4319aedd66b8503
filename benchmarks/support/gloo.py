"""Helpers for scripts of several ranks: start ranks by forks, leave the process group safely, print lines that do
not mix.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from benchmarks.support.cluster import enter


def fork_ranks(
    rank_main: Callable[[], None],
    world_size: int,
    *,
    namespaces: str = "",
    master: str = "127.0.0.1",
    interface: str = "lo",
) -> None:
    """Run `rank_main` as each rank, in forks of this process, which has imported what they need; raises if one fails.

    The ranks are on this machine, or each on a separate node: then rank i enters the network namespace `namespaces`i,
    and runs before other programs (SCHED_RR), since on a whole node it would not wait for a core. Without that,
    eight ranks take ten times as long for a small all-reduce while two cores are busy.
    """
    variables = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": "1" if namespaces else str(world_size),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": interface,
    }
    start_processes(_be_rank, (rank_main, variables, namespaces), nprocs=world_size, start_method="fork")


def _be_rank(rank: int, rank_main: Callable[[], None], variables: dict[str, str], namespaces: str) -> None:
    if namespaces:
        enter(f"{namespaces}{rank}")
        try:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        except PermissionError:
            print("Ranks run without priority (no CAP_SYS_NICE): small all-reduces take longer.", file=sys.stderr)
    os.environ |= variables | {"RANK": str(rank), "LOCAL_RANK": "0" if namespaces else str(rank)}
    torch.set_num_threads(1)
    rank_main()


def free_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])


def leave_group() -> None:
    """Destroy the group once gloo's threads have released the last reduction: see docs/limits.md."""
    time.sleep(0.05)
    dist.destroy_process_group()


def print_line(line: str) -> None:
    """Write a line and its end with one system call: with `print`, lines of ranks that share a pipe mix."""
    os.write(1, f"{line}\n".encode())


def print_results_of_all_ranks(result: Any) -> None:
    """Print every rank's result, in the order of ranks, as `RESULT` and JSON on rank 0; then leave the group."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, result)
    if dist.get_rank() == 0:
        print_line("RESULT " + json.dumps(gathered))
    dist.barrier()
    leave_group()
