"""Optuna's TPE: three runs at random, as many as our baselines get, and three by its model."""

from __future__ import annotations

import optuna
from black_box import At, answer

optuna.logging.set_verbosity(optuna.logging.ERROR)
MOST_ASKED = 200
"""Suggestions, with those of a configuration that has run, which count as no run."""


# user
def search(measure, sizes: At, runs: int, seed: int) -> dict[At, float]:  # type: ignore[no-untyped-def]
    """Ask, measure and report."""
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=3))
    ran: dict[At, float] = {}
    for _ in range(MOST_ASKED):
        if len(ran) == runs:
            break
        trial = study.ask()
        at = (trial.suggest_int("cluster", 0, sizes[0] - 1), trial.suggest_int("batch", 0, sizes[1] - 1))
        place, value = (at, ran[at]) if at in ran else measure(at)
        study.tell(trial, value)
        ran[place] = value
    return ran


# end


if __name__ == "__main__":
    answer(search, search)
