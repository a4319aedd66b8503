"""Trains in one process group and then in another at the same address; prints whether the first store was closed.

second_group.py FOLDER: the ranks wait for each other through files in FOLDER, since PyTorch does not wait until all
ranks have left the first group.
"""

import hashlib
import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import tula_agent
from benchmarks.support.gloo import leave_group

RANK = os.environ["RANK"]


def train(bare: nn.Module, run: tula_agent.Run) -> None:
    model = nn.parallel.DistributedDataParallel(bare)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.watch(model, optimizer)
    for x in run.steps([torch.randn(4, 8) for _ in range(20)]):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)


def wait_until_joined(run: tula_agent.Run) -> None:
    """Wait until the ranks have exchanged their measurements through a store that closes with the process group."""
    if run.recorder is not None:
        readings = run.recorder.readings
        while run.recorder.requests.waiting or readings.steps or readings.comm:
            time.sleep(0.01)


def port_is_open() -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) == 0


def all_ranks_at(folder: Path, when: str) -> None:
    (folder / f"{when}-{RANK}").touch()
    while not all((folder / f"{when}-{rank}").exists() for rank in range(2)):
        time.sleep(0.001)


def main() -> None:
    folder = Path(sys.argv[1])
    torch.manual_seed(3)
    bare = nn.Linear(8, 2)
    run = None
    for stretch in ("first", "second"):
        dist.init_process_group("gloo")
        run = run or tula_agent.init()
        train(bare, run)
        wait_until_joined(run)
        all_ranks_at(folder, f"joined {stretch}")
        leave_group()
        all_ranks_at(folder, f"left {stretch}")
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in bare.parameters())).hexdigest()
        # In one write: ranks may share a pipe.
        os.write(1, f"{stretch} {RANK} {digest} {'open' if port_is_open() else 'closed'}\n".encode())
        all_ranks_at(folder, f"looked after {stretch}")


if __name__ == "__main__":
    main()
