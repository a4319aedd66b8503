"""A batch ramp: start at the base batch and double it, up to the large batch, where the measured noise scale allows it.

    python -m experiments.generalization.ramp --json results/ramp.json    # some minutes of one core

A prototype, to be read with the report of `--quick`: same cases, seeds, base rates and test data. Every step is one of
the default (`gain`, with the base batch as b_small), so only the batch differs. After each epoch the batch doubles
while tr(S)/|G|^2, in the median over all steps at this batch, is at least the batch: up to there a larger batch costs
few extra examples (McCandlish et al. 2018). Cost is a model: a rank computes 64 examples (16 of the transformer) in one
unit of time, the all-reduce adds COMMUNICATION units where there are several ranks, and a cluster has one rank for
every such part of the batch.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.support.report import provenance
from experiments.generalization.campaign import picked_rates
from experiments.generalization.cases import MODES, Case, Mode
from experiments.generalization.data import load
from experiments.generalization.methods import METHODS, prepare
from experiments.generalization.networks import build
from experiments.generalization.train import accuracy, decay
from tula_agent.scaling import TulaOptimizer

COMMUNICATION = 0.3
PARTS = 4
"""Parts of every batch, each with its batch statistics; the noise is measured between them."""
DEFAULT = next(method for method in METHODS if method.role == "default")


@dataclass(frozen=True)
class Ramped:
    """Of one run: percent on validation and test, optimizer steps, and modelled time and rank-time."""

    validation: float
    test: float
    steps: int
    time: float
    rank_time: float
    batches: tuple[int, ...]


def cost(batches: Sequence[int], base: int) -> tuple[float, float]:
    """Return the modelled time and rank-time of steps of these batch sizes."""
    times = [(math.ceil(batch / base), 1.0 + (COMMUNICATION if batch > base else 0.0)) for batch in batches]
    return sum(time for _, time in times), sum(ranks * time for ranks, time in times)


def train(case: Case, mode: Mode, *, seed: int, learning_rate: float, ramp: bool) -> Ramped:
    """Train the default on `case`, from its base batch on (`ramp`) or at its batch."""
    data = load(case.dataset, num_train=min(case.num_train or mode.num_train, mode.num_train))
    torch.manual_seed(seed)
    network = build(case.network, num_classes=data.num_classes, side=data.side)
    batch = case.base_batch_size if ramp else case.batch_size
    optimizer, order = _optimizer(case, network, batch, learning_rate), torch.Generator().manual_seed(seed + 1000)
    sizes: list[int] = []
    scales: list[float] = []
    for epoch in range(mode.epochs):
        for chosen in torch.randperm(len(data.train), generator=order).split(batch):
            if len(chosen) < batch:
                continue
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * decay(epoch, mode.epochs)
            optimizer.zero_grad()
            for shard in chosen.chunk(PARTS):
                loss = F.cross_entropy(network(data.train.images[shard]), data.train.labels[shard])
                (loss / PARTS).backward()
            optimizer.step()
            sizes.append(batch)
            scales.append(optimizer.telemetry().get("gradient_noise_scale", math.nan))
        known = [scale for scale in scales if not math.isnan(scale)]
        if ramp and batch < case.batch_size and known and statistics.median(known) >= batch:
            batch, scales, state = 2 * batch, [], optimizer.state_dict()
            optimizer.close()
            optimizer = _optimizer(case, network, batch, learning_rate)
            optimizer.load_state_dict(state)  # as a job that resumes with another batch
    time, rank_time = cost(sizes, case.base_batch_size)
    tested = accuracy(network, data.val), accuracy(network, data.test)
    return Ramped(*tested, len(sizes), time, rank_time, tuple(dict.fromkeys(sizes)))


def _optimizer(case: Case, network: torch.nn.Module, batch: int, learning_rate: float) -> TulaOptimizer:
    at_batch = replace(case, batch_size=batch, world_size=PARTS)
    found = prepare(DEFAULT, at_batch, network, learning_rate=learning_rate, steps_per_epoch=1).optimizer
    assert isinstance(found, TulaOptimizer)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run ramp and default on the cases of `--quick` and print both; `argv` is the command line by default."""
    parser = argparse.ArgumentParser(prog="experiments.generalization.ramp", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", metavar="CASES", help="names of cases, separated by commas")
    parser.add_argument("--smoke", action="store_true", help="one tiny case, in seconds: only shows that it works")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    mode = MODES["quick"].smoke() if arguments.smoke else MODES["quick"]
    rates = picked_rates()
    found: dict[str, object] = {}
    for case in mode.cases[: 1 if arguments.smoke else None]:
        if arguments.only and case.name not in arguments.only.split(","):
            continue
        for name, ramp in (("ramp", True), ("default", False)):
            rate = rates.get(case.name, 0.05)
            runs = [train(case, mode, seed=s, learning_rate=rate, ramp=ramp) for s in range(arguments.seeds)]
            tests = [run.test for run in runs]
            figures = {
                "test": statistics.fmean(tests),
                "test.sd": statistics.stdev(tests) if len(tests) > 1 else 0.0,
                **{key: statistics.fmean(getattr(run, key) for run in runs) for key in ("steps", "time", "rank_time")},
            }
            found |= {f"{case.name}.{name}.{key}": value for key, value in figures.items()}
            found[f"{case.name}.{name}.batches"] = [list(run.batches) for run in runs]
            said = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
            print(f"{case.name:26s} {name:8s} {said} {runs[0].batches}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({**found, "seeds": arguments.seeds, **provenance()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
