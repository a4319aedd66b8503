"""Compares the time and cost of each objective's choice with the lowest possible values, on measured grids.

    python -m benchmarks.objectives [--grids FILE] [--noise 0.03] [--json OUT] [--jobs N] [--smoke]

For each workload and objective, the planner makes at most six runs. A run measures the table's step time multiplied by
random noise; `--noise` is the standard deviation of the noise's logarithm. The planner's recommendation is then
evaluated with the step times in the table. All rank-hours have the same price. A training run processes `--examples`
examples in total (1.28e8: a hundred epochs of ImageNet). The guard of `balanced` allows only batches that preserve the
accuracy of the smallest batch, as for a job whose gradient noise and optimizer are unknown; the lowest time and cost,
with which choices are compared, are taken over all batches. Each choice is made in five draws of the noise, since a few
percent of noise can change it.

The keys for `balanced`, `time`, `cost`, `knee` and `kneedle` are `<objective>.time_over_least.mean`, `.geometric` and
`.p90`, the same three for `.cost_over_least`, `.dominated` (the share of choices for which another candidate is both
faster and cheaper by more than the noise), and `.place` (the mean position of the batch in the logarithmic range, from
0 for the smallest to 1 for the largest). `kneedle` is the rule of Kneedle (Satopaa 2011) on log time over log batch,
with the same fit as `knee`; if there is no knee, it chooses the shortest time. `known` applies the rule of `balanced`
to all true step times. `measured` applies the rule to noisy measurements of all step times, and shows how much could be
gained by more than six runs.

`sensitivity.balanced.p90` is the 90th percentile of the factor by which the time or the cost of the choice changes,
whichever changes more, when one end of the range of local batches or ranks moves by one doubling. Ends move inwards
from the whole table, and outwards from the table without one doubling at each of the four ends, since no table has rows
outside its range. `.inward.p90` and `.outward.p90` cover only the moves in one direction. `.allowed.p90` covers only
the moves after which the earlier choice is still a candidate. `.answer_kept.p90` covers only the inward ones of these
moves; they remove only candidates that were not chosen. `sensitivity.time.*` are the same figures for the choices of
`time`. Three more figures show the changes that occur even if every step time is known: with the rule of `balanced`
(`.balanced.known`), with the lowest product of time and cost (`.balanced.product`), and with the shortest time
(`.balanced.least`).
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Literal

import numpy as np

from benchmarks.step_time import recommended
from benchmarks.support.grids import Placement, Workload, over_workloads, workloads_parser
from benchmarks.support.report import geometric_mean, mean, percentile, print_table, write_json
from tula_service.perfmodel.choice import choose
from tula_service.perfmodel.guard import AccuracyGuard
from tula_service.perfmodel.intervals import Interval
from tula_service.perfmodel.objectives import Goal
from tula_service.perfmodel.points import FloatArray, Points
from tula_service.perfmodel.pricing import Offer, Training, price
from tula_service.perfmodel.step_time_model import StepTimeModel, fit_step_time
from tula_wire.enums import Objective

OBJECTIVES: Final[tuple[Objective | Literal["kneedle"], ...]] = ("balanced", "time", "cost", "knee", "kneedle")
ALSO = ("known", "measured")
SENSITIVE = ("balanced", "time", "balanced.known", "balanced.product", "balanced.least")
_EXAMPLES = 1.28e8
_DRAWS = 5
_LEAST_CANDIDATES = 4
_CURVE_POINTS = 129


@dataclass
class Judged:
    """The figures of one workload.

    `answers` contains, by objective, (time over least, cost over least, dominated, place) for each draw of the noise.
    `moved` contains, for each move of an end of the range, whether the end moves inwards and, by rule, (factor, whether
    the earlier choice is still allowed) in the first draw.
    """

    answers: dict[str, list[tuple[float, float, float, float]]] = field(
        default_factory=lambda: {name: [] for name in (*OBJECTIVES, *ALSO)}
    )
    moved: list[tuple[bool, dict[str, tuple[float, bool]]]] = field(default_factory=list)


def goal_for(objective: Objective, workload: Workload, examples: float) -> Goal:
    """Return a goal with one price per rank-hour, whose guard preserves the accuracy of the smallest batch."""
    guard = AccuracyGuard(examples, min(c.global_batch_size for c in workload.candidates))
    return Goal(objective, Training(examples), {"default": Offer(usd_per_rank_hour=3600.0)}, guard=guard)


def noisy(workload: Workload, noise: float, draw: int) -> Workload:
    """Return the workload with profiling noise added, which is always the same for a name and draw."""
    dice = np.random.default_rng((zlib.crc32(workload.name.encode()), draw))
    factors = np.exp(noise * dice.standard_normal(len(workload.candidates)))
    seen = {c: workload.step_time_s[c] * float(f) for c, f in zip(workload.candidates, factors, strict=True)}
    return replace(workload, step_time_s=seen)


def answer(seen: Workload, name: Objective | Literal["kneedle"], examples: float) -> Placement:
    """Return the configuration that the planner recommends after at most six runs."""
    runs, choice = recommended(seen, goal_for("knee" if name == "kneedle" else name, seen, examples))
    if name == "kneedle":
        return kneedle(seen, runs)
    assert choice.chosen is not None  # there are no limits
    return choice.chosen.configuration  # type: ignore[return-value]


def kneedle(seen: Workload, runs: Sequence[Placement]) -> Placement:
    """Return the fastest candidate at the batch nearest to Kneedle's knee, or the fastest of all without a knee."""
    from kneed import KneeLocator

    model = fit_step_time(seen.measure(runs), candidates=seen.candidates)
    predicted = model.predict(seen.candidates).mean_s
    total = {c: float(t) / c.global_batch_size for c, t in zip(seen.candidates, predicted, strict=True)}
    batches, times = dense_curve(seen.candidates, model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        knee = KneeLocator(np.log2(batches), np.log2(times), curve="convex", direction="decreasing").knee
    if knee is None:
        return min(total, key=lambda c: (total[c], c))
    return min(total, key=lambda c: (round(abs(np.log2(c.global_batch_size) - knee), 6), total[c], c))


def dense_curve(candidates: Sequence[Placement], model: StepTimeModel) -> tuple[FloatArray, FloatArray]:
    """Return logarithmically spaced global batches, and their predicted times per example on the fastest cluster."""
    sizes = [c.global_batch_size for c in candidates]
    batches = np.geomspace(min(sizes), max(sizes), _CURVE_POINTS)
    times = np.full(batches.size, np.inf)
    for nodes, ranks in {(c.num_nodes, c.world_size) for c in candidates}:
        sizes = [c.global_batch_size for c in candidates if (c.num_nodes, c.world_size) == (nodes, ranks)]
        at = np.flatnonzero((batches >= min(sizes) * (1 - 1e-9)) & (batches <= max(sizes) * (1 + 1e-9)))
        ones = np.ones(at.size)
        points = Points(nodes * ones, ranks * ones, np.maximum(batches[at] / ranks, 1.0))
        times[at] = np.minimum(times[at], model.predict(points).mean_s / batches[at])
    measured = np.isfinite(times)
    return batches[measured], times[measured]


def judge(workload: Workload, noise: float, examples: float) -> Judged:
    """Evaluate every objective on one workload, and measure how the range of the candidates affects the choices."""
    time = {c: workload.step_time_s[c] * examples / c.global_batch_size for c in workload.candidates}
    cost = {c: time[c] * c.world_size for c in workload.candidates}
    batches = [c.global_batch_size for c in workload.candidates]
    span = np.log(max(batches) / min(batches)) or 1.0
    draws, judged = [noisy(workload, noise, draw) for draw in range(_DRAWS)], Judged()
    for seen in draws:
        chosen: dict[str, Placement] = {name: answer(seen, name, examples) for name in OBJECTIVES}
        chosen |= {"known": known(workload, examples), "measured": known(seen, examples)}
        for name, c in chosen.items():
            beaten = any(max(time[o] / time[c], cost[o] / cost[c]) < 1.0 - noise for o in workload.candidates)
            place = float(np.log(c.global_batch_size / min(batches)) / span)
            ratios = time[c] / min(time.values()), cost[c] / min(cost.values())
            judged.answers[name].append((*ratios, float(beaten), place))
    product = {c: time[c] * cost[c] for c in workload.candidates}
    rules: dict[str, Callable[[list[Placement]], Placement]] = {
        "balanced": lambda rows: answer(only(draws[0], rows), "balanced", examples),
        "time": lambda rows: answer(only(draws[0], rows), "time", examples),
        "balanced.known": lambda rows: known(only(workload, rows), examples),
        "balanced.product": lambda rows: min(rows, key=lambda c: product[c]),
        "balanced.least": lambda rows: min(rows, key=lambda c: time[c]),
    }
    for inward, before, after in moves(workload.candidates):
        factors = {}
        for name, rule in rules.items():
            old, new = rule(before), rule(after)
            measures = (time,) if name == "balanced.least" else (time, cost)
            factors[name] = _change(old, new, *measures), old in after
        judged.moved.append((inward, factors))
    return judged


def _change(old: Placement, new: Placement, *measures: dict[Placement, float]) -> float:
    """Return the largest factor, at least 1, by which one of the measures differs between two configurations."""
    return max(max(measure[new] / measure[old], measure[old] / measure[new]) for measure in measures)


def known(workload: Workload, examples: float) -> Placement:
    """Return what the rule of `balanced` chooses if every step time in the table is known."""
    goal = goal_for("balanced", workload, examples)
    exact = [(c, Interval(t, t, t)) for c, t in sorted(workload.step_time_s.items())]
    choice = choose(goal, [price(c, t, goal.training, goal.offers["default"]) for c, t in exact])
    assert choice.chosen is not None  # there are no limits
    return choice.chosen.configuration  # type: ignore[return-value]


def only(seen: Workload, rows: Sequence[Placement]) -> Workload:
    """Return a copy of the workload with only the given rows of the table."""
    return replace(seen, step_time_s={c: seen.step_time_s[c] for c in rows})


def moves(candidates: Sequence[Placement]) -> list[tuple[bool, list[Placement], list[Placement]]]:
    """Return (inward, rows before, rows after) for each move of an end of a range (see the module's docstring).

    Moves that change no row, and moves from or to fewer than four rows, are left out.
    """
    batches, ranks = [c.local_batch_size for c in candidates], [c.world_size for c in candidates]
    inside: list[Callable[[Placement], bool]] = [
        lambda c: c.local_batch_size >= 2 * min(batches),
        lambda c: 2 * c.local_batch_size <= max(batches),
        lambda c: c.world_size >= 2 * min(ranks),
        lambda c: 2 * c.world_size <= max(ranks),
    ]

    def rows(ends: Sequence[Callable[[Placement], bool]]) -> list[Placement]:
        return [c for c in candidates if all(end(c) for end in ends)]

    moved = [(True, rows([]), rows([end])) for end in inside]
    moved += [(False, rows(inside), rows([other for other in inside if other is not end])) for end in inside]
    return [move for move in moved if len(move[1]) != len(move[2]) and min(map(len, move[1:])) >= _LEAST_CANDIDATES]


def sensitivity(moved: Sequence[tuple[bool, dict[str, tuple[float, bool]]]]) -> dict[str, list[float]]:
    """Return the factors of all moves, by the keys that the module's docstring describes."""
    figures = {}
    for name in SENSITIVE:
        every = [(inward, *factors[name]) for inward, factors in moved]
        figures[f"sensitivity.{name}.p90"] = [factor for _, factor, _ in every]
        figures[f"sensitivity.{name}.allowed.p90"] = [factor for _, factor, allowed in every if allowed]
        if name == "balanced":
            figures["sensitivity.balanced.inward.p90"] = [factor for inward, factor, _ in every if inward]
            figures["sensitivity.balanced.outward.p90"] = [factor for inward, factor, _ in every if not inward]
            figures["sensitivity.balanced.answer_kept.p90"] = [f for inward, f, allowed in every if inward and allowed]
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = workloads_parser("objectives", __doc__)
    parser.add_argument("--noise", type=float, default=0.03, help="standard deviation of a run's log step time (0.03)")
    parser.add_argument(
        "--examples", type=float, default=_EXAMPLES, help=f"number of examples in a training run ({_EXAMPLES:g})"
    )
    known_options = parser.parse_known_args(arguments)[0]
    measure = partial(judge, noise=known_options.noise, examples=known_options.examples)
    options, pairs = over_workloads(parser, measure, arguments)
    results = [judged for _, judged in pairs]
    figures: dict[str, float] = {}
    rows = []
    for name in (*OBJECTIVES, *ALSO):
        times, costs, dominated, places = zip(*(row for judged in results for row in judged.answers[name]), strict=True)
        for key, values in (("time", times), ("cost", costs)):
            figures[f"{name}.{key}_over_least.mean"] = mean(values)
            figures[f"{name}.{key}_over_least.geometric"] = geometric_mean(values)
            figures[f"{name}.{key}_over_least.p90"] = percentile(values, 0.9)
        figures[f"{name}.dominated"], figures[f"{name}.place"] = mean(dominated), mean(places)
        rows.append([name, *(f"{value:.2f}" for key, value in figures.items() if key.split(".")[0] == name)])
    header = ["objective", "time: mean", "geometric", "p90", "cost: mean", "geometric", "p90", "dominated", "place"]
    print_table(f"time and cost relative to the lowest values, {len(results)} workloads", header, rows)
    print(f"share of dominated choices for the objective `time`, due to noise alone: {figures['time.dominated']:.3f}")
    for key, factors in sensitivity([move for judged in results for move in judged.moved]).items():
        figures[key] = percentile(factors, 0.9)
        print(f"{key}: {figures[key]:.3f} ({len(factors)} moves)")
    write_json(options.json, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
