"""Trains two networks in one step, the larger one sharded by FSDP2, with an evaluation between epochs."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import tula_agent
from benchmarks.support.gloo import leave_group, print_line
from tula_agent.scaling import TulaOptimizer


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    large, small = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)), nn.Linear(16, 2)
    fully_shard(large, mesh=mesh)
    optimizers = [torch.optim.Adam(large.parameters()), torch.optim.SGD(small.parameters(), lr=0.1)]
    try:
        TulaOptimizer(optimizers[0])
    except ValueError as refused:
        print_line(f"refused: {refused}")
    run = tula_agent.init(dataset_size=160)
    run.watch([large, small], optimizers)
    for _ in range(2):
        for x in run.steps([torch.randn(8, 16) for _ in range(10)]):
            small(large(x)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            large(torch.randn(64, 16))
    print_line(f"rank {os.environ['RANK']} done")
    leave_group()


if __name__ == "__main__":
    main()
