"""Measures errors, coverage, regret and fit time by replaying measured workloads with the product's planner and model.

    python -m benchmarks.step_time [--grids FILE] [--sync FILE]... [--json OUT] [--jobs N] [--only SOURCE]
                                   [--without SOURCE] [--noise SD] [--draws N] [--smoke]

Results with `--only` or `--without` are not a held-out test, because some constants of the search and of the residual
were chosen on these grids (docs/model.md lists these constants). Runs report the split of a step into compute and
exposed communication if the source contains it (`--sync`). `random4` and `random6` are plans of 4 and 6 random runs,
one of them on the largest cluster, in five draws. For each plan, `median`, `p90` and `geometric` (the geometric mean)
summarise the median errors of the workloads, and `coverage` is the mean over workloads. `by_configuration.*` cover all
configurations of all workloads, and `by_configuration.coverage.extrapolated` covers only configurations outside the
measured range. `regret.*.geometric` is the geometric mean of 1 + regret, minus 1. For `columns`, a launch measures up
to three batches of a cluster; `columns.launches` and `columns.batches` count the launches and batches that the planner
requested, and a cluster that is launched twice counts twice. `columns1`, `columns2` and `columns3` are the errors on
the other clusters after launches that measure every batch: on the largest cluster, on the largest and the smallest
cluster, and on these two and a cluster between them. For `noise.*`, each run's step time differs from the true step
time by a random factor, whose logarithm has the standard deviation `--noise`, in `--draws` draws. The regret is
computed from the true times, and `noise.coverage.chosen` is the share of choices for least time or cost whose 90 %
interval contains the true time. For every mean M, M.low and M.high are the ends of a 90 % interval from resampled
workloads. `plan_ms.4096` and `plan_mib.4096` are the time and memory that making the first plan of a job with 4,096
candidates takes. All figures are fractions (0.04 = 4 %) except `plan_ms`, `plan_mib`, `fit_ms`, launches and runs.
"""

from __future__ import annotations

import functools
import time
import tracemalloc
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from benchmarks.support.grids import Placement, Workload, end_launches, middle_launch, over_workloads, workloads_parser
from benchmarks.support.report import (
    bootstrap,
    geometric_mean,
    mean,
    median,
    percentile,
    print_table,
    write_json,
)
from tula_service.perfmodel.choice import Choice, recommend
from tula_service.perfmodel.objectives import Goal
from tula_service.perfmodel.planner import PlanBudget, corner_design, design, plan
from tula_service.perfmodel.pricing import Limits, Offer, Training
from tula_service.perfmodel.priors import Priors
from tula_service.perfmodel.step_time_model import StepTimeModel, fit_step_time
from tula_service.perfmodel.variants import Launch, find_launch, find_launches
from tula_wire.configurations import Configuration
from tula_wire.enums import Objective, StepTimeForm

RANDOM = {"random4": 4, "random6": 6}
PLANS = ("ring", "partial", *RANDOM, "adaptive4", "adaptive6", "full")
PLANNED = ("adaptive4", "adaptive6")
LAUNCHES = ("columns1", "columns2", "columns3")  # names in the stored results
NOISY = ("time", "cost", "best_num_nodes")
CHOICES = ("time", "cost", "deadline", "best_num_nodes", "best_num_nodes_planned")
_DATASET = 1e6
_DEADLINE = 1.5
_RUNS = 6
_SAME_BATCH = 1.03
_TIMED_CANDIDATES = 64
_NOISE, _DRAWS = 0.03, 3
_RANDOM_DRAWS = 5
_LEAST_ERROR = 1e-4  # smallest error in a geometric mean
_PLANNED_SIDE = 64  # number of clusters, and of batches
_NEVER = 1e30  # factor on the number of steps with which a candidate may be profiled but is never chosen


class HeldOut(NamedTuple):
    """Predictions for the configurations that were not profiled.

    `errors` are relative. `inside` is 1.0 if the 90 % interval contains the measured time, and `extrapolated` is 1.0 if
    the configuration is outside the measured range; otherwise both are 0.0.
    """

    errors: Sequence[float] = ()
    inside: Sequence[float] = ()
    extrapolated: Sequence[float] = ()

    def __add__(self, other: tuple[Sequence[float], ...]) -> HeldOut:  # type: ignore[override]
        """Return the predictions of both instances together."""
        return HeldOut(*([*ours, *theirs] for ours, theirs in zip(self, other, strict=True)))


@dataclass
class Figures:
    """The results of one workload, such as the errors and coverage of held-out predictions, and the regrets."""

    workload: str
    grid: str
    error: dict[str, float] = field(default_factory=dict)
    coverage: dict[str, float] = field(default_factory=dict)
    configurations: dict[str, HeldOut] = field(default_factory=dict)
    regret: dict[str, float] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    runs: dict[str, float] = field(default_factory=dict)
    launch_regret: dict[str, float] = field(default_factory=dict)
    noisy: dict[str, float] = field(default_factory=dict)
    noisy_coverage: float = float("nan")
    launches: float = 0.0
    launched_batches: float = 0.0
    violated: float = 0.0
    promised: float = 1.0
    fit_ms: float = 0.0


def profile(
    workload: Workload,
    goal: Goal,
    *,
    runs: int,
    share_launches: bool = False,
    launches: list[Launch] | None = None,
) -> list[Placement]:
    """Return the configurations that the planner requests, in order; their measurements come from the table.

    `runs` is the largest number of runs, or of launches with `share_launches`. All launches are appended to `launches`;
    a cluster that is launched twice appears there twice.
    """
    done: list[Placement] = []
    model: StepTimeModel | None = None
    while True:
        budget = PlanBudget(max_runs=runs, share_launches=share_launches)
        step = plan("adaptive", workload.candidates, model, goal=goal, budget=budget)
        if step.stop_reason is not None or not step.runs:
            return done
        asked = [run.configuration for run in step.runs]
        if share_launches:  # one launch at a time, as in `tula tune`
            asked = [c for c in asked if find_launch(c) == find_launch(asked[0])]
        done += asked  # type: ignore[arg-type]
        if launches is not None:
            launches += find_launches(asked)
        model = fit_step_time(workload.measure(done), candidates=workload.candidates)


def designed(workload: Workload, runs: int) -> list[Placement]:
    """Return the configurations with which the planner always starts: those that say most about all others."""
    return design(workload.candidates, Priors(), runs)  # type: ignore[return-value]


def corners(workload: Workload, *, two: bool = False) -> list[Placement]:
    """Return the configurations of the search `partial` or, with `two`, of the search `paper`."""
    return corner_design(workload.candidates, two=two)  # type: ignore[return-value]


def at_random(workload: Workload, runs: int, draw: int) -> list[Placement]:
    """Return configurations drawn at random, the first of them on the largest cluster."""
    dice = np.random.default_rng([draw, runs, zlib.crc32(workload.name.encode())])
    shuffled = [workload.candidates[row] for row in dice.permutation(len(workload.candidates))]
    largest = max(c.world_size for c in shuffled)
    first = next(c for c in shuffled if c.world_size == largest)
    return [first, *(c for c in shuffled if c != first)][:runs]


def held_out(workload: Workload, profiled: Sequence[Placement], form: StepTimeForm = "overlap") -> HeldOut:
    """Fit a model to `profiled`; return its predictions for all other configurations."""
    seen = set(profiled)
    rest = [c for c in workload.candidates if c not in seen]
    if not rest:
        return HeldOut()
    model = fit_step_time(workload.measure(profiled), form=form, candidates=workload.candidates)
    predicted = model.predict(rest)
    actual = np.array([workload.step_time_s[c] for c in rest])
    inside = (predicted.low_s <= actual) & (actual <= predicted.high_s)
    errors = np.abs(predicted.mean_s / actual - 1.0)
    return HeldOut(errors.tolist(), inside.astype(float).tolist(), predicted.extrapolated.astype(float).tolist())


def replay(workload: Workload, *, noise: float, draws: int) -> Figures:
    """Measure all figures of one workload; `noise` is the standard deviation of the logarithm of a run's step time."""
    figures = Figures(workload.name, workload.grid)
    profiled = {
        "ring": corners(workload),
        "partial": corners(workload),
        "adaptive4": designed(workload, 4),
        "adaptive6": designed(workload, 6),
    }
    scores = {
        name: [held_out(workload, chosen, "ring" if name == "ring" else "overlap")] for name, chosen in profiled.items()
    }
    for name, runs in RANDOM.items():
        scores[name] = [held_out(workload, at_random(workload, runs, draw)) for draw in range(_RANDOM_DRAWS)]
    for name, of_draws in scores.items():
        figures.error[name] = mean([median(score.errors) for score in of_draws])
        figures.configurations[name] = functools.reduce(HeldOut.__add__, of_draws)
    left_out = [held_out(workload, [c for c in workload.candidates if c != out]) for out in workload.candidates]
    figures.configurations["full"] = functools.reduce(HeldOut.__add__, left_out)
    figures.error["full"] = median(figures.configurations["full"].errors)
    figures.coverage = {name: mean(score.inside) for name, score in figures.configurations.items()}
    figures.fit_ms = time_fit(workload, profiled["adaptive6"])
    regret(workload, profiled["adaptive6"], figures)
    shared_launches(workload, figures)
    noisy_choices(workload, figures, noise, draws)
    return figures


def noisy_choices(workload: Workload, figures: Figures, noise: float, draws: int) -> None:
    """Add the regret (in true times) of choices from noisy runs, and the coverage of their intervals."""
    regrets, inside = [], []
    for draw in range(draws):
        table = workload.noisy(noise, np.random.default_rng([draw, zlib.crc32(workload.name.encode())]))
        drawn = Figures(workload.name, workload.grid)
        value = training_values(workload)
        for name in ("time", "cost"):
            _, choice = recommended(table, make_goal(name))
            chosen = choice.chosen
            assert chosen is not None
            least = min(value[name].values())
            drawn.regret[name] = value[name][chosen.configuration] / least - 1.0  # type: ignore[index]
            truth = value["time"][chosen.configuration]  # type: ignore[index]
            inside.append(float(chosen.time_s.low <= truth <= chosen.time_s.high))
        best_num_nodes(table, designed(table, _RUNS), drawn)
        regrets.append(drawn.regret)
    figures.noisy = {
        name: mean([drawn_regret[name] for drawn_regret in regrets if name in drawn_regret]) for name in NOISY
    }
    figures.noisy_coverage = mean(inside)


def training_values(workload: Workload) -> dict[str, dict[Placement, float]]:
    """Return the time and the cost of a whole training with each configuration, at a price of 1 per GPU-second."""
    spent = {c: seconds * _DATASET / c.global_batch_size for c, seconds in workload.step_time_s.items()}
    return {"time": spent, "cost": {c: spent[c] * c.world_size for c in spent}}


def make_goal(name: str, limits: Limits | None = None) -> Goal:
    """Return the goal with the given name; prices are per GPU-hour."""
    objective: Objective = "time" if name == "time" else "cost"
    return Goal(objective, Training(_DATASET), {"default": Offer(usd_per_rank_hour=3600.0)}, limits or Limits())


def shared_launches(workload: Workload, figures: Figures) -> None:
    """Add the errors after one, two and three launches that measure every batch, and the plan's regret and launches."""
    ordered = [*end_launches(workload.candidates), *middle_launch(workload.candidates)]
    for number, name in enumerate(LAUNCHES, 1):
        chosen = {*ordered[:number]}
        errors = held_out(workload, [c for c in workload.candidates if find_launch(c) in chosen]).errors
        figures.error[name] = median(errors)
    launched: list[list[Launch]] = []
    measured: list[float] = []
    for table, suffix in ((workload, ""), (workload.noisy(_NOISE, np.random.default_rng(1)), ".noisy")):
        for name, value in training_values(workload).items():
            launches: list[Launch] = []
            runs, choice = recommended(table, make_goal(name), share_launches=True, launches=launches)
            chosen_value = value[choice.chosen.configuration]  # type: ignore[union-attr, index]
            figures.launch_regret[name + suffix] = chosen_value / min(value.values()) - 1.0
            if not suffix:
                launched.append(launches)
                measured.append(float(len(runs)))
    figures.launches = mean([float(len(launches_taken)) for launches_taken in launched])
    figures.launched_batches = mean(measured)


def time_fit(workload: Workload, profiled: Sequence[Placement]) -> float:
    """Return how many milliseconds it takes to fit and to predict 64 candidates: the minimum of three runs."""
    observed = workload.measure(profiled)
    candidates = [workload.candidates[i % len(workload.candidates)] for i in range(_TIMED_CANDIDATES)]
    taken = []
    for _ in range(3):
        started = time.perf_counter()
        fit_step_time(observed, candidates=candidates).predict(candidates)
        taken.append(time.perf_counter() - started)
    return 1000.0 * min(taken)


def time_plan(clusters: int) -> dict[str, float]:
    """Return the milliseconds (minimum of three) and MiB that a job's first plan takes with 4,096 candidates.

    The objective is least time. The job has `clusters` clusters and as many batches; a smoke run has fewer candidates
    but the same keys.
    """
    side = range(1, clusters + 1)
    candidates = [Placement(num_nodes=n, local_batch_size=8 * batch, ranks=n) for n in side for batch in side]
    taken = []
    for _ in range(3):
        started = time.perf_counter()
        plan("adaptive", candidates, goal=make_goal("time"))
        taken.append(time.perf_counter() - started)
    tracemalloc.start()
    plan("adaptive", candidates, goal=make_goal("time"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    size = _PLANNED_SIDE**2
    return {f"plan_ms.{size}": 1000.0 * min(taken), f"plan_mib.{size}": peak / 2**20}


def regret(workload: Workload, planned: Sequence[Placement], figures: Figures) -> None:
    """Add the regret of the recommended configurations relative to the table's best; prices are per GPU-hour."""
    values = training_values(workload)
    spent, paid = values["time"], values["cost"]
    largest = max(workload.candidates, key=lambda c: (c.world_size, c.local_batch_size))
    deadline = _DEADLINE * min(spent.values())
    cases = {"time": (Limits(), spent), "cost": (Limits(), paid), "deadline": (Limits(deadline_s=deadline), paid)}
    for name, (limits, value) in cases.items():
        runs, choice = recommended(workload, make_goal(name, limits))
        chosen = choice.chosen.configuration if choice.chosen else largest
        allowed = [c for c in workload.candidates if name != "deadline" or spent[c] <= deadline]
        figures.regret[name] = value[chosen] / min(value[c] for c in allowed) - 1.0  # type: ignore[index]
        figures.largest[name] = value[largest] / min(value[c] for c in allowed) - 1.0
        figures.runs[name] = len(runs)
        if name == "deadline":
            figures.violated = float(spent[chosen] > deadline)  # type: ignore[index]
            figures.promised = float(choice.within_limits_is_likely)
    best_num_nodes(workload, planned, figures)


def recommended(
    workload: Workload, goal: Goal, *, share_launches: bool = False, launches: list[Launch] | None = None
) -> tuple[list[Placement], Choice]:
    """Return the planner's runs for a goal, and the resulting choice; `launches` is as in `profile`."""
    runs = profile(workload, goal, runs=_RUNS, share_launches=share_launches, launches=launches)
    model = fit_step_time(workload.measure(runs), candidates=workload.candidates)
    return runs, recommend(workload.candidates, model, goal)


def best_num_nodes(workload: Workload, planned: Sequence[Placement], figures: Figures) -> None:
    """Score the choice of the fastest cluster, for every global batch that several clusters can run.

    For `best_num_nodes`, each batch is a separate job that may profile any configuration, with at most six runs,
    including a run that verifies the choice. For `best_num_nodes_planned`, all batches use the same six planned runs,
    and no choice is verified.
    """
    model = fit_step_time(workload.measure(planned), candidates=workload.candidates)
    mean_s = dict(zip(workload.candidates, model.predict(workload.candidates).mean_s, strict=True))
    verified, unverified, always, spent = [], [], [], []
    for members in same_batch(workload.candidates):
        step_time = {c: workload.step_time_s[c] for c in members}
        best = min(step_time.values())
        only_members: dict[Configuration, float] = {c: 1.0 if c in members else _NEVER for c in workload.candidates}
        goal = Goal("time", Training(_DATASET), {"default": Offer()}, steps_factor=only_members)
        runs, choice = recommended(workload, goal)
        verified.append(step_time[choice.chosen.configuration] / best - 1.0)  # type: ignore[union-attr, index]
        unverified.append(step_time[min(members, key=lambda c: (mean_s[c], c))] / best - 1.0)
        always.append(step_time[max(members, key=lambda c: (c.world_size, c.num_nodes))] / best - 1.0)
        spent.append(len(runs))
    if verified:
        figures.regret["best_num_nodes"], figures.largest["best_num_nodes"] = mean(verified), mean(always)
        figures.regret["best_num_nodes_planned"] = figures.largest["best_num_nodes_planned"] = mean(unverified)
        figures.largest["best_num_nodes_planned"] = mean(always)
        figures.runs["best_num_nodes"] = mean([float(n) for n in spent])


def same_batch(candidates: Sequence[Placement]) -> list[list[Placement]]:
    """Return groups of candidates with an equal global batch (within 3 %) on at least two cluster sizes."""
    groups: list[list[Placement]] = []
    for candidate in sorted(candidates, key=lambda c: c.global_batch_size):
        if groups and candidate.global_batch_size <= _SAME_BATCH * groups[-1][0].global_batch_size:
            groups[-1].append(candidate)
        else:
            groups.append([candidate])
    return [group for group in groups if len({c.world_size for c in group}) > 1]


def summarise(results: Sequence[Figures]) -> dict[str, float]:
    """Return the figures over all workloads, by key."""
    out: dict[str, float] = {}

    def known(values: Sequence[float]) -> list[float]:
        return [value for value in values if value == value]

    def add_mean(key: str, values: Sequence[float]) -> None:
        out[key] = mean(known(values))
        out[f"{key}.low"], out[f"{key}.high"] = bootstrap(known(values))

    for grid in ("regular", "hard"):
        chosen = [r for r in results if r.grid == grid]
        out[f"{grid}.workloads"] = float(len(chosen))
        for name in PLANS:
            errors = known([r.error[name] for r in chosen])
            out[f"{grid}.{name}.median"], out[f"{grid}.{name}.p90"] = median(errors), percentile(errors, 0.9)
            out[f"{grid}.{name}.geometric"] = geometric_mean(np.maximum(errors, _LEAST_ERROR).tolist())
            add_mean(f"{grid}.{name}.coverage", [r.coverage[name] for r in chosen])
            together = functools.reduce(HeldOut.__add__, [r.configurations[name] for r in chosen], HeldOut())
            beyond = [i for i, is_beyond in zip(together.inside, together.extrapolated, strict=True) if is_beyond]
            by_configuration = f"{grid}.{name}.by_configuration"
            out[f"{by_configuration}.median"] = median(together.errors)
            out[f"{by_configuration}.p90"] = percentile(together.errors, 0.9)
            out[f"{by_configuration}.coverage"] = mean(together.inside)
            out[f"{by_configuration}.coverage.extrapolated"] = mean(beyond)
        add_mean(f"coverage.{grid}", [mean(known([r.coverage[name] for name in PLANNED])) for r in chosen])
    for name in CHOICES:
        regrets = [r.regret[name] for r in results if name in r.regret]
        always = [r.largest[name] for r in results if name in r.largest]
        add_mean(f"regret.{name}.mean", regrets)
        out[f"regret.{name}.geometric"] = geometric_mean([1.0 + value for value in regrets]) - 1.0
        add_mean(f"regret.{name}.within5", [float(value <= 0.05) for value in regrets])
        add_mean(f"regret.{name}.largest.mean", always)
        add_mean(f"regret.{name}.largest.within5", [float(value <= 0.05) for value in always])
        if runs := [float(r.runs[name]) for r in results if name in r.runs]:
            add_mean(f"regret.{name}.runs", runs)
    for name in LAUNCHES:
        errors = known([r.error[name] for r in results])
        out[f"{name}.median"], out[f"{name}.p90"] = median(errors), percentile(errors, 0.9)
    for name in results[0].launch_regret:
        add_mean(f"columns.regret.{name}.mean", [r.launch_regret[name] for r in results])
    for name in NOISY:
        add_mean(f"noise.regret.{name}.mean", [r.noisy.get(name, float("nan")) for r in results])
    add_mean("noise.coverage.chosen", [r.noisy_coverage for r in results])
    add_mean("columns.launches", [r.launches for r in results])
    add_mean("columns.batches", [r.launched_batches for r in results])
    add_mean("regret.deadline.promised", [r.promised for r in results])
    add_mean("regret.deadline.violations", [r.violated * r.promised for r in results])
    add_mean("regret.deadline.violations_with_warned", [r.violated for r in results])
    out["fit_ms"] = median([r.fit_ms for r in results])
    out["fit_ms.p90"] = percentile([r.fit_ms for r in results], 0.9)
    return out


def show(figures: dict[str, float]) -> None:
    """Print the figures as tables."""

    def percent(key: str) -> str:
        value = f"{100 * figures[key]:.1f} %" if key in figures else "-"
        if f"{key}.low" not in figures:
            return value
        return f"{value} [{100 * figures[f'{key}.low']:.1f}, {100 * figures[f'{key}.high']:.1f}]"

    for grid in ("regular", "hard"):
        parts: tuple[str, ...] = ("median", "geometric", "p90", "coverage")
        parts += tuple(f"by_configuration.{part}" for part in ("p90", "coverage", "coverage.extrapolated"))
        heads = ["plan", "median", "geometric", "p90", "coverage", "configurations: p90", "coverage", "extrapolated"]
        rows = [[name, *(percent(f"{grid}.{name}.{part}") for part in parts)] for name in PLANS]
        print_table(f"{grid} grids ({figures[f'{grid}.workloads']:.0f})", heads, rows)
    of_regret = ("mean", "geometric", "within5", "largest.mean", "largest.within5")
    rows = [[name, *(percent(f"regret.{name}.{part}") for part in of_regret)] for name in CHOICES]
    heads = ["choice", "mean", "geometric", "within 5 %", "largest: mean", "within 5 %"]
    print_table("regret, at most 6 runs", heads, rows)
    rows = [[name, percent(f"{name}.median"), percent(f"{name}.p90")] for name in LAUNCHES]
    print_table("launches: errors on the other clusters", ["plan", "median", "p90"], rows)
    regrets = [percent(f"columns.regret.{name}.mean") for name in ("time", "cost", "time.noisy", "cost.noisy")]
    heads = ["launches", "batches", "time", "cost", "time, 3 % noise", "cost, 3 % noise"]
    spent = [f"{figures[f'columns.{name}']:.2f}" for name in ("launches", "batches")]
    print_table("regret of planned launches", heads, [[*spent, *regrets]])
    noisy = [*(f"noise.regret.{name}.mean" for name in NOISY), "noise.coverage.chosen"]
    print_table("choices from noisy runs", [*NOISY, "chosen inside its interval"], [[percent(key) for key in noisy]])
    print(f"\ndeadline violations {percent('regret.deadline.violations')}; median fit {figures['fit_ms']:.1f} ms")
    print(f"first plan of 4,096 candidates: {figures['plan_ms.4096']:.0f} ms, {figures['plan_mib.4096']:.0f} MiB")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = workloads_parser("step_time", __doc__)
    parser.add_argument(
        "--noise", type=float, default=_NOISE, help=f"standard deviation of a run's log step time ({_NOISE})"
    )
    parser.add_argument("--draws", type=int, default=_DRAWS, help=f"number of noise draws ({_DRAWS})")
    options = parser.parse_args(arguments)
    if options.noise < 0.0 or options.draws < 1:
        parser.error("--noise must be at least 0 and --draws at least 1.")
    measured = functools.partial(replay, noise=options.noise, draws=options.draws)
    smoke = functools.partial(replay, noise=options.noise, draws=1)
    _, pairs = over_workloads(parser, measured, arguments, smoke=smoke)
    results = [replayed for _, replayed in pairs]
    figures = summarise(results) | time_plan(8 if options.smoke else _PLANNED_SIDE)
    show(figures)
    write_json(options.json, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
