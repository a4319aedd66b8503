"""Reads grids of measured configurations, so that the runs of a plan can be replayed from a table."""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from benchmarks.support.report import make_parser
from tula_service.perfmodel.points import Points, StepTimeObservations
from tula_service.perfmodel.priors import generic_prior
from tula_service.perfmodel.step_time_form import AT, hypotheses, log_terms, residual_covariance
from tula_service.perfmodel.variants import Launch, find_launches
from tula_wire import Configuration

Found = TypeVar("Found")

DATA = Path(__file__).parents[2] / "tests" / "data"
_DRAWN_SEED, _TIMED_SD = 27, 0.07
STEP_TIME_TABLE, MEMORY_TABLE = DATA / "grids" / "step_time.csv", DATA / "grids" / "memory.csv"


@dataclass(frozen=True, order=True, kw_only=True)
class Placement(Configuration):
    """A configuration whose ranks need not be spread evenly over its nodes (for example, 12 GPUs on 5 nodes)."""

    ranks: int = 1

    @property
    def world_size(self) -> int:
        """Return the measured number of ranks."""
        return self.ranks


@dataclass(frozen=True)
class Workload:
    """All measured configurations for one combination of GPU, network and placement, with their mean step times.

    All times are in seconds. `observed_s` contains the step times that profiling measures, if they differ from the true
    step times in `step_time_s`. `sync_time_s` contains the time that a step waits for gradients, if the source states
    it.
    """

    name: str
    source: str
    grid: str
    step_time_s: dict[Placement, float] = field(repr=False)
    observed_s: dict[Placement, float] | None = field(default=None, repr=False)
    sync_time_s: dict[Placement, float] = field(default_factory=dict, repr=False)

    @property
    def candidates(self) -> tuple[Placement, ...]:
        """Return the measured configurations, sorted."""
        return tuple(sorted(self.step_time_s))

    def measure(self, configurations: Sequence[Configuration]) -> StepTimeObservations:
        """Return the measurements that profiling makes at these configurations."""
        observed = self.observed_s or self.step_time_s
        seconds = [observed[c] for c in configurations]  # type: ignore[index]
        return StepTimeObservations.at(configurations, seconds, exposed_comm_time_s=self.measured_sync(configurations))

    def measured_sync(self, configurations: Sequence[Configuration]) -> list[float]:
        """Return the exposed communication that profiling measures, in seconds, or NaN where it is unknown.

        If a run is slow, all parts of its steps are slow by the same factor.
        """
        observed = self.observed_s or self.step_time_s
        return [
            self.sync_time_s[c] * observed[c] / self.step_time_s[c] if c in self.sync_time_s else math.nan
            for c in configurations
        ]

    def noisy(self, sd: float, generator: np.random.Generator) -> Workload:
        """Return the workload with one noisy run per configuration; `sd` is the standard deviation of the log time."""
        observed = {c: t * float(generator.lognormal(0.0, sd)) for c, t in self.step_time_s.items()}
        return replace(self, observed_s=observed)


@dataclass(frozen=True)
class MemoryWorkload:
    """The local batches of one network on one GPU in ascending order, and the bytes of memory read at each batch.

    `analytic_bytes` is the result of a count of tensors at each batch, and `parameters` is the network's number of
    parameters, if the table has these columns.
    """

    name: str
    source: str
    gpu: str
    local_batch_size: tuple[int, ...]
    memory_bytes: tuple[float, ...]
    analytic_bytes: tuple[float, ...] | None = None
    parameters: float | None = None


def read_step_time(path: Path, sync: Sequence[Path] = ()) -> list[Workload]:
    """Return the workloads of a step-time table, in the order of the file; repeats of a configuration are averaged.

    The waits for gradients are in the table's column `sync_time_s` or in tables of the sources (`sync`) with the
    columns gpu, network (the cluster), model, num_nodes, num_replicas, local_batch and sync_time_s. If several of these
    tables contain a configuration, the first table is used.
    """
    sync_times = _sync_times(sync)
    measured: dict[str, dict[Placement, list[float]]] = {}
    about: dict[str, tuple[str, str]] = {}
    waits: dict[str, dict[Placement, list[float]]] = {}
    for row in read_rows(path):
        nodes, ranks = int(float(row["num_nodes"])), int(float(row["world_size"]))
        placement = Placement(
            num_nodes=nodes,
            ranks_per_node=max(1, ranks // nodes),
            local_batch_size=int(float(row["local_batch_size"])),
            ranks=ranks,
        )
        about[row["workload"]] = (row["source"], row["grid"])
        times = measured.setdefault(row["workload"], {})
        times.setdefault(placement, []).append(float(row["step_time_s"]))
        place = (row.get("gpu"), row.get("cluster"), row.get("model"), nodes, ranks, placement.local_batch_size)
        seconds = [float(row["sync_time_s"])] if row.get("sync_time_s") else sync_times.get(place, [])
        if seconds:
            waits.setdefault(row["workload"], {}).setdefault(placement, []).extend(seconds)
    return [
        Workload(name, *about[name], _means(seconds), sync_time_s=_means(waits.get(name, {})))
        for name, seconds in measured.items()
    ]


def _means(values: dict[Placement, list[float]]) -> dict[Placement, float]:
    return {where: sum(times) / len(times) for where, times in values.items()}


def _sync_times(tables: Sequence[Path]) -> dict[tuple[object, ...], list[float]]:
    first: dict[tuple[object, ...], list[float]] = {}
    for table in tables:
        read: dict[tuple[object, ...], list[float]] = {}
        for row in read_rows(table):
            if row["sync_time_s"] and row["num_nodes"]:
                counts = (int(float(row[name])) for name in ("num_nodes", "num_replicas", "local_batch"))
                place = (row["gpu"], row["network"], row["model"], *counts)
                read.setdefault(place, []).append(float(row["sync_time_s"]))
        first = read | first
    return first


def end_launches(candidates: Sequence[Configuration]) -> list[Launch]:
    """Return the launches on the largest and on the smallest cluster, or only one launch if these are the same.

    If several launches are on the same cluster, the launch with the least accumulation counts as the largest.
    """
    ordered = sorted(
        find_launches(candidates), key=lambda launch: (launch.world_size, -launch.grad_accum_steps, launch)
    )
    return list(dict.fromkeys((ordered[-1], ordered[0])))


def middle_launch(candidates: Sequence[Configuration]) -> list[Launch]:
    """Return a list with the launch in the middle between the end launches, or an empty list if there is none.

    The number of ranks of this launch is nearest to the geometric mean of the end launches' numbers of ranks.
    """
    ends = end_launches(candidates)
    rest = find_launches(candidates) - set(ends)
    centre = math.prod(launch.world_size for launch in ends) ** (1.0 / len(ends))
    return sorted(rest, key=lambda launch: (abs(math.log(launch.world_size / centre)), launch))[:1]


def read_memory(path: Path) -> list[MemoryWorkload]:
    """Return the workloads of a memory table in the order of the file, with any optional columns that it has."""
    readings: dict[tuple[str, str, str], dict[int, float]] = {}
    parameters: dict[tuple[str, str, str], float] = {}
    counted: dict[tuple[str, str, str], dict[int, float]] = {}
    for row in read_rows(path):
        key = (row["workload"], row["source"], row["gpu"])
        batch = int(float(row["local_batch_size"]))
        readings.setdefault(key, {})[batch] = float(row["memory_bytes"])
        if row.get("analytic_bytes"):
            counted.setdefault(key, {})[batch] = float(row["analytic_bytes"])
        if row.get("parameters"):
            parameters[key] = float(row["parameters"])
    workloads = []
    for key, peaks in readings.items():
        batches = tuple(sorted(peaks))
        analytic = counted.get(key, {})
        bytes_counted = tuple(analytic[batch] for batch in batches) if set(analytic) == set(peaks) else None
        read = tuple(peaks[batch] for batch in batches)
        workloads.append(MemoryWorkload(*key, batches, read, bytes_counted, parameters.get(key)))
    return workloads


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table without its comment lines."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def drawn_workloads(count: int) -> list[Workload]:
    """Return workloads drawn from the model's own prior; they can replace measured tables to evaluate a design.

    The workloads have up to 8 ranks per node, up to 16 nodes and five batches; one workload in three accumulates up to
    8 micro-steps. Each workload reports the split of its steps, with an error as if the phases had been timed.
    Workloads of the grid `hard` deviate from the model's form.
    """
    prior, workloads = generic_prior(), []
    beliefs = hypotheses(prior.scales)
    for number in range(count):
        dice = np.random.default_rng([_DRAWN_SEED, number])
        in_node, most_nodes = int(dice.choice([1, 4, 8])), int(dice.choice([4, 8, 16]))
        within = [(1, ranks) for ranks in (1, 2, 4, 8) if ranks <= in_node]
        clusters = [*within, *((nodes, nodes * in_node) for nodes in (2, 4, 8, 16) if nodes <= most_nodes)]
        accumulates = dice.random() < 1 / 3
        shapes = [(32 << doublings, 1) for doublings in range(5)]
        shapes += [(512, steps) for steps in (2, 4, 8)] if accumulates else []
        candidates = sorted(
            Placement(num_nodes=n, ranks_per_node=in_node, local_batch_size=b, grad_accum_steps=m, ranks=ranks)
            for n, ranks in clusters
            for b, m in shapes
        )
        of_steps = prior if accumulates else prior.without_accumulation()
        theta = dice.normal(of_steps.mean, of_steps.sd)
        theta[AT.compute] = 0.0
        strays = dice.random() < beliefs[1][1]
        scales, points = beliefs[strays][0], Points.of(candidates)
        terms = log_terms(theta, points, 512.0)
        covariance = residual_covariance(points, points, scales) + scales.own**2 * np.eye(len(points))
        residual = dice.multivariate_normal(np.zeros(len(points)), covariance)
        step_s, compute_s = np.exp(terms.step + residual), np.exp(terms.compute + residual)
        exposed_s = np.maximum(step_s - compute_s * dice.lognormal(0.0, _TIMED_SD, len(points)), 0.0)
        workloads.append(
            Workload(
                f"drawn-{number:03}",
                "accumulates" if accumulates else "plain",
                "hard" if strays else "regular",
                dict(zip(candidates, step_s.tolist(), strict=True)),
                sync_time_s=dict(zip(candidates, exposed_s.tolist(), strict=True)),
            )
        )
    return workloads


def smallest_of_each_grid(workloads: Sequence[Workload]) -> list[Workload]:
    """Return, for each kind of grid, the workload with the fewest configurations; a smoke run measures only these."""
    ordered = sorted(workloads, key=lambda workload: (len(workload.candidates), workload.name))
    return list({workload.grid: workload for workload in reversed(ordered)}.values())


def grids_parser(name: str, description: str | None, table: Path) -> argparse.ArgumentParser:
    """Return a parser with the options of a benchmark that reads a table."""
    parser = make_parser(name, description)
    parser.add_argument("--grids", type=Path, default=table, help=f"table of measured grids (CSV; {table.name})")
    return parser


def workloads_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of `over_workloads`."""
    parser = grids_parser(name, description, STEP_TIME_TABLE)
    parser.add_argument(
        "--drawn", type=int, metavar="N", help="use N workloads drawn from the prior instead of --grids"
    )
    parser.add_argument("--jobs", type=int, default=1, help="number of processes (1)")
    parser.add_argument(
        "--sync",
        type=Path,
        action="append",
        default=[],
        help="table of one source with sync_time_s (default: all tables in the folder steptime next to the grids)",
    )
    parser.add_argument("--only", action="append", default=[], help="use only workloads of this source (repeatable)")
    parser.add_argument("--without", action="append", default=[], help="exclude workloads of this source (repeatable)")
    return parser


def over_workloads(
    parser: argparse.ArgumentParser,
    measure: Callable[[Workload], Found],
    arguments: Sequence[str] | None,
    *,
    smoke: Callable[[Workload], Found] | None = None,
) -> tuple[argparse.Namespace, list[tuple[Workload, Found]]]:
    """Run `measure` on each workload of `--grids` in `--jobs` processes; with `--smoke`, run `smoke` on a few of them.

    Runs report the split of a step into compute and exposed communication, as the agent does, if the table or its
    sources contain it. Returns the options, and each workload with its result.
    """
    options = parser.parse_args(arguments)
    sync = options.sync or sorted((options.grids.resolve().parents[1] / "steptime").glob("*.csv"))
    workloads = [
        w
        for w in (drawn_workloads(options.drawn) if options.drawn else read_step_time(options.grids, sync))
        if w.source not in options.without and (not options.only or w.source in options.only)
    ]
    for table in options.sync:
        if not any(w.sync_time_s for w in read_step_time(options.grids, [table])):
            parser.error(
                f"--sync {table}: no row matches a configuration of {options.grids} (gpu, network, model and counts)."
            )
    if not workloads:
        parser.error("no workload matches: check --grids, --only and --without.")
    if options.smoke:
        workloads, measure = smallest_of_each_grid(workloads), smoke or measure
    if options.jobs == 1:
        return options, [(workload, measure(workload)) for workload in workloads]
    with ProcessPoolExecutor(options.jobs) as pool:
        return options, list(zip(workloads, pool.map(measure, workloads), strict=True))
