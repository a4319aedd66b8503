"""Choosing by six runs: our search beside searches that know nothing of training, on the same measured workloads.

    python -m benchmarks.black_box [--grids FILE] [--json OUT] [--jobs N] [--smoke]

`random` runs six configurations and takes the best; `bayes` is Bayesian optimisation as CherryPick does it
(Alipourfard et al., NSDI 2017): a Gaussian process (Matern 5/2, fitted by scikit-learn) over the logarithms of nodes,
ranks and batch, three runs drawn at random, then whatever has the largest expected improvement, times its chance of
keeping the deadline. Both choose the best of what they ran. Keys are `<goal>.<search>.regret.mean` and `.within5`, as
`benchmarks.step_time` has them for ours, over workloads and seeds; a deadline that is broken counts in
`deadline.<search>.violations` and not in the regret.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Sequence
from functools import partial

import numpy as np
from scipy import special
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

from benchmarks.step_time import recommended
from benchmarks.support.grids import Placement, Workload, over_workloads, workloads_parser
from benchmarks.support.report import mean, print_table, write_json
from tula_service.perfmodel.choice import Goal, Limits, Offer, Training
from tula_wire.enums import Objective

GOALS = ("time", "cost", "deadline")
SEARCHES = ("random", "bayes", "tula")
RUNS, FIRST, SEEDS = 6, 3, 5
_EXAMPLES = 1e6
_DEADLINE = 1.5  # times the least time there is

Measured = dict[Placement, float]


def bayes(times: Measured, paid: Measured, deadline_s: float, dice: random.Random) -> Placement:
    """Six runs by expected improvement on the log of what is paid; the best that kept the deadline."""
    everything = sorted(times)
    at = np.log2([[c.num_nodes, c.world_size, c.local_batch_size] for c in everything])
    at = (at - at.mean(axis=0)) / np.maximum(at.std(axis=0), 1e-9)
    ran = dice.sample(range(len(everything)), min(FIRST, len(everything)))
    while len(ran) < min(RUNS, len(everything)):
        value, spread = _surrogate(at, ran, [math.log(paid[everything[i]]) for i in ran])
        kept = [math.log(paid[everything[i]]) for i in ran if times[everything[i]] <= deadline_s]
        gain = (min(kept) - value) / spread if kept else np.zeros(len(everything))
        promise = spread * (gain * special.ndtr(gain) + np.exp(-0.5 * gain**2) / math.sqrt(2.0 * math.pi))
        if math.isfinite(deadline_s):
            value, spread = _surrogate(at, ran, [math.log(times[everything[i]]) for i in ran])
            promise = promise * special.ndtr((math.log(deadline_s) - value) / spread)
        promise[ran] = -1.0
        ran.append(int(np.argmax(promise)))
    return _best([everything[i] for i in ran], times, paid, deadline_s)


def _surrogate(at: np.ndarray, ran: Sequence[int], value: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    kernel = ConstantKernel(1.0, (0.05, 20.0)) * Matern(np.ones(at.shape[1]), (0.2, 10.0), nu=2.5)
    process = GaussianProcessRegressor(kernel + WhiteKernel(1e-3, (1e-5, 0.1)), normalize_y=True, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        process.fit(at[list(ran)], np.asarray(value))
    found, spread = process.predict(at, return_std=True)
    return found, np.maximum(spread, 1e-6)


def drawn(times: Measured, paid: Measured, deadline_s: float, dice: random.Random) -> Placement:
    """The best of six drawn at random."""
    return _best(dice.sample(sorted(times), min(RUNS, len(times))), times, paid, deadline_s)


def ours(workload: Workload, goal: Goal) -> Placement:
    """What we recommend; where we say that nothing keeps the deadline, the fastest of what was run."""
    runs, choice = recommended(workload, goal)
    if choice.chosen is None:
        return min(runs, key=lambda c: workload.step_time_s[c] / c.global_batch_size)
    return choice.chosen.configuration  # type: ignore[return-value]


def _best(ran: Sequence[Placement], times: Measured, paid: Measured, deadline_s: float) -> Placement:
    kept = [c for c in ran if times[c] <= deadline_s]
    return min(kept, key=lambda c: paid[c]) if kept else min(ran, key=lambda c: times[c])


def compare(workload: Workload, seeds: int = SEEDS) -> dict[tuple[str, str], list[tuple[float, bool]]]:
    """By goal and search: (regret, whether the deadline was broken) of each seed."""
    times: Measured = {c: workload.step_time_s[c] * _EXAMPLES / c.global_batch_size for c in workload.candidates}
    spent: Measured = {c: times[c] * c.world_size for c in workload.candidates}
    found = {}
    for name in GOALS:
        deadline_s = _DEADLINE * min(times.values()) if name == "deadline" else math.inf
        paid = times if name == "time" else spent
        best = min(paid[c] for c in paid if times[c] <= deadline_s)
        limits = Limits(deadline_s=deadline_s) if name == "deadline" else Limits()
        objective: Objective = "time" if name == "time" else "cost"
        goal = Goal(objective, Training(_EXAMPLES), {"default": Offer(usd_per_rank_hour=3600.0)}, limits)
        chosen = {
            "random": [drawn(times, paid, deadline_s, random.Random(seed)) for seed in range(seeds)],
            "bayes": [bayes(times, paid, deadline_s, random.Random(seed)) for seed in range(seeds)],
            "tula": [ours(workload, goal)],
        }
        for search, choices in chosen.items():
            found[name, search] = [(paid[c] / best - 1.0, times[c] > deadline_s) for c in choices]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; answers the exit status."""
    parser = workloads_parser("black_box", __doc__)
    options, pairs = over_workloads(parser, compare, arguments, smoke=partial(compare, seeds=1))
    results = [found for _, found in pairs]
    figures: dict[str, float] = {}
    rows = []
    for name in GOALS:
        for search in SEARCHES:
            cases = [case for found in results for case in found[name, search]]
            kept = [regret for regret, broken in cases if not broken]
            figures[f"{name}.{search}.regret.mean"] = mean(kept)
            figures[f"{name}.{search}.regret.within5"] = mean([float(regret <= 0.05) for regret in kept])
            figures[f"{name}.{search}.violations"] = mean([float(broken) for _, broken in cases])
            parts = ("regret.mean", "regret.within5", "violations")
            rows.append([name, search, *(f"{100 * figures[f'{name}.{search}.{part}']:.1f} %" for part in parts)])
    print_table(f"choices after {RUNS} runs", ["goal", "search", "regret: mean", "within 5 %", "broken"], rows)
    write_json(options.json, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
