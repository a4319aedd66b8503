"""Runs a mode's cases, methods and seeds, and keeps each result, so that an interrupted campaign can resume."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from experiments.generalization.cases import BASE_BATCH_SIZE, Case, Mode
from experiments.generalization.methods import METHODS, SMALL, Method, multiplier
from experiments.generalization.train import Result, train


class Campaign:
    """Results by case, method, seed and rate; with a `path`, kept as one JSON object a line."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known: dict[tuple[str, str, int, float], Result] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                self._keep(Result(**json.loads(line)))

    def _keep(self, result: Result) -> None:
        self._known[result.case, result.method, result.seed, result.learning_rate] = result

    @property
    def results(self) -> list[Result]:
        """All results known."""
        return list(self._known.values())

    def run(self, case: Case, method: Method, mode: Mode, seed: int, learning_rate: float) -> Result:
        """One result, trained unless it is known."""
        key = case.name, method.name, seed, learning_rate
        if key not in self._known:
            result = train(case, method, mode, seed=seed, learning_rate=learning_rate)
            self._keep(result)
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps(result.row()) + "\n")
        return self._known[key]


def base_case(case: Case) -> Case:
    """The small batch that `case` is measured against."""
    return Case(case.dataset, case.network, BASE_BATCH_SIZE, 1)


def tune_base_rate(campaign: Campaign, case: Case, mode: Mode) -> float:
    """The learning rate of the base batch with the best validation accuracy, one seed each, the same grid for all."""
    small = base_case(case)
    runs = [campaign.run(small, SMALL, mode, 0, rate) for rate in mode.learning_rates]
    return max(runs, key=lambda result: result.validation).learning_rate


def run_mode(mode: Mode, campaign: Campaign, *, only: Iterable[str] | None = None) -> dict[str, list[Result]]:
    """Results by case name, including the small batch; `only` names the methods to run (all by default).

    Seed by seed, so that an interrupted campaign has run all methods on the same seeds.
    """
    wanted = None if only is None else set(only)
    rates = {case.name: tune_base_rate(campaign, case, mode) for case in mode.cases}
    by_case: dict[str, list[Result]] = {case.name: [] for case in mode.cases}
    for seed in range(mode.seeds):
        for case in mode.cases:
            rate = rates[case.name]
            found = by_case[case.name]
            found.append(campaign.run(base_case(case), SMALL, mode, seed, rate))
            for method in methods_of(mode, case):
                if wanted is None or method.name in wanted:
                    found.append(campaign.run(case, method, mode, seed, rate))
                    last = found[-1]
                    print(
                        f"{case.name:24s} {method.name:15s} seed {seed} test {last.test:5.1f} ({last.cpu_s:.1f} s)",
                        flush=True,
                    )
    return by_case


def methods_of(mode: Mode, case: Case) -> list[Method]:
    """The mode's methods and the hand-tuned multipliers for this batch."""
    methods = [method for method in METHODS if mode.ablations or method.role != "ablation"]
    return methods + [multiplier(share * case.batch_size / BASE_BATCH_SIZE) for share in mode.shares]
