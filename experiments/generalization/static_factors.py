"""Figures 6, 7 and 8 of the paper on two small networks: static factors, thresholds, and one run over its epochs.

    python -m experiments.generalization.static_factors [--seeds N] [--workers N] [--json FILE] [--out DIR] [--smoke]

Figure 7: factors 2, 4, 8 and 16 on steps whose gradient variability (equation 5) is below delta = 0.5, against the
large batch alone. Figure 8: the same at delta 0.2 and 0.8. Figure 6: variability and test accuracy over the epochs of
one run of the large batch. Base rates are those that `results/quick.md` picked. Keys:
`static.NETWORK.DELTA.FACTOR.test` (mean over seeds, percent) and `.scaled_share`, `static.NETWORK.lbt.test`;
`variability.NETWORK.spike`, the largest variability in the epoch of the first decay over the median of the largest in
the three epochs before.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.support.report import provenance
from experiments.generalization.campaign import Campaign, Job
from experiments.generalization.cases import MODES, Case, Mode
from experiments.generalization.methods import METHODS, Method
from experiments.generalization.train import Result, decay, train

CASES = ((Case("digits", "vgg", 256, 4), 0.05), (Case("digits", "residual", 256, 4), 0.02))
FACTORS = (2.0, 4.0, 8.0, 16.0)
DELTAS = (0.2, 0.5, 0.8)
LBT = METHODS[0]
MODE = replace(MODES["quick"], seeds=3)


class Epoch(NamedTuple):
    """One epoch of figure 6; `median` and `largest` are of equation 5, `test` is in percent."""

    epoch: int
    rate_factor: float
    median: float
    largest: float
    test: float


def static(delta: float, factor: float) -> Method:
    """Equation 8 with these constants."""
    options = {"policy": "static", "delta": delta, "static_scale": factor}
    return Method(f"delta {delta:g}, x{factor:g}", "tula", "paper", options)


def over_epochs(case: Case, rate: float, mode: Mode) -> list[Epoch]:
    """Figure 6: one run of the large batch."""
    found: list[Epoch] = []

    def keep(epoch: int, test: float, variability: Sequence[float]) -> None:
        found.append(Epoch(epoch, decay(epoch, mode.epochs), statistics.median(variability), max(variability), test))

    train(case, LBT, mode, seed=0, learning_rate=rate, after_epoch=keep)
    return found


def spike_at_decay(epochs: Sequence[Epoch]) -> float:
    """The largest variability in the epoch of the first decay, over what was usual before; NaN with too few epochs."""
    first = next((e.epoch for e in epochs if e.rate_factor < 1.0), 0)
    before = [e.largest for e in epochs[max(0, first - 3) : first]]
    return epochs[first].largest / statistics.median(before) if before else float("nan")


def factor_figures(name: str, results: Sequence[Result]) -> dict[str, float]:
    """Accuracy and share of scaled steps of each method, means over seeds."""
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


def markdown(values: dict[str, float], runs: dict[str, list[Epoch]], factors: Sequence[float], seeds: int) -> str:
    """The tables of figures 7 and 8, and of figure 6."""
    lines = [f"Test accuracy, %, mean ± standard deviation of {seeds} seeds; share of scaled steps.", ""]
    heads = ["network", "delta", "large batch", *(f"x{factor:g}" for factor in factors)]
    lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in runs:
        lbt = f"{values[f'static.{name}.lbt.test']:.1f} ± {values[f'static.{name}.lbt.test_sd']:.1f}"
        for delta in DELTAS:
            keys = [f"static.{name}.{delta:g}.{factor:g}" for factor in factors]
            cells = [
                f"{values[f'{key}.test']:.1f} ± {values[f'{key}.test_sd']:.1f}; {values[f'{key}.scaled_share']:.0%}"
                for key in keys
            ]
            lines.append(f"| {' | '.join([name, f'{delta:g}', lbt, *cells])} |")
    for name, epochs in runs.items():
        lines += ["", f"{name}, large batch, seed 0: rate factor, variability (median, largest), test accuracy.", ""]
        lines += ["| epoch | rate | median | largest | test |", "|---|---|---|---|---|"]
        lines += [
            f"| {e.epoch + 1} | {e.rate_factor:g} | {e.median:.2f} | {e.largest:.2f} | {e.test:.1f} |" for e in epochs
        ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Run and report; `argv` is the command line by default."""
    parser = argparse.ArgumentParser(prog="experiments.generalization.static_factors", description=__doc__)
    parser.add_argument("--seeds", type=int, default=MODE.seeds)
    parser.add_argument("--workers", type=int, default=1, help="runs that train at once, on one thread each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write static.md and static.json here")
    parser.add_argument("--smoke", action="store_true", help="few short runs: only shows that it works")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    factors: Sequence[float] = FACTORS
    mode = replace(MODE, seeds=arguments.seeds)
    if arguments.smoke:
        mode, factors = replace(mode, seeds=1, epochs=4), FACTORS[:1]
    campaign = Campaign(workers=arguments.workers)
    values: dict[str, float] = {}
    runs: dict[str, list[Epoch]] = {}
    for case, rate in CASES:
        methods = [LBT, *(static(delta, factor) for delta in DELTAS for factor in factors)]
        jobs = [Job(case, method, seed, rate) for method in methods for seed in range(mode.seeds)]
        values |= factor_figures(case.network, campaign.run(jobs, mode))
        runs[case.network] = over_epochs(case, rate, mode)
        values[f"variability.{case.network}.spike"] = spike_at_decay(runs[case.network])
    text = markdown(values, runs, factors, mode.seeds)
    print(text)
    document: dict[str, Any] = {**values, "seeds": mode.seeds, "torch": torch.__version__} | provenance()
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "static.md").write_text(text)
        (arguments.out / "static.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
