"""Two ranks asked to go back, of which the second sees no checkpoint at first, as without a shared file system."""

import hashlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import tula_agent
from benchmarks.support.gloo import leave_group, print_line
from tula_agent.checkpoint import CheckpointError


def digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]


def main() -> None:
    shared, elsewhere = (Path(name) for name in sys.argv[1:])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    optimizer = tula_agent.TulaOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.apply_thresholds(tula_agent.ScalingThresholds(version=1, restore_step=3))
    for _ in range(2):
        optimizer.step()  # without gradients; the second step switches all ranks
    run = tula_agent.init()
    torch.manual_seed(rank)
    for x in run.steps([torch.randn(8, 4) for _ in range(4)]):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        run.checkpoint(model, optimizer, directory=shared)
        if run.position.step == 3:
            print_line(f"made {digest(model)} rank {rank}")
    before = digest(model)
    try:
        run.roll_back(model, optimizer, directory=shared if rank == 0 else elsewhere)
    except CheckpointError as error:
        print_line(f"refused rank {rank}, weights {'kept' if digest(model) == before else 'moved'}: {error}")
    dist.barrier()  # reached by both, or this hangs
    print_line(f"done {run.roll_back(model, optimizer, directory=shared)} {digest(model)} rank {rank}")
    dist.barrier()
    leave_group()


if __name__ == "__main__":
    main()
