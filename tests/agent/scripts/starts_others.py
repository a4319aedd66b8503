"""Trains on one rank; its loop forks or launches another process, which trains as well."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

import tula_agent


def train(steps: int, inner: str = "") -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tula_agent.init()
    run.watch(model, optimizer)
    for number, batch in enumerate(run.steps([torch.randn(8, 4)] * steps)):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 1 and inner == "command":
            subprocess.run([os.environ["PYTHON_EXEC"], __file__, "inner"], check=True)
        if number == 1 and inner == "fork":
            child = os.fork()
            if child == 0:
                train(7)
                os._exit(0)
            os.waitpid(child, 0)
    print(run.active, flush=True)


if __name__ == "__main__":
    train(7 if sys.argv[1] == "inner" else 5, sys.argv[1])
