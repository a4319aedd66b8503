"""Runs the training job of `benchmarks.cluster`: DDP over gloo between network namespaces, with simulated compute.

The job is started once per run and forks one rank per node; each rank enters its node's namespace. The network's
parameters are real and their gradients cross the links. Compute is simulated by waiting, so that eight nodes do not
compete for the cores of one machine. The waiting time grows with the batch, but never falls below a minimum.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tula_agent
import tula_wire  # noqa: F401 - imported before the fork, see `load`
from benchmarks.support.gloo import fork_ranks, leave_group
from tula_agent.ship.transport import Transport

LAYERS = 8
FLOOR_S, PER_EXAMPLE_S, SHARPNESS = 0.015, 0.0005, 4.0
"""The device time of a step with batch b is (floor^k + (per example * b)^k)^(1/k)."""
BACKWARD_SHARE = 2 / 3


def device_time_s(local_batch_size: int) -> float:
    """Return how long the forward and backward passes of one step take, in seconds."""
    busy = (PER_EXAMPLE_S * local_batch_size) ** SHARPNESS
    return float((FLOOR_S**SHARPNESS + busy) ** (1 / SHARPNESS))


class Wait(torch.autograd.Function):
    """A layer that waits for a given time in each pass, and returns a constant gradient for `weight`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds, ctx.size = seconds, weight.shape
        time.sleep(seconds * (1 - BACKWARD_SHARE))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        time.sleep(ctx.seconds * BACKWARD_SHARE)
        return gradients[0], torch.full(ctx.size, 1e-6), None


class Network(nn.Module):
    """A network of LAYERS layers with `parameter_bytes` of parameters in total."""

    def __init__(self, parameter_bytes: int) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(parameter_bytes // 4 // LAYERS) for _ in range(LAYERS))
        self.first = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seconds = device_time_s(len(x)) / LAYERS
        y = x.mean() * self.first
        for weight in self.layers:
            y = Wait.apply(y, weight, seconds)
        return y


class Batches:
    """A loader of `length` empty batches."""

    def __init__(self, batch_size: int, length: int) -> None:
        self.batch_size, self.length = batch_size, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self.length):
            yield torch.zeros(self.batch_size, 1)


def rank_main(options: argparse.Namespace) -> None:
    """Run one rank, as a user's training script would."""
    dist.init_process_group("gloo")
    network = Network(options.parameter_bytes)
    model = DistributedDataParallel(network, bucket_cap_mb=options.parameter_bytes / 2**20 / 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = tula_agent.init(dataset_size=options.dataset_size)
    run.watch(model, optimizer)
    for number, batch in enumerate(run.steps(Batches(options.batch_size, options.steps))):
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
        if options.show_steps and dist.get_rank() == 0:
            print(f"step {number} {time.monotonic():.6f}", flush=True)
    run.finish()
    leave_group()


def load() -> None:
    """Before the fork, import the modules that ranks would otherwise import when they first step or send samples.

    On separate nodes, these imports finish during the warm-up. On the few cores of one machine, eight ranks would still
    be importing when a profiling run begins to measure, and the run would report slow steps.
    """
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.SGD([weight], lr=1e-3).step()
    Transport("http://127.0.0.1", None, 1.0).close()


def main() -> None:
    """Fork the ranks and wait until they end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--namespaces", required=True, help="prefix of the nodes' namespaces")
    parser.add_argument("--master", required=True, help="address of the first node")
    parser.add_argument("--interface", required=True)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--parameter-bytes", type=int, default=2**20)
    parser.add_argument("--dataset-size", type=int, default=100_000)
    parser.add_argument("--show-steps", action="store_true")
    options = parser.parse_args()
    load()
    fork_ranks(
        partial(rank_main, options),
        options.nodes,
        namespaces=options.namespaces,
        master=options.master,
        interface=options.interface,
    )


if __name__ == "__main__":
    main()
