"""Ends the run within an optimizer's step hooks, as the thread that watches for out-of-memory errors can do."""

import torch

import tula_agent


def main() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    run = tula_agent.init()
    run.watch(None, optimizer)
    optimizer.register_step_pre_hook(lambda *_: run.finish())
    for _ in range(2):
        weight.grad = torch.ones(4)
        optimizer.step()
    print("weight", weight.sum().item())


if __name__ == "__main__":
    main()
