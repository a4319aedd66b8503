"""What each objective costs and saves: time over the least time and cost over the least cost, on measured grids.

    python -m benchmarks.objectives [--grids FILE] [--noise 0.03] [--json OUT] [--jobs N] [--smoke]

For each workload and objective the planner spends at most six runs, which see the table's step times with `--noise`
(standard deviation of their logarithm); what it then recommends is judged by the table. A rank-hour has one price.
Keys, for `balanced`, `time`, `cost`, `knee` and `kneedle`: `<objective>.time_over_least.mean` and `.p90`,
`.cost_over_least.mean` and `.p90`, `.dominated` (share of answers with a candidate that is both faster and cheaper by
more than the noise), `.place` (mean place of the batch in the range: 0 smallest, 1 largest, in log). `kneedle` is the
rule of Kneedle (Satopaa 2011) on log time over log batch, given the same fit as `knee`; without a knee it is the least
time. `known` has the least product of time and cost by the table itself: what the rule of `balanced` gives up when
every step time is known. `sensitivity.balanced.p90`: the factor by which time or cost of the answer changes, whichever
changes more, when either end of the range of batches or of ranks moves inwards by one doubling and keeps the answer;
`sensitivity.balanced.all.p90` counts moves that take the answer away too.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from benchmarks.step_time import recommended
from benchmarks.support.grids import Placement, Workload, over_workloads, workloads_parser
from benchmarks.support.report import mean, percentile, print_table, write_json
from tula_service.domain import Objective
from tula_service.perfmodel.pricing import Offer, Training
from tula_service.perfmodel.recommend import Goal, tradeoff_curve
from tula_service.perfmodel.step_time_model import fit_step_time

OBJECTIVES = ("balanced", "time", "cost", "knee", "kneedle")
_EXAMPLES = 1e6
_LEAST_CANDIDATES = 4


@dataclass
class Judged:
    """Of one workload: by objective (time over least, cost over least, dominated, place), and factors by move."""

    answers: dict[str, tuple[float, float, float, float]] = field(default_factory=dict)
    kept: list[float] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)


def goal_for(objective: Objective) -> Goal:
    """Training at one price for each rank-hour."""
    return Goal(objective, Training(_EXAMPLES), {"default": Offer(usd_per_rank_hour=3600.0)})


def noisy(workload: Workload, noise: float) -> Workload:
    """The workload as profiling sees it; the same draw for the same name."""
    dice = np.random.default_rng(zlib.crc32(workload.name.encode()))
    factors = np.exp(noise * dice.standard_normal(len(workload.candidates)))
    seen = {c: workload.step_time_s[c] * float(f) for c, f in zip(workload.candidates, factors, strict=True)}
    return replace(workload, step_time_s=seen)


def answer(seen: Workload, name: str) -> Placement:
    """What is recommended after at most six runs."""
    objective = Objective.KNEE if name == "kneedle" else Objective(name)
    runs, choice = recommended(seen, goal_for(objective))
    if name == "kneedle":
        return kneedle(seen, runs)
    assert choice.chosen is not None  # there are no limits
    return choice.chosen.configuration  # type: ignore[return-value]


def kneedle(seen: Workload, runs: Sequence[Placement]) -> Placement:
    """The fastest candidate nearest the knee that Kneedle finds in log-log; the fastest of all without one."""
    from kneed import KneeLocator

    model = fit_step_time(seen.measure(runs), candidates=seen.candidates)
    batches, times = tradeoff_curve(seen.candidates, model, goal_for(Objective.KNEE))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = KneeLocator(np.log2(batches), np.log2(times), curve="convex", direction="decreasing").knee
    predicted = model.predict(seen.candidates).mean_s
    total = {c: float(t) / c.global_batch_size for c, t in zip(seen.candidates, predicted, strict=True)}
    if found is None:
        return min(total, key=lambda c: (total[c], c))
    return min(total, key=lambda c: (round(abs(np.log2(c.global_batch_size) - found), 6), total[c], c))


def judge(workload: Workload, noise: float) -> Judged:
    """Every objective on one workload, and how far the default's answer moves with the range of candidates."""
    time = {c: workload.step_time_s[c] * _EXAMPLES / c.global_batch_size for c in workload.candidates}
    cost = {c: time[c] * c.world_size for c in workload.candidates}
    batches = [c.global_batch_size for c in workload.candidates]
    span = np.log(max(batches) / min(batches)) or 1.0
    seen, found = noisy(workload, noise), Judged()
    chosen = {name: answer(seen, name) for name in OBJECTIVES}
    chosen["known"] = min(workload.candidates, key=lambda c: (time[c] * cost[c], c))
    for name, c in chosen.items():
        beaten = any(max(time[o] / time[c], cost[o] / cost[c]) < 1.0 - noise for o in workload.candidates)
        place = float(np.log(c.global_batch_size / min(batches)) / span)
        found.answers[name] = (time[c] / min(time.values()), cost[c] / min(cost.values()), float(beaten), place)
    before = chosen["balanced"]
    for rest in moves(workload.candidates):
        after = answer(replace(seen, step_time_s={c: seen.step_time_s[c] for c in rest}), "balanced")
        ratios = (time[after] / time[before], cost[after] / cost[before])
        factor = max(max(ratio, 1.0 / ratio) for ratio in ratios)
        found.moved.append(factor)
        if before in rest:
            found.kept.append(factor)
    return found


def moves(candidates: Sequence[Placement]) -> list[list[Placement]]:
    """What is left when either end of the range of local batches or of ranks moves inwards by one doubling."""
    found = []
    for values in ([c.local_batch_size for c in candidates], [c.world_size for c in candidates]):
        least, most = 2 * min(values), max(values) / 2
        found.append([c for c, value in zip(candidates, values, strict=True) if value >= least])
        found.append([c for c, value in zip(candidates, values, strict=True) if value <= most])
    return [rest for rest in found if len(rest) >= _LEAST_CANDIDATES]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; answers the exit status."""
    parser = workloads_parser("objectives", __doc__)
    parser.add_argument("--noise", type=float, default=0.03, help="of profiled step times (0.03)")
    noise = parser.parse_known_args(arguments)[0].noise
    options, pairs = over_workloads(parser, partial(judge, noise=noise), arguments)
    results = [found for _, found in pairs]
    figures: dict[str, float] = {}
    rows = []
    for name in (*OBJECTIVES, "known"):
        times, costs, dominated, places = zip(*(found.answers[name] for found in results), strict=True)
        for key, values in (("time", times), ("cost", costs)):
            figures[f"{name}.{key}_over_least.mean"] = mean(values)
            figures[f"{name}.{key}_over_least.p90"] = percentile(values, 0.9)
        figures[f"{name}.dominated"], figures[f"{name}.place"] = mean(dominated), mean(places)
        rows.append([name, *(f"{value:.2f}" for key, value in figures.items() if key.split(".")[0] == name)])
    figures["sensitivity.balanced.p90"] = percentile([f for found in results for f in found.kept], 0.9)
    figures["sensitivity.balanced.all.p90"] = percentile([f for found in results for f in found.moved], 0.9)
    header = ["objective", "time: mean", "p90", "cost: mean", "p90", "dominated", "place"]
    print_table(f"over {len(results)} workloads, times the least", header, rows)
    for key in ("sensitivity.balanced.p90", "sensitivity.balanced.all.p90"):
        print(f"{key}: {figures[key]:.3f}")
    write_json(options.json, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
