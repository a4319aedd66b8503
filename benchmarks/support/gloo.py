"""Defines helpers for scripts with several ranks: they fork ranks, leave the process group safely, and print lines."""

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
    """Run `rank_main` as each rank, in forks of this process that keep its imported modules. Raises if a rank fails.

    With `namespaces`, each rank represents a separate node. Rank i then enters the network namespace with the name
    `namespaces` followed by i, and has priority over other programs (SCHED_RR), since on a real node it would not wait
    for a core. Without priority, a small all-reduce of eight ranks takes ten times as long while two cores are busy.
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
            print("Without CAP_SYS_NICE, ranks have no priority, so small all-reduces take longer.", file=sys.stderr)
    os.environ |= variables | {"RANK": str(rank), "LOCAL_RANK": "0" if namespaces else str(rank)}
    torch.set_num_threads(1)
    rank_main()


def free_port() -> int:
    """Return the number of a free port on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])


def leave_group() -> None:
    """Destroy the process group after gloo's threads have freed the last reduction (see docs/limits.md)."""
    time.sleep(0.05)
    dist.destroy_process_group()


def print_line(line: str) -> None:
    """Write a line with one system call; with `print`, lines of several ranks could be mixed in a shared pipe."""
    os.write(1, f"{line}\n".encode())


def print_results_of_all_ranks(result: Any) -> None:
    """On rank 0, print `RESULT` and the results of all ranks as JSON in rank order; then leave the group."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, result)
    if dist.get_rank() == 0:
        print_line("RESULT " + json.dumps(gathered))
    dist.barrier()
    leave_group()
