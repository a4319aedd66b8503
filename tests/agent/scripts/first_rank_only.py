"""Makes a common mistake: starts the agent on only one of two ranks."""

import os

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.support.gloo import leave_group, print_line


def main() -> None:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [torch.randn(8, 4) for _ in range(20)]
    if dist.get_rank() == 0:
        import tula_agent

        run = tula_agent.init()
        run.watch(model, optimizer)
        batches = run.steps(batches)
    seen = 0
    for x in batches:
        model(x).sum().backward()
        optimizer.step()
        seen += 1
    print_line(f"micro-steps {os.environ['RANK']} {seen}")
    leave_group()


if __name__ == "__main__":
    main()
