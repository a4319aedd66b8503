"""Runs a mode's cases, methods and seeds, and stores each result, so that an interrupted campaign can be resumed."""

from __future__ import annotations

import json
import multiprocessing
import statistics
from collections.abc import Collection, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from experiments.generalization.cases import Case, Mode
from experiments.generalization.methods import Method, methods_for, multiplier, small_methods
from experiments.generalization.train import Result, train

FLAT = 1.0
"""Points of validation accuracy that a base rate may be below the best rate and still count as equally good."""
_MOST_EXTENSIONS = 6
_STORED = Path(__file__).parent / "results" / "quick.json"


def picked_rates() -> dict[str, float]:
    """Return the base learning rates in the stored report of `--quick`, by the name of the case."""
    rows = json.loads(_STORED.read_text(encoding="utf-8"))["rows"]
    return {row["case"]: float(row["learning_rate"]) for row in rows}


class Job(NamedTuple):
    """The settings of one training run."""

    case: Case
    method: Method
    seed: int
    learning_rate: float

    @property
    def key(self) -> tuple[str, str, int, float]:
        """Return the key under which the result is stored."""
        return self.case.name, self.method.name, self.seed, self.learning_rate


class Campaign:
    """Results by case, method, seed and rate; if `path` is given, they are stored there as one JSON object per line.

    `workers` is the number of processes that train concurrently, each with one thread.
    """

    def __init__(self, path: Path | None = None, *, workers: int = 1) -> None:
        self._path, self._workers = path, workers
        self._known: dict[tuple[str, str, int, float], Result] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                self._keep(Result(**json.loads(line)))

    def _keep(self, result: Result) -> None:
        self._known[result.case, result.method, result.seed, result.learning_rate] = result

    @property
    def results(self) -> list[Result]:
        """Return all results so far."""
        return list(self._known.values())

    def run(self, jobs: Sequence[Job], mode: Mode) -> list[Result]:
        """Return one result for each job; train the jobs that have no result yet."""
        wanted = list({job.key: job for job in jobs if job.key not in self._known}.values())
        if self._workers > 1 and len(wanted) > 1:
            context = multiprocessing.get_context("fork" if mode.device == "cpu" else "spawn")
            with ProcessPoolExecutor(
                self._workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
            ) as pool:
                for result in pool.map(_train, wanted, [mode] * len(wanted)):
                    self._add(result)
        else:
            for job in wanted:
                self._add(_train(job, mode))
        return [self._known[job.key] for job in jobs]

    def _add(self, result: Result) -> None:
        self._keep(result)
        print(f"{result.case:26s} {result.method:18s} seed {result.seed} test {result.test:5.1f}", flush=True)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(result.row()) + "\n")


def _train(job: Job, mode: Mode) -> Result:
    return train(job.case, job.method, mode, seed=job.seed, learning_rate=job.learning_rate)


class BaseRate(NamedTuple):
    """The base rate with the best validation accuracy, and the highest rate that is worse by at most FLAT points."""

    best: float
    upper: float


def tune_base_rate(campaign: Campaign, case: Case, method: Method, mode: Mode) -> BaseRate:
    """Choose the rate with the best mean validation accuracy at the small batch, or the highest rate if several tie.

    The mean is over the mode's tuning seeds. A grid with several rates is extended by factors of 2 while the best rate
    is at the edge of the grid. Raises RuntimeError if six extensions are not enough.
    """
    grid = list(mode.adam_rates if case.adam else mode.lars_rates if method.kind == "lars" else mode.rates)
    for _ in range(_MOST_EXTENSIONS):
        jobs = [Job(case.at_base(), method, seed, rate) for rate in grid for seed in range(mode.tuning_seeds)]
        runs = campaign.run(jobs, mode)
        means = {
            rate: statistics.fmean(run.validation for run in runs if run.learning_rate == rate) for rate in sorted(grid)
        }
        best = max(means, key=lambda rate: (means[rate], rate))
        upper = max(rate for rate in means if means[rate] >= means[best] - FLAT)
        if len(grid) == 1 or (best > min(grid) and upper < max(grid)):
            return BaseRate(best, upper)
        grid.append(min(grid) / 2 if best == min(grid) else max(grid) * 2)
    raise RuntimeError(
        f"the best base rate of {case.name} is still at the edge of the grid {sorted(grid)}: start with another grid"
    )


def run_mode(
    mode: Mode, campaign: Campaign, *, only: Collection[str] | None = None, upper: bool = False
) -> dict[str, list[Result]]:
    """Return the results by case name, including the small batch; `only` contains the methods to run (default: all).

    With `upper`, run the baselines and the default with the upper end of the flat optimum as base rate, if this rate
    differs from the best rate and the method uses a base rate. The runs are ordered by seed, so that an interrupted
    campaign has run all methods with the same seeds.
    """
    rates = {
        (case.name, method.name): tune_base_rate(campaign, case, method, mode)
        for case in mode.cases
        for method in small_methods(case)
        if only is None or any(m.tuned_as == method.name for m in methods_for(case) if m.name in only)
    }
    jobs: dict[str, list[Job]] = {}
    for seed in range(mode.upper_seeds if upper else mode.seeds):
        for case in mode.cases:
            small = small_methods(case)[0]
            base = rates.get((case.name, small.name))
            if base is None or (upper and base.best == base.upper):
                continue
            found = jobs.setdefault(case.name, [])
            found.append(Job(case.at_base(), small, seed, base.upper if upper else base.best))
            for method in list_methods(mode, case):
                wanted = only is None or method.name in only
                repeated = method.role in ("reference", "baseline", "default") and method.published_rate is None
                if wanted and (not upper or repeated):
                    rate = rates[case.name, method.tuned_as]
                    found.append(Job(case, method, seed, rate.upper if upper else rate.best))
    by_seed = sorted((job for found in jobs.values() for job in found), key=lambda job: job.seed)
    campaign.run(by_seed, mode)
    return {name: campaign.run(found, mode) for name, found in jobs.items()}


def list_methods(mode: Mode, case: Case) -> list[Method]:
    """Return the methods of the mode for this case, and the multipliers to try by hand for this batch."""
    methods = [method for method in methods_for(case) if mode.ablations or method.role != "ablation"]
    kind = "adamw" if case.adam else "sgd"
    return methods + [multiplier(share * case.batch_size / case.base_batch_size, kind) for share in mode.shares]
