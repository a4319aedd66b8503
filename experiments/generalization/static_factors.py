"""Reproduces figures 6 to 8 of the paper on two small networks: static factors, thresholds, and the steps of one run.

    python -m experiments.generalization.static_factors [--seeds N] [--workers N] [--json FILE] [--out DIR] [--smoke]

Figure 7 compares the large batch alone with factors of 2, 4, 8 and 16 on steps whose gradient variability (equation 5)
is below delta = 0.5. Figure 8 shows the same for delta = 0.2 and 0.8. Figure 6 shows the variability of every step and
the test accuracy after every epoch of one run of the large batch, in `static-steps.csv` and as a picture with the
decays of the learning rate. The base rates come from `results/quick.json`. The keys `static.NETWORK.DELTA.FACTOR.test`
and `static.NETWORK.lbt.test` are test accuracies in percent (means over seeds), and `.scaled_share` is the share of
scaled steps. `variability.NETWORK.spike` is the largest variability in the epoch of the first decay, divided by the
median of the largest variabilities in the three preceding epochs.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.support.report import provenance
from experiments.generalization.campaign import Campaign, Job, picked_rates
from experiments.generalization.cases import MODES, Case, Mode
from experiments.generalization.methods import METHODS, Method
from experiments.generalization.plots import write_steps
from experiments.generalization.train import Result, decay, train
from tula_agent.scaling import Static

CASES = (Case("digits", "vgg", 256, 4), Case("digits", "residual", 256, 4))
FACTORS = (2.0, 4.0, 8.0, 16.0)
DELTAS = (0.2, 0.5, 0.8)
LBT = METHODS[0]
MODE = replace(MODES["quick"], seeds=3)


class Step(NamedTuple):
    """One step of figure 6; `variability` is equation 5, and `test` is the test accuracy after its epoch in percent."""

    network: str
    epoch: int
    step: int
    rate_factor: float
    variability: float
    test: float


def static(delta: float, factor: float) -> Method:
    """Return the method of equation 8 with the given constants."""
    return Method(f"delta {delta:g}, x{factor:g}", "tula", "paper", {"policy": Static(factor, delta=delta)})


def over_steps(case: Case, rate: float, mode: Mode) -> list[Step]:
    """Train the large batch once; return the steps for figure 6."""
    found: list[Step] = []

    def keep(epoch: int, test: float, variability: Sequence[float]) -> None:
        for value in variability:  # the first step has no variability
            found.append(Step(case.network, epoch, len(found) + 1, decay(epoch, mode.epochs), value, test))

    train(case, LBT, mode, seed=0, learning_rate=rate, after_epoch=keep)
    return found


def spike_at_decay(steps: Sequence[Step]) -> float:
    """Return the spike of variability at the first decay (see the module's docstring), or NaN with too few epochs."""
    largest: dict[int, float] = {}
    for step in steps:
        largest[step.epoch] = max(largest.get(step.epoch, 0.0), step.variability)
    first = next((step.epoch for step in steps if step.rate_factor < 1.0), 0)
    before = [value for epoch, value in largest.items() if first - 3 <= epoch < first]
    return largest[first] / statistics.median(before) if before else float("nan")


def factor_figures(name: str, results: Sequence[Result]) -> dict[str, float]:
    """Return the accuracy and the share of scaled steps of each method, as means over seeds."""
    values: dict[str, float] = {}
    for method in dict.fromkeys(result.method for result in results):
        of_method = [result for result in results if result.method == method]
        delta, _, factor = method.removeprefix("delta ").partition(", x")
        key = f"static.{name}.{f'{delta}.{factor}' if factor else 'lbt'}"
        values[f"{key}.test"] = statistics.fmean(result.test for result in of_method)
        values[f"{key}.test_sd"] = statistics.pstdev(result.test for result in of_method)
        if factor:
            values[f"{key}.scaled_share"] = statistics.fmean(result.scaled_share for result in of_method)
    return values


def markdown(values: dict[str, float], factors: Sequence[float], seeds: int) -> str:
    """Return a Markdown table with the data of figures 7 and 8."""
    lines = [f"Test accuracy, %, mean ± standard deviation of {seeds} seeds; share of scaled steps.", ""]
    heads = ["network", "delta", "large batch", *(f"x{factor:g}" for factor in factors)]
    lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in (case.network for case in CASES):
        lbt = f"{values[f'static.{name}.lbt.test']:.1f} ± {values[f'static.{name}.lbt.test_sd']:.1f}"
        for delta in DELTAS:
            keys = [f"static.{name}.{delta:g}.{factor:g}" for factor in factors]
            cells = [
                f"{values[f'{key}.test']:.1f} ± {values[f'{key}.test_sd']:.1f}; {values[f'{key}.scaled_share']:.0%}"
                for key in keys
            ]
            lines.append(f"| {' | '.join([name, f'{delta:g}', lbt, *cells])} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Run all methods and write the report; by default, `argv` is the command line."""
    parser = argparse.ArgumentParser(prog="experiments.generalization.static_factors", description=__doc__)
    parser.add_argument("--seeds", type=int, default=MODE.seeds)
    parser.add_argument("--workers", type=int, default=1, help="number of concurrent training runs (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for static.md, static.json and the steps")
    parser.add_argument(
        "--smoke", action="store_true", help="make a few short runs, only to check that the program works"
    )
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    factors: Sequence[float] = FACTORS
    mode = replace(MODE, seeds=arguments.seeds)
    if arguments.smoke:
        mode, factors = replace(mode, seeds=1, epochs=4), FACTORS[:1]
    campaign = Campaign(workers=arguments.workers)
    values: dict[str, float] = {}
    steps: list[Step] = []
    for case in CASES:
        rate = picked_rates()[case.name]
        methods = [LBT, *(static(delta, factor) for delta in DELTAS for factor in factors)]
        jobs = [Job(case, method, seed, rate) for method in methods for seed in range(mode.seeds)]
        values |= factor_figures(case.network, campaign.run(jobs, mode))
        values[f"static.{case.network}.rate"] = rate
        run = over_steps(case, rate, mode)
        values[f"variability.{case.network}.spike"] = spike_at_decay(run)
        steps += run
    text = markdown(values, factors, mode.seeds)
    print(text)
    document: dict[str, Any] = {**values, "seeds": mode.seeds, "torch": torch.__version__} | provenance()
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "static.md").write_text(text)
        (arguments.out / "static.json").write_text(json.dumps(document, indent=1) + "\n")
        write_steps([step._asdict() for step in steps], arguments.out / "static-steps.png")
        with (arguments.out / "static-steps.csv").open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(Step._fields)
            table.writerows([*step[:4], f"{step.variability:.4g}", f"{step.test:.4g}"] for step in steps)


if __name__ == "__main__":
    main()
