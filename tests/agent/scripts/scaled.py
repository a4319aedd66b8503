"""Trains with a TulaOptimizer; each rank prints which numbers it received from the service, and at which step."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn

import tula_agent
from benchmarks.support.gloo import leave_group


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(16, 4))
    optimizer = tula_agent.TulaOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), policy="gain")
    run = tula_agent.init()
    run.watch(model, optimizer)
    data = torch.utils.data.TensorDataset(torch.randn(8000, 16), torch.randint(0, 4, (8000,)))
    seen = 0.0
    for step, (x, y) in enumerate(run.steps(torch.utils.data.DataLoader(data, batch_size=8))):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (version := optimizer.telemetry()["thresholds_version"]) != seen:
            seen = version
            # One write a line: ranks share the pipe.
            os.write(1, f"served {version:.0f} {optimizer.numbers.s_max} at {step}\n".encode())
            if version == 7:
                break
        time.sleep(0.005)
    os.write(1, f"rank {os.environ['RANK']} done\n".encode())
    leave_group()


if __name__ == "__main__":
    main()
