"""Measures how good plans over nodes, batch and options are, and how well the effects of options are predicted.

    python -m benchmarks.options [--tables FOLDER] [--draws 5] [--noise 0.03] [--json OUT] [--smoke]

`--tables` is a folder with dlperf_v100.csv, lambda_tf2021.csv and tf_cnn_2017.csv, which are not in the repository.
They contain step times of networks on several clusters, with different values of precision, XLA, graph fusion, gradient
clipping or synthetic data. This project's tables of one H100 contain step times and memory for several batches, with
different precisions, and with and without checkpointing. A launch of the planner measures one variant on one cluster
with up to three batches. It returns the table's step times multiplied by random noise; `--noise` is the standard
deviation of the noise's logarithm. The recommendation is then evaluated with the table's step times without noise. Only
measured configurations are candidates, so all candidates fit into memory. All rank-hours have the same price.

Synthetic jobs have five options (precision, compile, checkpointing, num_workers and one with an unknown name): 32
variants on 1 to 8 nodes with up to six batches. The effects are drawn from a wider distribution than the planner
assumes. Some effects make a step slower, pairs of effects interact, and in every third job the loader is slower than
the compute, so runs report a wait for data. Half precision and checkpointing reduce the memory per example; static
bytes differ by 10 % between variants, and the peak is the larger of two linear functions of the batch.

The regret of a recommendation is the fraction by which its time or cost exceeds that of the best configuration.
`options.regret.time.mean`, `.cost.mean` and `.max` summarise the regrets over tables and synthetic jobs, and `source.*`
the regrets of each table. `.everything.*` are the regrets if every configuration is measured once, with the same noise,
and the configuration with the lowest measured value is chosen, in 100 draws: `.mean` is over draws and jobs, `.max` is
the median over draws of the worst job's regret, and `.above_ten` is the share of draws in which any job's regret is
above 10 %. `options.launches.one`, `.two` and `.five` are the mean numbers of launches with one, two and five options,
and `options.exhaustive.*` are the numbers of launches that would measure all combinations.
`options.effect.one_launch.*` are the errors |log(predicted / measured)| for dlperf's variants that differ from the base
in one switch, on the clusters where the variant was not launched, in five draws of the noise. The base was launched on
the smallest and the largest cluster, and the variant only on the smallest cluster. `options.effect.all.*` are the same
errors for all tables; for `options.effect.end.*`, the variant was also launched on the largest cluster. Two kinds of
keys show how much of the error is due to noise and how much to the base: with `.noiseless`, the launches have no noise,
and with `.base_thrice`, the base was also launched on a cluster between the two. `options.coverage` is the share of
step times in `options.effect.all.*` and `options.effect.end.*` that are within their predicted 90 % intervals.
`options.largest_batch.*` are the errors |log(predicted / true)| of the largest batch of launched variants of the
synthetic jobs, as predicted by the memory model.

`options.h100.*` cover the jobs on one H100, where each combination needs one launch; no other key covers these jobs.
`effect` is the error for those batches of a variant that its launch did not measure, after one launch of the base and
one launch of the variant. `largest_batch` is the error of a variant's largest batch, as predicted from readings at
smaller batches for a device that has exactly the memory that this batch needed.
"""

from __future__ import annotations

import itertools
import math
import re
import zlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.gpu.store import H100
from benchmarks.support.grids import end_launches, middle_launch, read_rows
from benchmarks.support.report import make_parser, mean, median, percentile, print_table, write_json
from tula_service.perfmodel.choice import Choice, recommend
from tula_service.perfmodel.memory_model import MemoryObservations, fit_memory
from tula_service.perfmodel.objectives import Goal
from tula_service.perfmodel.planner import PlanBudget, plan
from tula_service.perfmodel.points import StepTimeObservations
from tula_service.perfmodel.pricing import Offer, Training
from tula_service.perfmodel.priors import Priors
from tula_service.perfmodel.step_time_model import StepTimeModel, fit_step_time, unmeasured_model
from tula_service.perfmodel.variants import Launch, find_launch, find_launches
from tula_wire import Configuration
from tula_wire.enums import Objective
from tula_wire.options import Options, combinations

_OBJECTIVES: Final[tuple[Objective, ...]] = ("time", "cost")
_EXAMPLES = 1.28e8
_BATCHES_OF_A_LAUNCH = 3
_EXHAUSTIVE_DRAWS = 100
_EFFECT_DRAWS = 5  # draws of the noise; medians over DLPerf's variants differ by a fifth between draws
_ORDERED: Final[Mapping[str, tuple[str, ...]]] = {
    "precision": ("fp32", "fp16"),
    "compile": ("off", "on"),
    "fusion": ("off", "on"),
    "clipping": ("on", "off"),
    "loader": ("real", "synthetic"),
}
"""The options in the tables and their values; the first value of each option is the base."""


@dataclass(frozen=True)
class Job:
    """The measured configurations of a job with options: seconds per step, and seconds spent waiting for data."""

    name: str
    source: str
    options: dict[str, list[str]]
    step_time_s: dict[Configuration, float] = field(repr=False)
    input_time_s: dict[Configuration, float] = field(default_factory=dict, repr=False)

    @property
    def candidates(self) -> tuple[Configuration, ...]:
        """Return the measured configurations, sorted."""
        return tuple(sorted(self.step_time_s))

    @property
    def base(self) -> Options:
        """Return the first value of each option."""
        return combinations(self.options)[0]

    def value(self, c: Configuration, objective: Objective) -> float:
        """Return the seconds per example, multiplied by the number of ranks if the objective is cost."""
        return self.step_time_s[c] / c.global_batch_size * (c.world_size if objective == "cost" else 1)

    def measure(self, configurations: Sequence[Configuration], factors: Mapping[Configuration, float]) -> Measured:
        """Return the measurements of these configurations; `factors` contains the noise of each configuration."""
        step_s = [self.step_time_s[c] * factors[c] for c in configurations]
        input_s = [self.input_time_s.get(c, math.nan) * factors[c] for c in configurations]
        return StepTimeObservations.at(configurations, step_s, input_time_s=input_s)


Measured = StepTimeObservations


def table_jobs(folder: Path) -> Iterator[Job]:
    """Yield the jobs of the tables whose base and at least one other variant were measured on several clusters."""
    rows: dict[tuple[str, str], dict[tuple[Configuration, tuple[tuple[str, str], ...]], list[float]]] = {}
    for name, parse in (("dlperf_v100", _of_dlperf), ("lambda_tf2021", _of_lambda), ("tf_cnn_2017", _of_tf_cnn)):
        for row in read_rows(folder / f"{name}.csv"):
            if (parsed := parse(row)) is None or not row["step_time_s"]:
                continue
            job, options = parsed
            nodes, ranks = int(float(row["num_nodes"] or 1)), int(float(row["num_replicas"]))
            at = Configuration(
                num_nodes=nodes, ranks_per_node=ranks // nodes, local_batch_size=int(float(row["local_batch"]))
            )
            times = rows.setdefault((name, job), {}).setdefault((at, tuple(sorted(options.items()))), [])
            times.append(float(row["step_time_s"]))
    for (source, job), times_of in sorted(rows.items()):
        yield from _job(source, job, {key: float(np.mean(times)) for key, times in times_of.items()})


def _job(
    source: str, name: str, times: Mapping[tuple[Configuration, tuple[tuple[str, str], ...]], float]
) -> Iterator[Job]:
    """Yield the job with these step times, if its base and another variant were measured on at least two clusters."""
    seen = {option: {dict(chosen)[option] for _, chosen in times} for option, _ in next(iter(times))[1]}
    options = {
        option: [word for word in _ORDERED[option] if word in words] for option, words in seen.items() if len(words) > 1
    }
    step_time_s = {
        replace(c, options=tuple((option, word) for option, word in chosen if option in options)): seconds
        for (c, chosen), seconds in times.items()
    }
    base = combinations(options)[0]
    clusters = {o: {c.world_size for c in step_time_s if c.options == o} for o in {c.options for c in step_time_s}}
    kept = {o for o, sizes in clusters.items() if len(sizes) > 1}
    if base in kept and len(kept) > 1:
        yield Job(f"{source}/{name}", source, options, {c: s for c, s in step_time_s.items() if c.options in kept})


def h100_jobs() -> Iterator[tuple[Job, dict[Configuration, float]]]:
    """Yield the jobs that ran on one H100, each with the peak bytes of its configurations.

    A network's precision is varied without checkpointing, and checkpointing is varied in the precision for which both
    of its values were measured.
    """
    steps = {
        (row["network"].removesuffix("+checkpointing"), row["precision"], bool(int(row["activation_checkpointing"])),
         int(row["local_batch_size"])): float(row["step_time_s"])
        for row in read_rows(H100 / "gpu_steps.csv")
    }  # fmt: skip
    peaks = {
        (row["workload"], int(row["local_batch_size"])): float(row["memory_bytes"])
        for row in read_rows(H100 / "gpu_memory.csv")
    }
    for network in sorted({network for network, *_ in steps}):
        for option, values in (("precision", ("tf32", "bf16")), ("checkpointing", ("off", "on"))):
            times: dict[Configuration, float] = {}
            memory: dict[Configuration, float] = {}
            for (of, precision, checkpoints, batch), seconds in steps.items():
                word = precision if option == "precision" else "on" if checkpoints else "off"
                if of == network and (precision == "bf16" if option == "checkpointing" else not checkpoints):
                    c = Configuration(num_nodes=1, ranks_per_node=1, local_batch_size=batch, options=((option, word),))
                    times[c] = seconds
                    memory[c] = peaks[f"{network}{'+checkpointing' * checkpoints}-{precision}", batch]
            if len({c.options for c in times}) == 2:
                yield Job(f"h100/{network} {option}", "h100", {option: list(values)}, times), memory


def _of_dlperf(row: Mapping[str, str]) -> tuple[str, dict[str, str]] | None:
    """Return the network with its framework, and the switches according to the row's name and notes."""
    found = re.fullmatch(r"(\S+) (\S+) (FP32|FP16)(?:\(inferred\))?", row["model"])
    if found is None:
        return None
    network, framework, precision = found.groups()
    notes = row["notes"].lower()
    options = {"precision": precision.lower()}
    if framework == "TensorFlow" and "xla" in notes:
        options["compile"] = "off" if "without xla" in notes else "on"
    if framework == "MindSpore" and "graph kernel fusion" in notes:
        options["fusion"] = "off" if "without" in notes else "on"
    if framework.startswith("OneFlow") and "clip" in notes:
        options["clipping"] = "off" if "without clip" in notes else "on"
    if "dali" in notes or "loss_scaling" in notes or "static loss scale" in notes or "with amp" in notes:
        return None  # further variants of a framework that have no base
    return f"{network} {framework}{' clipping' if 'clipping' in options else ''}", options


def _of_lambda(row: Mapping[str, str]) -> tuple[str, dict[str, str]] | None:
    """Return the network with its machine, the precision, and the XLA setting (from the machine's name)."""
    network, _, precision = row["model"].rpartition(" ")
    if precision not in ("fp16", "fp32") or "trt2" in row["network"]:  # near-duplicates of `trt`
        return None
    machine = re.sub(r"\dx(?=A100)", "", row["network"].replace("_XLA", ""))
    return f"{network} {machine}", {"precision": precision, "compile": "on" if "XLA" in row["network"] else "off"}


def _of_tf_cnn(row: Mapping[str, str]) -> tuple[str, dict[str, str]] | None:
    """Return the network with its cluster, and the kind of data (real or synthetic)."""
    if row["notes"] not in ("real data", "synthetic data"):
        return None
    return f"{row['model']} {row['network']}", {"loader": row["notes"].split()[0]}


@dataclass(frozen=True)
class Memory:
    """The memory of a synthetic job in bytes, by variant: static bytes, bytes per example, and the device's capacity.

    The peak is the larger of the bytes at two points in a step. The bytes at the second point grow faster with the
    batch, from a lower start; `second` is the ratio of their slope to the slope at the first point.
    """

    static_bytes: Mapping[Options, float]
    bytes_per_sample: Mapping[Options, float]
    second: Mapping[Options, float]
    capacity_bytes: float

    def peak(self, options: Options, batch: int) -> float:
        """Return the peak bytes of a local batch."""
        static, slope = self.static_bytes[options], self.bytes_per_sample[options]
        return max(static + slope * batch, 0.6 * static + self.second[options] * slope * batch)

    def largest(self, options: Options) -> int:
        """Return the largest local batch that fits into the device's memory."""
        return bisect_left(range(1, 4096), True, key=lambda batch: self.peak(options, batch) > self.capacity_bytes)


def synthetic_job(number: int) -> tuple[Job, Memory]:
    """Return a random job with five options, and its memory; in every third job, the loader is the bottleneck."""
    dice = np.random.default_rng((35, number))
    options = {
        "precision": ["fp32", "bf16"],
        "compile": ["off", "on"],
        "checkpointing": ["off", "on"],
        "num_workers": ["4", "16"],
        "attention": ["eager", "other"],
    }
    effect = {
        "precision": dice.normal(-0.55, 0.35),
        "compile": dice.normal(-0.15, 0.2),
        "checkpointing": dice.normal(0.28, 0.1),
        "num_workers": 0.0,
        "attention": dice.normal(-0.1, 0.3),
    }
    interaction = {pair: dice.normal(0.0, 0.15) for pair in itertools.combinations(sorted(options), 2)}
    compute_s, floor_s = 10 ** dice.uniform(-3.2, -1.8), 10 ** dice.uniform(-2.5, -1.3)
    link_s = 10 ** dice.uniform(-2.5, -0.5)
    binds = number % 3 == 0
    loading_s = compute_s * (dice.uniform(0.8, 2.5) if binds else dice.uniform(0.01, 0.2))
    per_sample = 10 ** dice.uniform(7.3, 8.3)
    memory = Memory(
        static_bytes={o: 2e9 * math.exp(dice.normal(0.0, 0.1)) for o in combinations(options)},
        second={o: dice.uniform(0.9, 1.2) for o in combinations(options)},
        bytes_per_sample={
            o: per_sample
            * (dice.uniform(0.55, 0.75) if dict(o)["precision"] == "bf16" else 1.0)
            * (dice.uniform(0.25, 0.6) if dict(o)["checkpointing"] == "on" else 1.0)
            for o in combinations(options)
        },
        capacity_bytes=2e9 + per_sample * dice.uniform(140, 260),
    )
    step_time_s: dict[Configuration, float] = {}
    input_time_s: dict[Configuration, float] = {}
    base = dict(combinations(options)[0])
    for chosen in combinations(options):
        on = [name for name, word in chosen if word != base[name] and name != "num_workers"]
        pairs = itertools.combinations(sorted(on), 2)
        log_factor = sum(effect[name] for name in on) + sum(interaction[pair] for pair in pairs)
        loader_s = loading_s / (3.0 if dict(chosen)["num_workers"] == "16" else 1.0)
        for nodes, batch in itertools.product((1, 2, 4, 8), (16, 32, 64, 128, 256, 512)):
            if batch > memory.largest(chosen):
                continue
            c = Configuration(num_nodes=nodes, ranks_per_node=1, local_batch_size=batch, options=chosen)
            own_s = math.exp(log_factor) * (compute_s * batch + floor_s)
            comm_s = link_s * 2.0 * (nodes - 1) / nodes
            rest_s = (own_s**3 + comm_s**3) ** (1 / 3) * math.exp(dice.normal(0.0, 0.02))
            input_time_s[c] = max(0.0, loader_s * batch - 0.95 * rest_s)
            step_time_s[c] = rest_s + input_time_s[c]
    return Job(f"synthetic-{number:02}", "synthetic", options, step_time_s, input_time_s), memory


@dataclass(frozen=True)
class Planned:
    """The launches of a plan, in order, and its final recommendation."""

    launched: tuple[Configuration, ...]
    launches: int
    chosen: Configuration
    model: StepTimeModel


def replay(job: Job, objective: Objective, factors: Mapping[Configuration, float]) -> Planned:
    """Make the launches that the planner requests, as the service does, until the planner stops."""
    offers = {"default": Offer(usd_per_rank_hour=3600.0)}
    goal = Goal(objective, Training(_EXAMPLES), offers, options=job.options)
    budget = PlanBudget(max_runs=4 + 2 * len(job.options), share_launches=True)
    priors, launched = Priors(base=job.base), list[Configuration]()
    model: StepTimeModel | None = None
    choice: Choice | None = None
    while True:
        decided = plan(
            "adaptive",
            job.candidates,
            model or unmeasured_model(priors, job.candidates),
            goal=goal,
            recommendation=choice,
            budget=budget,
        )
        asked = [run.configuration for run in decided.runs]
        if not asked:
            assert choice is not None
            assert choice.chosen is not None
            assert model is not None
            launches = len(find_launches(launched))
            return Planned(tuple(launched), launches, choice.chosen.configuration, model)
        first = find_launch(asked[0])
        launched += [c for c in asked if find_launch(c) == first]
        model = fit_step_time(job.measure(launched, factors), prior=priors, candidates=job.candidates)
        choice = recommend(job.candidates, model, goal)


def regret(job: Job, chosen: Configuration, objective: Objective) -> float:
    """Return the fraction by which a configuration's time or cost exceeds the lowest in the table (0.1 = 10 %)."""
    return job.value(chosen, objective) / min(job.value(c, objective) for c in job.candidates) - 1.0


def regrets_of_everything(job: Job, objective: Objective, noise: float) -> list[float]:
    """Return, for each draw of the noise, the regret of choosing the configuration with the lowest measured value."""
    values = {c: job.value(c, objective) for c in job.candidates}
    draws = (draw_noise(job, noise, draw) for draw in range(_EXHAUSTIVE_DRAWS))
    least = [min(values, key=lambda c: values[c] * factors[c]) for factors in draws]
    return [values[c] / min(values.values()) - 1.0 for c in least]


def draw_noise(job: Job, sd: float, draw: int) -> dict[Configuration, float]:
    """Return the noise factor of each configuration's measurement, which is always the same for a job and draw."""
    dice = np.random.default_rng((zlib.crc32(job.name.encode()), draw))
    return {c: float(np.exp(sd * dice.standard_normal())) for c in job.candidates}


@dataclass
class Errors:
    """The errors |log(predicted / measured)|, with flags for intervals that contain the measured time."""

    errors: list[float] = field(default_factory=list)
    within: list[bool] = field(default_factory=list)

    def add(self, model: StepTimeModel, job: Job, at: Sequence[Configuration]) -> None:
        """Add the errors of the predictions for the configurations `at`."""
        predicted = model.predict(at)
        for row, c in enumerate(at):
            truth = job.step_time_s[c]
            self.errors.append(abs(math.log(predicted.mean_s[row] / truth)))
            self.within.append(bool(predicted.low_s[row] <= truth <= predicted.high_s[row]))

    def extend(self, other: Errors) -> None:
        """Add the errors of another instance."""
        self.errors += other.errors
        self.within += other.within


def judge_effects(
    job: Job, factors: Mapping[Configuration, float], *, third_of_base: bool = False
) -> tuple[Errors, Errors]:
    """Return the errors on clusters where a variant was not launched, after one and after two launches of the variant.

    The errors cover all variants that differ from the base in one switch. The base was launched on the smallest and the
    largest cluster and, with `third_of_base`, on a cluster between them.
    """
    priors, after_one, after_two = Priors(base=job.base), Errors(), Errors()
    for options in sorted({c.options for c in job.candidates} - {job.base}):
        if sum(pair not in job.base for pair in options) != 1:
            continue
        base = [c for c in job.candidates if c.options == job.base]
        of_base = [*_ends(base), *(middle_launch(base) if third_of_base else ())]
        smallest, *largest = _ends([c for c in job.candidates if c.options == options])
        for launches, errors in (([smallest], after_one), ([smallest, *largest], after_two)):
            ran = [c for launch in (*of_base, *launches) for c in _batches(job, launch)]
            taken = set(launches)
            left = [c for c in job.candidates if c.options == options and find_launch(c) not in taken]
            if left and (launches != [smallest] or largest):
                errors.add(fit_step_time(job.measure(ran, factors), prior=priors, candidates=job.candidates), job, left)
    return after_one, after_two


def judge_batches(job: Job, factors: Mapping[Configuration, float], errors: Errors) -> None:
    """Add the errors for a variant's unmeasured batches on one device, after three batches each of base and variant."""
    of_base, of_variant = ([c for c in job.candidates if (c.options == job.base) is base] for base in (True, False))
    shared = [c for c in of_variant if c.local_batch_size == of_base[-1].local_batch_size]
    own = list(dict.fromkeys([of_variant[0], of_variant[-1], *shared, of_variant[len(of_variant) // 2]]))[:3]
    ran = [*_batches(job, find_launch(of_base[0])), *own]
    model = fit_step_time(job.measure(ran, factors), prior=Priors(base=job.base), candidates=job.candidates)
    errors.add(model, job, [c for c in of_variant if c not in own])


def _ends(candidates: Sequence[Configuration]) -> list[Launch]:
    """Return the launches on the smallest and on the largest cluster, in this order."""
    return list(reversed(end_launches(candidates)))


def _batches(job: Job, launch: Launch) -> list[Configuration]:
    """Return the configurations that a launch measures: those of the smallest, the middle and the largest batch."""
    batches = [c for c in job.candidates if find_launch(c) == launch]
    return sorted({batches[0], batches[len(batches) // 2], batches[-1]})[:_BATCHES_OF_A_LAUNCH]


def largest_batches(planned: Planned, memory: Memory, job: Job) -> list[float]:
    """Return |log(predicted / true)| for the largest batch of each launched variant except the base."""
    errors = []

    def readings(options: Options) -> dict[int, float]:
        ran = {c.local_batch_size for c in planned.launched if c.options == options}
        return {batch: memory.peak(options, batch) for batch in sorted(ran)}

    of_base = readings(job.base)
    base = fit_memory(MemoryObservations(list(of_base), list(of_base.values())))
    for options in sorted({c.options for c in planned.launched} - {job.base}):
        read = readings(options)
        observed = MemoryObservations(list(read), list(read.values()), static_bytes=max(base.static_bytes, 1.0))
        fits = fit_memory(observed).max_local_batch_size(memory.capacity_bytes / 0.98, safety_probability=0.5)
        errors.append(abs(math.log(max(fits, 1) / memory.largest(options))))
    return errors


def largest_batch_below(job: Job, peaks: Mapping[Configuration, float]) -> float:
    """Return |log(predicted / measured)| for the variant's largest batch on a device with just enough memory for it.

    The base was read at three batches. The variant was read at its smallest batch and at the largest batch of the base
    or, if that is not smaller than the variant's largest batch, at the variant's middle batch.
    """
    of_base, of_variant = ([c for c in job.candidates if (c.options == job.base) is base] for base in (True, False))
    base = fit_memory(_read(_batches(job, find_launch(of_base[0])), peaks))
    *smaller, largest = of_variant
    second = next(
        (c for c in smaller if c.local_batch_size == of_base[-1].local_batch_size), smaller[len(smaller) // 2]
    )
    observed = replace(_read([smaller[0], second], peaks), static_bytes=max(base.static_bytes, 1.0))
    fits = fit_memory(observed).max_local_batch_size(peaks[largest] / 0.98, safety_probability=0.5)
    return abs(math.log(max(fits, 1) / largest.local_batch_size))


def _read(at: Sequence[Configuration], peaks: Mapping[Configuration, float]) -> MemoryObservations:
    return MemoryObservations([float(c.local_batch_size) for c in at], [peaks[c] for c in at])


@dataclass
class Figures:
    """The results so far: regrets by source and objective, launches by the number of options, and errors."""

    regrets: dict[str, dict[Objective, list[float]]] = field(default_factory=dict)
    everything: dict[Objective, list[list[float]]] = field(default_factory=lambda: {name: [] for name in _OBJECTIVES})
    launches: dict[int, list[int]] = field(default_factory=lambda: {1: [], 2: [], 5: []})
    exhaustive: dict[int, list[int]] = field(default_factory=lambda: {1: [], 2: [], 5: []})
    largest_batch: list[float] = field(default_factory=list)
    effects: defaultdict[str, Errors] = field(default_factory=lambda: defaultdict(Errors))
    h100: Errors = field(default_factory=Errors)
    h100_largest_batch: list[float] = field(default_factory=list)
    h100_regrets: list[float] = field(default_factory=list)

    def judge_choice(self, job: Job, memory: Memory | None, noise: float, draws: int) -> None:
        """Add the regret and launches of the planner for each objective and draw."""
        regrets = self.regrets.setdefault(job.source, {name: [] for name in _OBJECTIVES})
        for objective in _OBJECTIVES:
            self.everything[objective].append(regrets_of_everything(job, objective, noise))
        for draw, objective in itertools.product(range(draws), _OBJECTIVES):
            planned = replay(job, objective, draw_noise(job, noise, draw))
            regrets[objective].append(regret(job, planned.chosen, objective))
            self.launches[len(job.options)].append(planned.launches)
            self.exhaustive[len(job.options)].append(len(find_launches(job.candidates)))
            if memory is not None:
                self.largest_batch += largest_batches(planned, memory, job)

    def judge_effects(self, job: Job, noise: float, draws: int) -> None:
        """Add the errors of predictions for those variants of a table's job that differ from the base in one switch."""
        for suffix, sd, num_draws in (("", noise, draws), (".noiseless", 0.0, 1), (".base_thrice", noise, draws)):
            for draw in range(num_draws):
                factors = draw_noise(job, sd, draw)
                after_one, after_two = judge_effects(job, factors, third_of_base=suffix == ".base_thrice")
                self.effects[f"all{suffix}"].extend(after_one)
                self.effects[f"end{suffix}"].extend(after_two)
                if job.source == "dlperf_v100":
                    self.effects[f"one_launch{suffix}"].extend(after_one)

    def judge_device(self, job: Job, peaks: Mapping[Configuration, float], noise: float, draws: int) -> None:
        """Add the planner's regret on one device, and the errors for unmeasured batches and for the largest batch."""
        for draw in range(draws):
            factors = draw_noise(job, noise, draw)
            self.h100_regrets.append(regret(job, replay(job, "time", factors).chosen, "time"))
            judge_batches(job, factors, self.h100)
        self.h100_largest_batch.append(largest_batch_below(job, peaks))

    def as_json(self) -> dict[str, float | str]:
        """Return all figures by key."""
        figures: dict[str, float | str] = {}
        for objective in _OBJECTIVES:
            values = [value for of_source in self.regrets.values() for value in of_source[objective]]
            figures[f"options.regret.{objective}.mean"] = mean(values)
            figures[f"options.regret.{objective}.max"] = max(values)
            worst = [max(of_draw) for of_draw in zip(*self.everything[objective], strict=True)]
            figures[f"options.regret.{objective}.everything.mean"] = mean(
                list(itertools.chain(*self.everything[objective]))
            )
            figures[f"options.regret.{objective}.everything.max"] = median(worst)
            figures[f"options.regret.{objective}.everything.above_ten"] = mean(
                [float(regret > 0.1) for regret in worst]
            )
            for source, of_source in self.regrets.items():
                figures[f"source.{source}.regret.{objective}.mean"] = mean(of_source[objective])
                figures[f"source.{source}.regret.{objective}.max"] = max(of_source[objective])
        for number, word in ((1, "one"), (2, "two"), (5, "five")):
            figures[f"options.launches.{word}"] = mean(self.launches[number])
            figures[f"options.exhaustive.{word}"] = mean(self.exhaustive[number])
        for name, errors in self.effects.items():
            figures[f"options.effect.{name}.median"] = median(errors.errors)
            figures[f"options.effect.{name}.p90"] = percentile(errors.errors, 0.9)
        within = [float(hit) for hit in (*self.effects["all"].within, *self.effects["end"].within)]
        figures["options.coverage"] = mean(within)
        figures["options.largest_batch.median"] = median(self.largest_batch)
        figures["options.largest_batch.p90"] = percentile(self.largest_batch, 0.9)
        figures["options.h100.regret.mean"] = mean(self.h100_regrets)
        figures["options.h100.regret.max"] = max(self.h100_regrets)
        figures["options.h100.effect.median"] = median(self.h100.errors)
        figures["options.h100.effect.p90"] = percentile(self.h100.errors, 0.9)
        figures["options.h100.coverage"] = mean([float(hit) for hit in self.h100.within])
        figures["options.h100.largest_batch.median"] = median(self.h100_largest_batch)
        figures["options.h100.largest_batch.max"] = max(self.h100_largest_batch)
        return figures


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures that the module's docstring describes."""
    parser = make_parser("options", __doc__)
    parser.add_argument("--tables", type=Path, metavar="FOLDER", help="folder with the three tables (default: none)")
    parser.add_argument("--noise", type=float, default=0.03, help="standard deviation of a run's log step time (0.03)")
    parser.add_argument("--draws", type=int, default=5, help="number of noise draws for each job of the tables")
    parser.add_argument("--synthetic", type=int, default=18, metavar="N", help="synthetic jobs")
    options = parser.parse_args(arguments)
    figures = Figures()
    for number in range(1 if options.smoke else options.synthetic):
        job, memory = synthetic_job(number)
        figures.judge_choice(job, memory, options.noise, 1)
    for job, peaks in itertools.islice(h100_jobs(), 2 if options.smoke else None):
        figures.judge_device(job, peaks, options.noise, 1 if options.smoke else options.draws)
    for job in [] if options.tables is None else table_jobs(options.tables):
        figures.judge_choice(job, None, options.noise, 1 if options.smoke else options.draws)
        figures.judge_effects(job, options.noise, 1 if options.smoke else _EFFECT_DRAWS)
    printed = figures.as_json()
    print_table(
        "choices over nodes, batch and options", ("key", "value"), [(k, f"{v:.4g}") for k, v in printed.items()]
    )
    write_json(options.json, printed)


if __name__ == "__main__":
    main()
