"""Trains with one bottleneck: `bound.py data|compute|launches|straggler|communication|nothing`.

The bottleneck takes a fixed share of every step, which is more time than the other work on a busy machine adds.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

import tula_agent
from benchmarks.support.gloo import leave_group

BY = sys.argv[1]
STEPS = 130
RANK = int(os.environ.get("RANK", "0"))
WORKING_S = 0.05 if BY == "nothing" else 0.012
"""What a step takes beside its wait; slept, so that other processes on the cores change little of it."""


class Examples(torch.utils.data.Dataset[torch.Tensor]):
    """A data set of vectors of eight numbers; if the data are the bottleneck, loading takes longer than the step."""

    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if BY == "data":
            time.sleep(WORKING_S / 2)
        return torch.full((8,), float(index % 7))


class Slept(torch.autograd.Function):
    """An operation that sleeps in the forward pass, as if a device computed for that time."""

    @staticmethod
    def forward(_context: object, x: torch.Tensor) -> torch.Tensor:
        time.sleep(WORKING_S * (4.0 if BY == "straggler" and RANK == 1 else 1.0))
        return x.clone()

    @staticmethod
    def backward(_context: object, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def layers() -> Iterator[nn.Module]:
    """Yield one layer, or two hundred that are so small that launching them takes longer than computing them."""
    for _ in range(200 if BY == "launches" else 1):
        yield nn.Linear(8, 8)
        yield nn.ReLU()


def slow_reduction(_state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with classes
    """On every rank, make the reduction of a bucket take twice as long as the rest of a step."""
    reduced = dist.all_reduce(bucket.buffer(), async_op=True).get_future()

    def done(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        time.sleep(2 * WORKING_S)
        return future.value()[0] / dist.get_world_size()

    return reduced.then(done)


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    network = nn.Sequential(*layers())
    model: nn.Module = nn.parallel.DistributedDataParallel(network) if dist.is_initialized() else network
    if BY == "communication":
        model.register_comm_hook(None, slow_reduction)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(Examples(), batch_size=4)
    run = tula_agent.init()
    run.watch(model, optimizer)
    for batch in run.steps(loader):
        inputs = batch if BY == "launches" else Slept.apply(batch)
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.is_initialized():
        leave_group()


if __name__ == "__main__":
    main()
