"""Runs one row of the table with real ranks under torchrun, and checks that their final weights are equal."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from experiments.generalization.cases import Case, Mode
from experiments.generalization.data import load
from experiments.generalization.methods import METHODS, prepare
from experiments.generalization.networks import build
from experiments.generalization.train import accuracy, decay

_METHODS = ("LBT", "AGS", "Tula default")


def compare(case: Case, mode: Mode, learning_rate: float) -> dict[str, float]:
    """Train with `case.world_size` gloo processes; return mean test accuracies, and whether the ranks' weights are
    equal.
    """
    request = {"case": vars(case), "epochs": mode.epochs, "num_train": mode.num_train, "rate": learning_rate}
    request |= {"seeds": mode.real_ddp_seeds, "num_eval": mode.num_eval}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(case.world_size)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "experiments.generalization.real_ddp"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, json.dumps(request)], capture_output=True, text=True, check=True, env=environment, timeout=3600
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    found: dict[str, float] = json.loads(line.removeprefix("RESULT "))
    return found


def _train(
    case: Case, name: str, *, seed: int, epochs: int, num_train: int, num_eval: int | None, rate: float
) -> tuple[float, bool]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images = load(case.dataset, num_train=num_train)
    torch.manual_seed(seed)
    ddp = nn.parallel.DistributedDataParallel(build(case.network, num_classes=images.num_classes, side=images.side))
    torch.manual_seed(seed * 100 + rank)
    steps = len(images.train) // case.batch_size
    method = next(method for method in METHODS if method.name == name)
    prepared = prepare(method, case, ddp, learning_rate=rate, steps_per_epoch=steps)
    order = torch.Generator().manual_seed(seed + 1000)
    for epoch in range(epochs):
        shuffled = torch.randperm(len(images.train), generator=order)
        for step in range(steps):
            batch = shuffled[step * case.batch_size : (step + 1) * case.batch_size].chunk(world_size)[rank]
            for group in prepared.optimizer.param_groups:
                group["lr"] = next(prepared.rates) * decay(epoch, epochs)
            prepared.optimizer.zero_grad()
            shard = images.train.images[batch], images.train.labels[batch]
            if hasattr(prepared.optimizer, "observe_batch"):
                prepared.optimizer.observe_batch(shard)
            F.cross_entropy(ddp(shard[0]), shard[1]).backward()
            prepared.optimizer.step()
    flat = torch.cat([p.detach().reshape(-1) for p in ddp.parameters()])
    digests: list[object] = [None] * world_size
    dist.all_gather_object(digests, hashlib.sha256(flat.numpy().tobytes()).hexdigest())
    return accuracy(ddp.module, images.test.first(num_eval)), len(set(digests)) == 1


def main() -> None:
    """Run one rank under torchrun; the first rank prints the result."""
    request = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    case, seeds = Case(**request.pop("case")), request.pop("seeds")
    values: dict[str, float] = {}
    equal = True
    for name in _METHODS:
        found = [_train(case, name, seed=seed, **request) for seed in range(seeds)]
        values[f"real_ddp.{name}"] = statistics.fmean(test for test, _ in found)
        equal = equal and all(same for _, same in found)
    values["real_ddp.weights_equal"] = float(equal)
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(values), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
