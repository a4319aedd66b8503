"""For scripts of several gloo ranks: leave the process group safely, print lines that do not mix."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch.distributed as dist


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
