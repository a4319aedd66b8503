"""Gradients whose mean and noise are known: the loss is linear in the weights, so each example's gradient is itself.

Trains the same with and without the communication hook, in both layouts of DDP's buckets; prints digests of weights.
"""

import hashlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import tula_agent
from benchmarks.support.gloo import leave_group


def train(what: str, view: bool) -> None:
    """The gradient of an example x with respect to the weights is x, of 200 numbers with mean 0.5 and variance 1."""
    rank = dist.get_rank()
    run = None
    torch.manual_seed(3)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(200, 1, bias=False)), gradient_as_bucket_view=view
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(11 + rank)
    batches = [0.5 + torch.randn(8, 200, generator=generator) for _ in range(120)]
    if what != "plain":
        if what == "taken":
            model.register_comm_hook(None, allreduce_hook)
        run = tula_agent.init()
        run.watch(model, optimizer, comm_hook=True)
        batches = run.steps(batches)
    for x in batches:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    # In one piece: under torchrun the ranks share an unbuffered stdout.
    sys.stdout.write(f"weights {what} {view} {rank} {digest}\n")
    sys.stdout.flush()
    if run is not None:
        run.finish()


def main() -> None:
    dist.init_process_group("gloo")
    for layout in (False, True):
        train("plain", layout)
        train("hooked", layout)
    train("taken", False)
    leave_group()


if __name__ == "__main__":
    main()
