"""Tests whether training at the batch that `balanced` recommends is as accurate as training at the base batch.

    python -m experiments.generalization.guarded --json results/guarded.json --runs results/quick-runs.jsonl

For each network and data set of `--quick` and of FURTHER, and each number in `--epochs`, the program takes these steps:

1. It trains with the default method for 128 steps at four times the base batch, and reads the noise scale and the
   reports of these steps as the service does.
2. It chooses a batch of 1 to 64 times the base batch with the service's `balanced` objective and the guard that follows
   from these reports. Time is assumed to fall as 1 / B at equal cost, so `balanced` chooses the largest batch that the
   guard allows. This is the hardest test of the guard.
3. It trains with the default method at this batch, with one rank per base batch (at most four), and compares the
   accuracy with that of training at the base batch with the same seeds, base rate and epochs.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import tula_wire as wire
from benchmarks.support.report import provenance
from experiments.generalization.campaign import Campaign, Job, picked_rates, tune_base_rate
from experiments.generalization.cases import MODES, Case, Mode
from experiments.generalization.data import ImageSet, load
from experiments.generalization.methods import ADAM_METHODS, METHODS, Method, prepare, small_methods
from experiments.generalization.networks import build
from experiments.generalization.report import CaseReport, Interval, report_case
from tula_agent.scaling import TulaOptimizer
from tula_service.analysis.job_data import JobData, base_batch_size, build_goal
from tula_service.perfmodel.choice import choose
from tula_service.perfmodel.guard import AccuracyGuard
from tula_service.perfmodel.intervals import Interval as Range
from tula_service.perfmodel.objectives import Goal
from tula_service.perfmodel.pricing import Estimate, Training

PROFILE_RATIO = 4
MOST_DOUBLINGS, MOST_RANKS = 6, 4
FURTHER = {
    Case("glyphs", "resnet20", 512, 4, num_train=4096): 0.2,
    Case("glyphs", "residual", 512, 4): None,
    Case("glyphs", "depthwise", 512, 4): None,
}
"""Base rates of the cases that test only the guard; None means the rate of best validation accuracy at the base batch.

The cases were chosen on 2026-11-29, before any of them was trained as recommended.
"""
DEFAULT = {adam: next(m for m in (ADAM_METHODS if adam else METHODS) if m.role == "default") for adam in (False, True)}


@dataclass(frozen=True)
class Reports:
    """A profile's reports: the columns that the agent sends for a `TulaOptimizer`."""

    noise: tuple[float, ...]
    small_batch_size: float
    directions: bool


def profile(case: Case, mode: Mode, *, learning_rate: float) -> Reports:
    """Train the first steps at PROFILE_RATIO times the base batch; return the optimizer's reports."""
    data = _data(case, mode)
    at_batch = replace(case, batch_size=PROFILE_RATIO * case.base_batch_size, world_size=PROFILE_RATIO)
    torch.manual_seed(1_000_000)  # a seed that no training run uses
    network = build(case.network, num_classes=data.num_classes, side=data.side)
    method = DEFAULT[case.adam]
    optimizer = prepare(method, at_batch, network, learning_rate=learning_rate, steps_per_epoch=1).optimizer
    assert isinstance(optimizer, TulaOptimizer)
    noise: list[float] = []
    while len(noise) < mode.profile_steps:
        for batch in torch.randperm(len(data.train)).split(at_batch.batch_size):
            if len(batch) < at_batch.batch_size or len(noise) == mode.profile_steps:
                continue
            optimizer.zero_grad()
            for shard in batch.chunk(PROFILE_RATIO):
                loss = F.cross_entropy(network(data.train.images[shard]), data.train.labels[shard])
                (loss / PROFILE_RATIO).backward()
            optimizer.step()
            noise.append(optimizer.telemetry().get("gradient_noise_scale", math.nan))
    reported = optimizer.telemetry()
    return Reports(tuple(noise), reported["small_batch_size"], reported["directions"] == 1.0)


def choose_batch(case: Case, mode: Mode, reports: Reports) -> tuple[int, AccuracyGuard]:
    """Return the global batch that `balanced` chooses, and its guard, if larger batches are faster at equal cost."""
    goal, estimates = goal_and_estimates(case, mode, reports)
    chosen = choose(goal, estimates).chosen
    assert chosen is not None
    assert goal.guard is not None
    return chosen.configuration.global_batch_size, goal.guard


def goal_and_estimates(case: Case, mode: Mode, reports: Reports) -> tuple[Goal, list[Estimate]]:
    """Return the goal and estimates from which the service would choose if larger batches were faster at equal cost."""
    examples, base = len(_data(case, mode).train), case.base_batch_size
    spec = wire.JobSpec.model_validate(
        {
            "name": "guarded",
            "model": {"name": case.network, "optimizer": "adam" if case.adam else "momentum"},
            "dataset": {"size": examples},
            "epochs": mode.epochs,
            "cluster": {"max_nodes": 2**MOST_DOUBLINGS, "price": {"usd_per_node_hour": 1.0}},
            "batch": {"min_local_batch_size": base, "max_local_batch_size": base},
        }
    )
    candidates = [
        wire.Configuration(num_nodes=2**doublings, local_batch_size=base) for doublings in range(MOST_DOUBLINGS + 1)
    ]
    data = JobData(
        spec,
        "balanced",
        data_version=0,
        profiled_noise=[np.array(reports.noise)],
        small_batch_size=reports.small_batch_size,
        directions=reports.directions,
    )
    goal = build_goal(data, spec, "balanced", base_batch_size=base_batch_size(data, candidates))
    return goal, [_perfectly_scaling(c, goal.training) for c in candidates]


def _data(case: Case, mode: Mode) -> ImageSet:
    return load(case.dataset, num_train=min(case.num_train or mode.num_train, mode.num_train))


def _perfectly_scaling(configuration: wire.Configuration, training: Training) -> Estimate:
    """Return an estimate of one second per step on any number of nodes, at the same price for each node."""
    epoch = training.dataset_size / configuration.global_batch_size
    total = epoch * training.epochs
    step, time, cost = (Range(x, x, x) for x in (1.0, total, total * configuration.num_nodes))
    return Estimate(configuration, step, time, cost, Range(epoch, epoch, epoch), None)


@dataclass(frozen=True)
class Guarded:
    """One row of the table: the chosen batch, and its loss of test accuracy relative to the base batch, in points."""

    case: Case
    epochs: int
    guard: AccuracyGuard
    batch_size: int
    report: CaseReport

    @property
    def name(self) -> str:
        """Return the name of the row in tables and files."""
        return f"{self.case.at_base().name}, {self.epochs} epochs"

    @property
    def method(self) -> Method:
        """Return the default method or, if the base batch is recommended, the method for the base batch."""
        larger = self.batch_size > self.case.base_batch_size
        return DEFAULT[self.case.adam] if larger else small_methods(self.case)[0]

    @property
    def lost(self) -> Interval:
        """Return the accuracy of the base batch minus that of the recommended batch, paired by seed."""
        return self.report.paired(small_methods(self.case)[0].name, self.method.name)

    def row(self) -> dict[str, object]:
        """Return the figures of this row for a JSON file."""
        return {
            "batch": self.batch_size,
            "steps": self.guard.steps(self.batch_size),
            "noise_scale": self.guard.noise_scale,
            "base": self.report.test(small_methods(self.case)[0].name),
            "test": self.report.test(self.method.name),
            "lost": self.lost.mean,
            "lost.half": None if math.isnan(self.lost.half) else self.lost.half,
            "learning_rate": self.report.learning_rate,
        }


def guarded(case: Case, mode: Mode, campaign: Campaign, *, learning_rate: float, seeds: int) -> Guarded:
    """Profile one case, choose a batch for it, and train it at the chosen batch and at the base batch."""
    batch, guard = choose_batch(case, mode, profile(case, mode, learning_rate=learning_rate))
    at_batch = replace(case, batch_size=batch, world_size=min(MOST_RANKS, batch // case.base_batch_size))
    jobs = [Job(case.at_base(), small_methods(case)[0], seed, learning_rate) for seed in range(seeds)]
    if batch > case.base_batch_size:
        jobs += [Job(at_batch, DEFAULT[case.adam], seed, learning_rate) for seed in range(seeds)]
    return Guarded(case, mode.epochs, guard, batch, report_case(at_batch.name, campaign.run(jobs, mode)))


def table(rows: Sequence[Guarded]) -> str:
    """Return a Markdown table with a line for each row."""
    lines = [
        "| case | noise scale | batch | steps | base batch | recommended | lost |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        values = row.row()
        noise = "unknown" if row.guard.noise_scale is None else f"{row.guard.noise_scale:.0f}"
        lost = f"{row.lost.mean:+.1f} ± {row.lost.half:.1f}"
        lines.append(
            f"| {row.name} | {noise} | {row.batch_size} | {row.guard.steps(row.batch_size)} | {values['base']:.1f} | "
            f"{values['test']:.1f} | {lost} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print all rows; by default, `argv` is the command line."""
    parser = argparse.ArgumentParser(prog="experiments.generalization.guarded", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument(
        "--runs",
        type=Path,
        metavar="FILE",
        help="store runs in FILE, and skip stored runs (also those of --quick); other --epochs use separate files",
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1, help="number of concurrent training runs (1)")
    parser.add_argument("--epochs", type=int, nargs="+", default=[30])
    parser.add_argument(
        "--smoke", action="store_true", help="train two tiny cases, only to check that the program works"
    )
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    quick = MODES["quick"].smoke() if arguments.smoke else MODES["quick"]
    rates = picked_rates()
    rows: list[Guarded] = []
    tuning = Campaign(arguments.runs, workers=arguments.workers)
    for epochs in arguments.epochs:
        mode, campaign = replace(quick, epochs=epochs), tuning
        if epochs != quick.epochs:
            path = arguments.runs and arguments.runs.with_stem(f"{arguments.runs.stem}-{epochs}-epochs")
            campaign = Campaign(path, workers=arguments.workers)
        for case in mode.cases if arguments.smoke else (*mode.cases, *FURTHER):
            rate = rates.get(case.name) or FURTHER.get(case)
            if rate is None:
                rate = tune_base_rate(tuning, case, small_methods(case)[0], quick).best
            rows.append(guarded(case, mode, campaign, learning_rate=rate, seeds=arguments.seeds))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    losses = [row.lost.mean for row in rows if row.batch_size > row.case.base_batch_size]
    figures: dict[str, object] = {
        "lost.worst": max(losses, default=None),
        "lost.mean": statistics.fmean(losses) if losses else None,
        "cells": len(rows),
        "cells.larger_batch": len(losses),
        "cells.over_a_point": sum(loss > 1.0 for loss in losses),
    }
    print(table(rows) + json.dumps(figures))
    if arguments.json:
        document = figures | {"rows": {row.name: row.row() for row in rows}, "seeds": arguments.seeds} | provenance()
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
