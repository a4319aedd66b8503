"""Trains one network that is sharded by FullyShardedDataParallel, the first version of FSDP."""

import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import tula_agent
from benchmarks.support.gloo import leave_group


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    model = FullyShardedDataParallel(bare, device_id=torch.device("cpu"))
    optimizer = torch.optim.Adam(model.parameters())
    run = tula_agent.init(dataset_size=320)
    run.watch(model, optimizer)
    for x in run.steps([torch.randn(8, 16) for _ in range(20)]):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    shard = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    os.write(1, f"shard {os.environ['RANK']} {hashlib.sha256(shard).hexdigest()}\n".encode())
    leave_group()


if __name__ == "__main__":
    main()
