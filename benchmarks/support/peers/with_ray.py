"""Ray Tune with its Bayesian search: three runs at random, three by its model; the script under `Tuner`."""

from __future__ import annotations

from black_box import At, answer
from ray import tune
from ray.tune.search import ConcurrencyLimiter
from ray.tune.search.bayesopt import BayesOptSearch

MOST_ASKED = 200


# user
def searcher(sizes: At, seed: int) -> BayesOptSearch:
    """Over the two axes."""
    space = {"cluster": (0, sizes[0] - 1e-9), "batch": (0, sizes[1] - 1e-9)}
    repeats = {"skip_duplicate": False, "patience": MOST_ASKED}
    return BayesOptSearch(space, metric="s", mode="min", random_search_steps=3, random_state=seed, **repeats)


# end


def replay(measure, sizes: At, runs: int, seed: int) -> dict[At, float]:  # type: ignore[no-untyped-def]
    """Ask the search alone: a trial of a table needs no process."""
    asked, ran = searcher(sizes, seed), {}
    for number in range(MOST_ASKED):
        if len(ran) == runs:
            break
        wanted = asked.suggest(str(number))
        at = (int(wanted["cluster"]), int(wanted["batch"]))
        place, value = measure(at)
        asked.on_trial_complete(str(number), {"s": value, "training_iteration": 1})
        ran[place] = value
    return ran


# user
def search(measure, sizes: At, runs: int, seed: int) -> dict[At, float]:  # type: ignore[no-untyped-def]
    """One trial after another."""

    def objective(config):  # type: ignore[no-untyped-def]
        return {"s": measure((int(config["cluster"]), int(config["batch"])))[1]}

    algorithm = ConcurrencyLimiter(searcher(sizes, seed), max_concurrent=1)
    tuner = tune.Tuner(objective, tune_config=tune.TuneConfig(search_alg=algorithm, num_samples=runs))
    trials = [(result.config, result.metrics) for result in tuner.fit()]
    return {(int(at["cluster"]), int(at["batch"])): found["s"] for at, found in trials if found and "s" in found}


# end


if __name__ == "__main__":
    answer(replay, search)
