"""Tests whether the product's batch schedule saves time and is as accurate as the constant recommended batch.

    python -m experiments.generalization.ramp --only stdlib/transformer/256@1024 --epochs 64 --json results/ramp.json

For each network and data set of `--quick`, the program takes these steps:

1. It chooses the constant batch as `guarded.py` does: from a profile, with the service's own `balanced`, and on the
   assumption that time falls as 1 / B and every batch costs the same.
2. It trains with the default at this batch, and passes the noise scale of the first seed's training run to the
   service's own `Ramps`.
3. If `Ramps` returns stages, it trains with the default in these stages, with the same seeds, base rate and examples.
   It changes stages in the same way as a job that resumes with another batch.

Cases, seeds, base rates and test data are those of `--quick`. The number of steps of a training run is taken as its
time.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.support.report import provenance
from experiments.generalization.campaign import picked_rates
from experiments.generalization.cases import MODES, Case, Mode
from experiments.generalization.data import load
from experiments.generalization.guarded import DEFAULT, goal_and_estimates, profile
from experiments.generalization.methods import prepare
from experiments.generalization.networks import build
from experiments.generalization.train import accuracy, decay
from tula_agent.scaling import TulaOptimizer
from tula_service.analysis.scaling import noise_curve
from tula_service.analysis.schedule import Ramps
from tula_service.perfmodel.choice import choose

RANKS = 4
"""The number of parts of every batch, which have separate batch statistics, and between which noise is measured."""
Stages = Sequence[tuple[float, int]]
"""The start of each stage, as a share of all examples, and the stage's global batch."""


@dataclass(frozen=True)
class Trained:
    """A training run's accuracies on validation and test data in percent, and its noise scale by step, in examples."""

    validation: float
    test: float
    noise: tuple[float, ...]


def train(case: Case, mode: Mode, stages: Stages, *, seed: int, learning_rate: float) -> Trained:
    """Train the default on `case` in the given stages; the rate decays with the share of examples processed."""
    data = load(case.dataset, num_train=min(case.num_train or mode.num_train, mode.num_train))
    torch.manual_seed(seed)
    network = build(case.network, num_classes=data.num_classes, side=data.side)
    total = len(data.train) * mode.epochs
    stream = _examples(len(data.train), torch.Generator().manual_seed(seed + 1000))
    optimizer = _optimizer(case, network, stages[0][1], learning_rate)
    noise: list[float] = []
    example, current = 0, 0
    while example + stages[current][1] <= total:
        batch = stages[current][1]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * decay(int(example / total * mode.epochs), mode.epochs)
        optimizer.zero_grad()
        for shard in torch.tensor([next(stream) for _ in range(batch)]).chunk(RANKS):
            loss = F.cross_entropy(network(data.train.images[shard]), data.train.labels[shard])
            (loss / RANKS).backward()
        optimizer.step()
        noise.append(optimizer.telemetry().get("gradient_noise_scale", math.nan))
        example += batch
        if current + 1 < len(stages) and example >= stages[current + 1][0] * total:
            current, state = current + 1, optimizer.state_dict()
            optimizer.close()
            optimizer = _optimizer(case, network, stages[current][1], learning_rate)
            optimizer.load_state_dict(state)
    return Trained(accuracy(network, data.val), accuracy(network, data.test), tuple(noise))


def _examples(number: int, order: torch.Generator) -> Iterator[int]:
    """Yield the index of each example once per pass, in a new order in every pass."""
    while True:
        yield from torch.randperm(number, generator=order).tolist()


def _optimizer(case: Case, network: torch.nn.Module, batch: int, learning_rate: float) -> TulaOptimizer:
    at_batch = replace(case, batch_size=batch, world_size=RANKS)
    prepared = prepare(DEFAULT[case.adam], at_batch, network, learning_rate=learning_rate, steps_per_epoch=1)
    assert isinstance(prepared.optimizer, TulaOptimizer)
    return prepared.optimizer


def compare(case: Case, mode: Mode, *, learning_rate: float, seeds: int) -> dict[str, object]:
    """Return a case's stages, and the number of steps and the accuracies without and (if there are any) with stages."""
    goal, estimates = goal_and_estimates(case, mode, profile(case, mode, learning_rate=learning_rate))
    chosen = choose(goal, estimates).chosen
    assert chosen is not None
    batch = chosen.configuration.global_batch_size
    fixed = [train(case, mode, [(0.0, batch)], seed=s, learning_rate=learning_rate) for s in range(seeds)]
    noise = fixed[0].noise
    examples = goal.training.dataset_size * goal.training.epochs
    curve = noise_curve("run", np.arange(len(noise)), noise, global_batch_size=batch, examples=examples)
    ramps = Ramps(curve.values, estimates, goal, relaunch_s=0.0)
    ramp = ramps.best() if curve.values else None
    figures: dict[str, object] = {
        "constant.batch": batch,
        "constant.steps": len(noise),
        "constant.test": statistics.fmean(run.test for run in fixed),
        "noise": [round(value) for value in ramps.least],
        "stages": [],
    }
    if ramp is None or len(ramp.stages) == 1:
        return figures
    parts = len(curve.values)
    stages = [(stage.first / parts, stage.estimate.configuration.global_batch_size) for stage in ramp.stages]
    ramped = [train(case, mode, stages, seed=s, learning_rate=learning_rate) for s in range(seeds)]
    gained = [after.test - before.test for after, before in zip(ramped, fixed, strict=True)]
    return figures | {
        "stages": stages,
        "ramp.steps": len(ramped[0].noise),
        "ramp.test": statistics.fmean(run.test for run in ramped),
        "gained": statistics.fmean(gained),
        "gained.sd": statistics.stdev(gained) if seeds > 1 else None,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Compare the schedule with a constant batch on the cases of `--quick`; by default, `argv` is the command line."""
    parser = argparse.ArgumentParser(prog="experiments.generalization.ramp", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--only", metavar="CASES", help="run only these cases (names separated by commas)")
    parser.add_argument(
        "--smoke", action="store_true", help="train one tiny case, only to check that the program works"
    )
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    mode = MODES["quick"].smoke() if arguments.smoke else replace(MODES["quick"], epochs=arguments.epochs)
    rates = picked_rates()
    rows: dict[str, object] = {}
    for case in mode.cases[: 1 if arguments.smoke else None]:
        if arguments.only and case.name not in arguments.only.split(","):
            continue
        rate = rates.get(case.name, 0.05)
        rows[case.name] = compare(case, mode, learning_rate=rate, seeds=arguments.seeds)
        print(case.name, json.dumps(rows[case.name]), flush=True)
    if arguments.json:
        document = {"rows": rows, "epochs": mode.epochs, "seeds": arguments.seeds, **provenance()}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
