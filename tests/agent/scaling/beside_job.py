"""Trains on two ranks with torch interfaces that need several ranks; prints one JSON line for all ranks."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support.gloo import print_results_of_all_ranks
from tula_agent.scaling import Gain, TulaOptimizer

STEPS = 40
SIZES = {"global_batch_size": 64, "small_batch_size": 8}


class Unturned(Gain):
    """A gain policy that leaves directions unchanged, so that optimizers differ only in their factors."""

    damping = None


Made = Callable[[nn.Module], list[torch.optim.Optimizer]]


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)]


def zero(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.02, momentum=0.9)]


def matrices_apart(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, rest = ([p for p in model.parameters() if (p.ndim == 2) is flat] for flat in (True, False))
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-3)]


def digest(parameters: Sequence[torch.Tensor]) -> str:
    flat = torch.cat([p.detach().reshape(-1) for p in parameters])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def train(make: Made) -> dict[str, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)))
    optimizers = [TulaOptimizer(inner, policy=Unturned(), **SIZES) for inner in make(model)]
    draw = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        inputs = torch.randn(32, 16, generator=draw)
        labels = torch.randint(0, 4, (32,), generator=draw)
        F.cross_entropy(model(inputs), labels).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {"digest": digest(list(model.parameters())), "scales": [o.telemetry()["scale"] for o in optimizers]}


def returns_before_others_join() -> bool:
    """On rank 1, return whether rank 0's step returned before rank 1 joined its reduction; on rank 0, return False."""
    store = dist.distributed_c10d._get_default_store()  # the one that ranks have in common; torch has no public name
    weight = nn.Parameter(torch.ones(8))
    optimizer = TulaOptimizer(torch.optim.SGD([weight], lr=0.01), **SIZES)
    (weight * torch.arange(8.0)).sum().backward()
    if dist.get_rank() == 0:
        optimizer.step()
        store.set("returned", "yes")
        return False
    try:
        store.wait(["returned"], datetime.timedelta(seconds=1))
    except dist.DistStoreError:
        early = False
    else:
        early = True
    optimizer.step()
    return early


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {make.__name__: train(make) for make in (sgd, zero, matrices_apart)}
    print_results_of_all_ranks({**results, "early": returns_before_others_join()})


if __name__ == "__main__":
    main()
