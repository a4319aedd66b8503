"""Trains on two ranks while a user sets the static factor at the service; prints which values took effect, and when."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn

import tula_agent
from tula_agent.scaling import Static

LAST_STEP = 4000


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = tula_agent.TulaOptimizer(inner, policy=Static(delta=1e9), global_batch_size=16, small_batch_size=4)
    run = tula_agent.init()
    run.watch(model, optimizer)
    draw = torch.Generator().manual_seed(10 + dist.get_rank())
    inputs = torch.randn(LAST_STEP * 8, 16, generator=draw)
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1))
    for step, (x, y) in enumerate(run.steps(torch.utils.data.DataLoader(data, batch_size=8))):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.telemetry()["thresholds_version"] > 1:
            numbers = optimizer.numbers
            # Each line is one write, since the ranks share the pipe.
            line = f"served {numbers.static_scale} {numbers.small_batch_size} at {step} rank {os.environ['RANK']}"
            os.write(1, (line + "\n").encode())
            break
        time.sleep(0.002)
    run.finish()
    time.sleep(0.05)  # until gloo's threads have freed the last reduction; see docs/limits.md
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
