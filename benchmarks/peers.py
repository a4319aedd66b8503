"""The same two jobs for tools that a reader might take instead: what each needs, and how good its answer is.

    python -m benchmarks.peers [--grids FILE] [--only NAME] [--environments FOLDER] [--draws N] [--json OUT] [--smoke]

Each peer gets a separate environment with a pinned version from the package index. `--environments` keeps them.

`table`: every V100 table of `--grids` answers the runs, which differ from the truth by 3 % (log standard deviation,
`--draws` draws, the same for all); goals are least time and least cost at one price a GPU-hour. Tula, Optuna (TPE) and
Ray Tune (its Bayesian search) have six runs each; the latter start with three at random. Tools that look for the
largest batch that fits choose no cluster: they are given the largest for time and the smallest for cost, and memory
that ends above the largest batch of the table. `script`: examples/digits_ddp.py without its lines for Tula, on 1, 2 and
4 ranks of this machine, 16 to 128 examples a rank, by seconds an epoch; the least of two rounds is the truth.

Keys: `<peer>.table.time_over_least.mean`, `.cost_over_least.mean`, `.within5` (share within 5 % of the least time) and
`.runs`; `<peer>.script.time_over_least`, `.cost_over_least`, `.runs` (launches or trials) and `.seconds`;
`<peer>.lines` that a user writes, of the script or of job.toml; `<peer>.version`; `<peer>.table` or `.script` says why
there is no answer. The smoke run needs no environment: it gives a table to Tula and to accelerate.
"""

from __future__ import annotations

import math
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.ease import tuned
from benchmarks.step_time import recommended
from benchmarks.support.grids import (
    STEP_TIME_TABLE,
    Placement,
    Workload,
    grids_parser,
    read_rows,
    read_step_time,
    smallest_of_each_grid,
)
from benchmarks.support.peer import PEERS, Refused, ask, lines_of, plain_digits, python_of
from benchmarks.support.peers.black_box import seconds_per_epoch
from benchmarks.support.report import mean, print_table, write_json
from examples.demo import SPEC
from tula_client import Client
from tula_service.perfmodel.choice import Goal, Offer, Training
from tula_wire.enums import Objective

GOALS: Final[tuple[Objective, ...]] = ("time", "cost")
RUNS, NOISE, ROUNDS = 6, 0.03, 2
RANKS, BATCHES = (1, 2, 4), (16, 32, 64, 128)
JOB = (
    SPEC.replace("MOST", "4")
    .replace('"balanced"', '"time"')
    .replace('search = "partial" ', 'search = "adaptive"')
    .replace("columns = true", "max_runs = 6")  # as many as others get
)
COLUMNS = tuple(
    [f"table.{part}" for part in ("time_over_least.mean", "cost_over_least.mean", "within5", "runs")]
    + [f"script.{part}" for part in ("time_over_least", "cost_over_least", "runs", "seconds")]
    + ["lines"]
)
_EXAMPLES = 1e6

Paid = dict[Any, float]
Answers = dict[str, list[tuple[float, float]]]
"""By goal: (what is paid over the least, runs) of each case."""


def paid_by(workload: Workload, seen: bool) -> dict[str, Paid]:
    """By goal: seconds or GPU-seconds of the training at each configuration, as observed or in truth."""
    step = workload.observed_s if seen and workload.observed_s else workload.step_time_s
    time_s = {c: s * _EXAMPLES / c.global_batch_size for c, s in step.items()}
    return {"time": time_s, "cost": {c: s * c.world_size for c, s in time_s.items()}}


def tula_on_tables(cases: Sequence[tuple[Workload, int]]) -> Answers:
    """Our planner and model on the same observations."""
    found: Answers = {}
    for workload, _ in cases:
        for name in GOALS:
            goal = Goal(name, Training(_EXAMPLES), {"default": Offer(usd_per_rank_hour=3600.0)})
            runs, choice = recommended(workload, goal)
            assert choice.chosen is not None  # there are no limits
            true = paid_by(workload, False)[name]
            over = true[choice.chosen.configuration] / min(true.values())
            found.setdefault(name, []).append((over, float(len(runs))))
    return found


def black_box_on_tables(name: str, python: str, cases: Sequence[tuple[Workload, int]]) -> Answers:
    """The best of what a search ran, by what it saw."""
    asked, places = [], []
    for workload, seed in cases:
        clusters = sorted({(c.world_size, c.num_nodes) for c in workload.candidates})
        batches = sorted({c.local_batch_size for c in workload.candidates})
        at = {
            (clusters.index((c.world_size, c.num_nodes)), batches.index(c.local_batch_size)): c
            for c in workload.candidates
        }
        for goal in GOALS:
            seen = paid_by(workload, True)[goal]
            values = [[*place, seen[c]] for place, c in at.items()]
            asked.append({"sizes": [len(clusters), len(batches)], "values": values, "seed": seed})
            places.append((goal, at, paid_by(workload, False)[goal]))
    found: Answers = {}
    for ran, (goal, at, true) in zip(ask(name, python, {"runs": RUNS, "cases": asked}), places, strict=True):
        best = min(ran, key=lambda each: each[2])
        over = true[at[best[0], best[1]]] / min(true.values())
        found.setdefault(goal, []).append((over, float(len(ran))))
    return found


def largest_on_tables(name: str, python: str, cases: Sequence[tuple[Workload, int]]) -> Answers:
    """The largest batch that the tool found, on the cluster that its user would choose for the goal."""
    asked, places = [], []
    for workload, _ in cases:
        for goal, choose in (("time", max), ("cost", min)):
            cluster = choose((c.world_size, c.num_nodes) for c in workload.candidates)
            there = {c.local_batch_size: c for c in workload.candidates if (c.world_size, c.num_nodes) == cluster}
            asked.append([min(there), max(there)])
            places.append((goal, there, paid_by(workload, False)[goal]))
    distinct = sorted({(a, b) for a, b in asked})
    answers = dict(zip(distinct, ask(name, python, {"cases": distinct})["found"], strict=True))
    found: Answers = {}
    for (least, most), (goal, there, true) in zip(asked, places, strict=True):
        batch, trials = answers[least, most]
        chosen: Placement = there[nearest(batch, there)]
        found.setdefault(goal, []).append((true[chosen] / min(true.values()), float(trials)))
    return found


def nearest(batch: int, measured: Iterable[int]) -> int:
    """The batch that was measured and is nearest by ratio."""
    return min(measured, key=lambda one: abs(math.log(one / batch)))


def figures_of(answers: Answers) -> dict[str, float]:
    """Means over tables and draws."""
    found = {f"table.{goal}_over_least.mean": mean([over for over, _ in answers[goal]]) for goal in GOALS}
    found["table.within5"] = mean([float(over <= 1.05) for over, _ in answers["time"]])
    return found | {"table.runs": mean([runs for each in answers.values() for _, runs in each])}


ON_TABLES: dict[str, Callable[..., Answers]] = {"black_box": black_box_on_tables, "largest": largest_on_tables}


def chosen_on_script(asked: str, answer: Any) -> tuple[dict[str, Any], float]:
    """By goal: (ranks, batch) that a peer's answer leads to; and its launches or trials."""
    if asked == "black_box":
        ran = {(RANKS[i], BATCHES[j]): value for i, j, value in answer["ran"]}
        return {"time": min(ran, key=ran.__getitem__), "cost": min(ran, key=lambda at: at[0] * ran[at])}, float(RUNS)
    ((batch, trials),) = answer["found"]
    fits = nearest(batch, BATCHES)
    return {"time": (RANKS[-1], fits), "cost": (RANKS[0], fits)}, trials


def tula_on_script(script: Path) -> tuple[float, dict[str, Any], float]:
    """Seconds of `tula tune`, by goal (ranks, batch), and the runs that it asked for."""

    def read(client: Client) -> tuple[dict[str, Any], float]:
        job = client.handle("digits")
        found = [job.recommendation(goal).chosen for goal in ("time", "cost")]
        places = [(one.configuration.world_size, one.configuration.local_batch_size) for one in found if one]
        return dict(zip(GOALS, places, strict=True)), float(sum(run.num_samples > 0 for run in job.runs()))

    took_s, (chosen, runs) = tuned(JOB, [str(script), "--epochs=40"], read)  # enough steps at the largest batch
    return took_s, chosen, runs


def on_script(found: dict[str, dict[str, Any]], pythons: dict[str, str]) -> None:
    """Add the figures of the script to those of each peer."""
    with tempfile.TemporaryDirectory(prefix="peers-") as at:
        script = Path(at, "digits.py")
        script.write_text(plain_digits())
        command = [sys.executable, str(script)]
        every = [(ranks, batch) for ranks in RANKS for batch in BATCHES]
        rounds = [{place: seconds_per_epoch(command, *place) for place in every} for _ in range(ROUNDS)]
        true = {place: min(one[place] for one in rounds) for place in every}
        paid = {"time": true, "cost": {place: place[0] * s for place, s in true.items()}}
        answers = {"tula": tula_on_script(script)}
        job = {"command": command, "ranks": RANKS, "batches": BATCHES, "runs": RUNS, "cases": []}
        for name, python in pythons.items():
            try:
                answer = ask(name, python, job | {"digits": (BATCHES[0], BATCHES[-1])})
                answers[name] = (answer["seconds"], *chosen_on_script(PEERS[name].asked, answer))
            except Refused as error:
                found[name]["script"] = str(error)
    for name, (took_s, chosen, runs) in answers.items():
        over = {f"script.{goal}_over_least": paid[goal][chosen[goal]] / min(paid[goal].values()) for goal in GOALS}
        found[name] |= over | {"script.runs": runs, "script.seconds": took_s}


def on_tables(found: dict[str, dict[str, Any]], pythons: dict[str, str], cases: list[tuple[Workload, int]]) -> None:
    """Add the figures of the tables to those of each peer."""
    found["tula"] |= figures_of(tula_on_tables(cases))
    for name, python in pythons.items():
        peer = PEERS[name]
        try:
            if peer.no_table or peer.asked == "refuses":
                raise Refused(peer.no_table or ask(name, python, {}))
            found[name] |= figures_of(ON_TABLES[peer.asked](name, python, cases))
        except Refused as error:
            found[name]["table"] = str(error)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; answers the exit status."""
    parser = grids_parser("peers", __doc__, STEP_TIME_TABLE)
    parser.add_argument("--only", action="append", default=[], choices=PEERS, help="only this peer, beside Tula")
    parser.add_argument("--environments", type=Path, help="folder where environments are kept; else they are removed")
    parser.add_argument("--draws", type=int, default=3, help="of the noise (3)")
    options = parser.parse_args(arguments)
    v100 = {row["workload"] for row in read_rows(options.grids) if row["gpu"].startswith("V100")}
    tables = [one for one in read_step_time(options.grids) if one.name in v100]
    if not tables:
        parser.error(f"{options.grids} has no table of a V100: give one with --grids")
    if options.smoke:
        tables, options.draws, options.only = smallest_of_each_grid(tables), 1, ["accelerate"]
    dice = [
        (one, draw, np.random.default_rng((zlib.crc32(one.name.encode()), draw)))
        for one in tables
        for draw in range(options.draws)
    ]
    cases = [(one.noisy(NOISE, generator), draw) for one, draw, generator in dice]
    print(f"{len(tables)} tables of V100s in {options.grids.name}, {options.draws} draws")
    found: dict[str, dict[str, Any]] = {"tula": {"lines": float(len(JOB.split("\n")) - JOB.count("\n\n"))}}
    with tempfile.TemporaryDirectory(prefix="peers-") as temporary:
        pythons = {}
        for name in options.only or PEERS:
            found[name] = {
                "version": PEERS[name].requirements[0].split("==")[1],
            }
            if PEERS[name].asked != "refuses":
                found[name]["lines"] = float(lines_of(name))
            try:
                pythons[name] = (
                    sys.executable if options.smoke else python_of(name, options.environments or Path(temporary))
                )
            except Refused as error:
                found[name]["install"] = str(error)
        on_tables(found, pythons, cases)
        if not options.smoke:
            on_script(found, {name: python for name, python in pythons.items() if PEERS[name].asked != "refuses"})
    rows = [[name, *(cell(one.get(key)) for key in COLUMNS)] for name, one in found.items()]
    print_table("each peer", ["peer", *COLUMNS], rows)
    refused = {
        f"{name}: {key}": one[key]
        for name, one in found.items()
        for key in ("install", "table", "script")
        if key in one
    }
    print_table("no answer", ["peer: job", "because"], [[key, value] for key, value in refused.items()])
    write_json(options.json, {f"{name}.{key}": value for name, one in found.items() for key, value in one.items()})
    return 0


def cell(value: float | str | None) -> str:
    """A cell of the table."""
    return "-" if value is None else value if isinstance(value, str) else f"{value:.3g}"


if __name__ == "__main__":
    raise SystemExit(main())
