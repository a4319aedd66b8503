"""Trains with everything that the agent hooks into, and prints which objects stay alive after the script drops them.

lets_go.py finish|leave: the script calls `run.finish()`, or the run ends only with the process.
"""

import atexit
import gc
import os
import sys
import weakref

import torch
import torch.distributed as dist
from torch import nn

import tula_agent
from benchmarks.support.gloo import leave_group


def train(finish: bool) -> list[weakref.ref]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = tula_agent.TulaOptimizer(inner, policy="gain", global_batch_size=16)
    data = torch.utils.data.TensorDataset(torch.randn(160, 8), torch.randint(0, 2, (160,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    run = tula_agent.init(dataset_size=160)
    run.watch(model, optimizer)
    for x, y in run.steps(loader):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
    if finish:
        run.finish()
    return [weakref.ref(thing) for thing in (model, optimizer, inner, loader)]


def print_alive(alive: list[weakref.ref], when: str) -> None:
    names = [type(thing()).__name__ for thing in alive if thing() is not None]
    os.write(1, f"alive {when} {os.environ['RANK']} {' '.join(names)}\n".encode())


def main() -> None:
    dist.init_process_group("gloo")
    gc.disable()  # who needs a collection may get none before the interpreter is torn down
    alive: list[weakref.ref] = []
    atexit.register(print_alive, alive, "at exit")  # registered before the agent's own, hence called after it
    alive += train(sys.argv[1] == "finish")
    print_alive(alive, "after")
    leave_group()


if __name__ == "__main__":
    main()
