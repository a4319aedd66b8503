"""Gathers evidence from a job's runs: step times, memory use, and the feasible candidates."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

import tula_wire as wire
from tula_service.analysis import job_data
from tula_service.analysis.job_data import JobData
from tula_service.domain import MemoryReading, RunRecord, RunSummary
from tula_service.perfmodel.memory_model import (
    Beside,
    MemoryModel,
    MemoryObservations,
    Shards,
    fit_memory,
    switched,
)
from tula_service.perfmodel.points import FloatArray, ObservationError, StepTimeObservations
from tula_service.perfmodel.step_time_model import StepTimeModel, fit_step_time
from tula_service.perfmodel.variants import nearest
from tula_wire import Configuration
from tula_wire.configurations import Variant
from tula_wire.enums import FINAL_STATES
from tula_wire.format import cluster_name, duration, size
from tula_wire.memory import RESERVED_RATIO, assumed_context_bytes
from tula_wire.options import Options

_FEWEST_RUNS_TO_VALIDATE, _MOST_RUNS_TO_VALIDATE = 4, 12
_PARTS = ("optimizer_bytes", "gradient_bytes", "parameter_bytes")  # in the order in which the stages of ZeRO shard them
_NUM_SHARED = {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3}
_OPTIMIZER_BYTES = {"sgd": 0, "momentum": 4, "adam": 8, "other": 8}
_AS_LIKELY_AS_NOT = 0.5
_SHORTEST_STEP_S = 1e-7  # a fit to shorter step times overflows
_COUNTING_SD = 0.1
_SHARD = "data parallelism keeps a whole copy on every rank, so shard the optimizer or use a larger device"
_SHARD_ALL = "shard parameters and optimizer state"
_MORE_SHARDS = "increase cluster.min_nodes, so that more ranks share them, or use a larger device"
_LEAST_LEFT = 0.1  # least share of a reading that remains when the shared bytes are subtracted
_TELLING_SHARE = 0.125  # share of the device; a smaller reading says little about a batch that fills the device
_PROVING_STEPS = 3  # after three steps, the allocator has the blocks of every later step
_CONTEXT_SD = 0.7  # relative error of an assumed context
_RESERVED_SD = 0.1  # of the logarithm of reserved over allocated memory, from 13 rows on an H100
GROWING_SD = 0.02
"""The same standard deviation for growing segments; with these, the allocator reserved at most 2 % beyond its peak."""

Measured = Sequence[tuple[Configuration, RunSummary]]
Rows = Sequence[tuple[Configuration, MemoryReading | None]]


@dataclass(frozen=True)
class Evidence:
    """The evidence on which every fit, plan and choice of one job is based.

    `candidates` fit into memory, and `ruled_out` has a sentence for each configuration that does not fit. `doubtful`
    candidates have not run, and their probability of fitting into memory is lower than required. `failed`
    configurations may be neither planned nor chosen, because their newest run failed for a reason other than memory.
    `retried` contains the failed runs that will be repeated because the job was registered again after they failed.
    `rows` contains the configuration and run id of each observation, and `measured` the step time of each configuration
    in seconds. `fitted` has the configurations that have run, and therefore fit into memory, even if their step time is
    ignored. `left_out` has a sentence for each option value whose launches all failed, and `crashed` has a sentence for
    each combination of values that failed, and for each value that failed on only some instance types. A configuration
    with any of these values is treated as failed.
    """

    candidates: tuple[Configuration, ...]
    observed: StepTimeObservations | None
    rows: tuple[tuple[Configuration, str], ...]
    measured: Mapping[Configuration, float]
    fitted: frozenset[Configuration]
    memory: MemoryEvidence
    ruled_out: Mapping[Configuration, str]
    doubtful: frozenset[Configuration]
    failed: frozenset[Configuration]
    left_out: Mapping[tuple[str, str], str]
    crashed: tuple[str, ...]
    retried: tuple[RunRecord, ...]
    num_samples: int
    warnings: tuple[str, ...]

    @property
    def run_ids(self) -> tuple[str, ...]:
        """Return the id of the run of each observation."""
        return tuple(run_id for _, run_id in self.rows)


def gather_evidence(data: JobData) -> Evidence:
    """Return the evidence from a job's runs. Raises ObservationError if no candidate is left."""
    warnings: list[str] = []
    if data.drift is not None:
        warnings.append(f"{data.drift}; predictions are for the speed at which the job was profiled.")
    rows: list[tuple[Configuration, RunSummary]] = []
    misconfigured: set[str] = set()
    for summary in data.summaries:
        if summary.state == "out_of_memory":
            continue
        if summary.step_time_s is None:
            if summary.num_samples:
                warnings.append(
                    f"Run {summary.run_id} is ignored because its samples cannot be summarised; measure it again."
                )
            continue
        if summary.step_time_s < _SHORTEST_STEP_S:
            warnings.append(
                f"Run {summary.run_id} is ignored because its step time of {duration(summary.step_time_s)} is too "
                "short for a training step; check the clock of its machine."
            )
            continue
        if summary.configuration_mismatch is not None:
            warnings.append(summary.configuration_mismatch)
            misconfigured.add(summary.run_id)
        if (actual := _as_run(summary)) is not None:
            rows.append((actual, summary))
    standing, contradicted, notes = _out_of_memory_runs(rows, data.summaries)
    memory = _memory_evidence(data.spec, rows, standing)
    failed, retried = _failed(data, misconfigured | contradicted)
    candidates, ruled_out = _feasible(data, memory)
    ran = {c.variant for c in (*(c for c, _ in rows), *(run.configuration for run in standing))}
    crashes = _crashes(data, ran)
    failed |= {c for c in candidates if any(crash.bars(c.variant) for crash in crashes)}
    timed = [(c, s) for c, s in rows if s.run_id not in data.ignored_step_times]
    fitted, least = frozenset(configuration for configuration, _ in rows), required_fit_probability(data.spec)
    chances = {c: memory.fit_probability(c) for c in candidates if c not in fitted}
    return Evidence(
        candidates=candidates,
        observed=_observations(timed),
        rows=tuple((c, s.run_id) for c, s in timed),
        measured={c: s.step_time_s for c, s in timed if s.step_time_s is not None},
        fitted=fitted,
        memory=memory,
        ruled_out=ruled_out,
        doubtful=frozenset(c for c, chance in chances.items() if chance is not None and chance < least),
        failed=frozenset(failed - fitted),
        left_out={crash.values[0]: crash.sentence for crash in crashes if crash.is_of_one_value},
        crashed=tuple(crash.sentence for crash in crashes if not crash.is_of_one_value),
        retried=tuple(run for run in retried if run.configuration not in fitted),
        num_samples=sum(summary.num_samples for _, summary in timed),
        warnings=tuple(dict.fromkeys((*warnings, *notes, *memory.warnings))),
    )


def leave_one_out(evidence: Evidence, model: StepTimeModel) -> float | None:
    """Return the median relative error when each run is predicted from all others with the model's form and priors.

    The model is fitted once per run. The result is None if there are too few runs for an estimate, or so many that the
    fits would take too long.
    """
    observed = evidence.observed
    if observed is None or not _FEWEST_RUNS_TO_VALIDATE <= len(observed) <= _MOST_RUNS_TO_VALIDATE:
        return None
    everything = np.arange(len(observed))
    errors = []
    for left_out in everything:
        rest = observed.take(everything != left_out)
        refit = fit_step_time(rest, form=model.form, prior=model.priors, candidates=evidence.candidates)
        predicted = refit.predict(observed.points.take([int(left_out)])).mean_s[0]
        errors.append(abs(predicted / observed.step_time_s[left_out] - 1.0))
    return float(np.median(errors))


def _feasible(data: JobData, memory: MemoryEvidence) -> tuple[tuple[Configuration, ...], dict[Configuration, str]]:
    """Return the candidates that fit into memory, and a sentence for each configuration that does not fit."""
    bound = memory.max_local_batch_size
    everything = job_data.list_candidates(data.spec, {})  # raises if there is no candidate even without memory bounds
    if not bound:
        return everything, {}
    try:
        candidates = job_data.list_candidates(data.spec, bound)
    except ObservationError:
        raise ObservationError(memory.why_nothing_fits(data.spec)) from None
    feasible = set(candidates)
    return candidates, {c: memory.why_not(c) for c in everything if c not in feasible and c.variant in bound}


@dataclass(frozen=True)
class _Crash:
    """Option values with which every launch on `types` failed.

    `everywhere` is True if no variant with these values has run on any instance type.
    """

    values: Options
    types: frozenset[str]
    everywhere: bool
    message: str | None

    @property
    def is_of_one_value(self) -> bool:
        """Return True if a single value is excluded on all instance types."""
        return self.everywhere and len(self.values) == 1

    @property
    def sentence(self) -> str:
        """Return a sentence that names the excluded values, the reason, and how to retry them."""
        where = "" if self.everywhere else f" on {' and '.join(sorted(self.types))}"
        why = f" ({self.message.rstrip('.')})" if self.message else ""
        return (
            f"{' with '.join(' '.join(pair) for pair in self.values)} is excluded{where} because every launch with it "
            f"failed{why}; to retry it, register the job again."
        )

    def bars(self, variant: Variant) -> bool:
        """Return True if a variant has these values and they fail on its instance type."""
        return variant.options_include(self.values) and (self.everywhere or variant.instance_type in self.types)


def _crashes(data: JobData, ran: set[Variant]) -> list[_Crash]:
    """Return the option values, single or combined, that make launches fail; `ran` has the variants that have run.

    Values are assumed to be the cause on an instance type if a launch failed with these values and the base values of
    all other options, and if no variant with these values has run on this type. If a launch failed with several changed
    values, they are treated as one cause. If a launch measures only one configuration, a second configuration with
    these values must also have failed. Failures before the job was registered again are ignored.
    """
    base = data.spec.base_options
    failed = {
        run.configuration: run
        for run in data.profile_runs
        if run.state == "failed" and run.key > data.retried_up_to_key and run.configuration.options != base
    }
    enough = 1 if data.spec.profiling.share_launches else 2
    at_fault: dict[Options, dict[str, RunRecord]] = {}
    changed = {c: tuple(pair for pair in c.options if pair not in base) for c in failed}
    for c, run in sorted(failed.items(), key=lambda failure: len(changed[failure[0]])):
        values, name = changed[c], c.instance_type
        explained = any(name in types and set(fewer) <= set(values) for fewer, types in at_fault.items())
        proved = any(variant.instance_type == name and variant.options_include(values) for variant in ran)
        alike = [other for other in failed if other.instance_type == name and set(values) <= set(other.options)]
        if not explained and not proved and len(alike) >= enough:
            at_fault.setdefault(values, {})[name] = run
    return [
        _Crash(
            values,
            frozenset(types),
            everywhere=not any(variant.options_include(values) for variant in ran),
            message=next(iter(types.values())).message,
        )
        for values, types in at_fault.items()
    ]


def _as_run(summary: RunSummary) -> Configuration | None:
    """Return the configuration that a run's process reported, or None if its nodes have unequal numbers of ranks."""
    planned = summary.configuration
    world, batch, steps = summary.world_size, summary.local_batch_size, summary.grad_accum_steps
    batch, steps = batch or planned.local_batch_size, steps or planned.grad_accum_steps
    ranks, rest = divmod(world or planned.world_size, planned.num_nodes)
    return None if rest else replace(planned, ranks_per_node=ranks, local_batch_size=batch, grad_accum_steps=steps)


def _failed(data: JobData, unusable: set[str]) -> tuple[set[Configuration], list[RunRecord]]:
    """Return the configurations whose newest profiling run failed, and the failed runs to be repeated, in plan order.

    Runs in `unusable` are also treated as failed, because they used a different configuration from the planned one, or
    ran out of memory although larger batches fitted. A failed run is repeated once if the job was registered again
    after the failure.
    """
    by_configuration: dict[Configuration, list[RunRecord]] = {}
    for run in sorted(data.runs, key=lambda run: run.key, reverse=True):
        if run.id in unusable or run.kind == "profile":
            by_configuration.setdefault(run.configuration, []).append(run)
    bad = unusable | {run.id for run in data.runs if run.state == "failed"}
    ruled_out: set[Configuration] = set()
    repeated: list[RunRecord] = []
    for configuration, runs in by_configuration.items():
        newest = next((run for run in runs if run.state != "cancelled"), runs[0])
        ended = next((run for run in runs if run.state in FINAL_STATES), None)
        if newest.id in bad and newest.key > data.retried_up_to_key:
            ruled_out.add(configuration)
        elif ended is not None and ended.id in bad and ended.key <= data.retried_up_to_key:
            repeated.append(ended)
    return ruled_out, sorted(repeated, key=lambda run: (run.position, run.key))


def _as_usual(rows: Sequence[tuple[Configuration, RunSummary]], relative_sd: FloatArray) -> FloatArray:
    """Return the relative standard errors of the runs' step times, shape (n,), after applying a lower bound to each.

    The bound of a run is the error that its number of steps would give with the usual spread of step times, which is
    the median spread over the batches on the run's cluster. Without this bound, a few steps that happen to have similar
    times would receive more weight than longer measurements of similar configurations.
    """
    steps = np.array([float(summary.num_steps or 1) for _, summary in rows])
    spread = relative_sd * np.sqrt(steps)
    rows_by_cluster: defaultdict[tuple[int, Variant], list[int]] = defaultdict(list)
    for row, (where, _) in enumerate(rows):
        rows_by_cluster[where.num_nodes, where.variant].append(row)
    least = np.full(len(rows), np.nan)
    for of_cluster in rows_by_cluster.values():
        reported = spread[of_cluster][np.isfinite(spread[of_cluster])]
        if reported.size:
            least[of_cluster] = np.median(reported) / np.sqrt(steps[of_cluster])
    believed: FloatArray = np.fmax(relative_sd, least)
    return believed


def _observations(rows: Sequence[tuple[Configuration, RunSummary]]) -> StepTimeObservations | None:
    if not rows:
        return None
    names = ("step_time_s", *StepTimeObservations.OPTIONAL)
    columns = {name: np.array([getattr(summary, name) for _, summary in rows], np.float64) for name in names}
    columns["relative_sd"] = _as_usual(rows, columns["relative_sd"])
    return StepTimeObservations.at([configuration for configuration, _ in rows], **columns)


@dataclass(frozen=True)
class MemoryEvidence:
    """The evidence about a rank's memory from the runs and the specification; unknown variants have no entry.

    `models` predict the peak memory of a variant, and `max_local_batch_size` is the largest batch that fits.
    `capacity_bytes` is the memory of one rank by instance type. `out_of_memory` contains the failed runs that rule out
    their batch and all larger batches. `held` maps each configuration that ran for at least three steps to the number
    of times that its allocator found the device full. `sharded` is True if the ranks share state.
    """

    models: Mapping[Variant, MemoryModel]
    max_local_batch_size: Mapping[Variant, int]
    capacity_bytes: Mapping[str, float]
    out_of_memory: tuple[RunSummary, ...] = ()
    warnings: tuple[str, ...] = ()
    held: tuple[tuple[Configuration, int], ...] = ()
    sharded: bool = False

    def is_proved(self, c: Configuration) -> bool:
        """Return True if a run of this variant took at least three steps with this local batch or a larger one.

        If ranks share state (`sharded`), runs on more ranks are ignored.
        """
        return any(
            ran.variant == c.variant
            and ran.local_batch_size >= c.local_batch_size
            and (ran.world_size <= c.world_size or not self.sharded)
            for ran, _ in self.held
        )

    def retries(self, c: Configuration) -> int:
        """Return how often the device was full in the worst run of this variant with this local batch."""
        alike = (c.variant, c.local_batch_size)
        return max((n for ran, n in self.held if (ran.variant, ran.local_batch_size) == alike), default=0)

    def fit_probability(self, c: Configuration) -> float | None:
        """Return the probability that a rank's peak fits into memory, or None if the model or capacity is unknown."""
        model, capacity = self.models.get(c.variant), self.capacity_bytes.get(c.instance_type)
        if model is None or capacity is None:
            return None
        return model.fits(float(c.local_batch_size), _room(model, capacity, c.world_size))

    def why_not(self, c: Configuration) -> str:
        """Return a sentence that explains why this configuration does not fit into memory."""
        for failed in self.out_of_memory:
            if failed.configuration.variant == c.variant and c.local_batch_size >= failed_batch(failed):
                batch = failed_batch(failed)
                return f"its local batch {c.local_batch_size} is not below {batch}, which ran out of memory."
        bound = self.max_local_batch_size[c.variant]
        return f"its local batch {c.local_batch_size} is above {bound}, the largest batch that fits safely."

    def why_nothing_fits(self, spec: wire.JobSpec) -> str:
        """Return a sentence that states, by instance type, why no candidate fits into memory, and how to fix this."""
        smallest, base = spec.batch.min_local_batch_size, spec.base_options
        remedy = f"use a larger instance type, or {'increase cluster.min_nodes' if _shares(spec) else _SHARD_ALL}"
        reasons = []
        needed = {cluster.instance_type: _counted_bytes(spec.model, _fewest_ranks(cluster)) for cluster in spec.cluster}
        if any(needed[name] <= self.capacity_bytes.get(name, math.inf) for name in needed):
            remedy = f"lower min_local_batch_size, {remedy}"
        for cluster in spec.cluster:
            name = cluster.instance_type
            failed = [run for run in self.out_of_memory if run.configuration.instance_type == name]
            if failed:
                reasons.append(f"{_run_name(min(failed, key=failed_batch))} ran out of memory")
            elif name in self.capacity_bytes and needed[name] > self.capacity_bytes[name]:
                reasons.append(_state_too_large(needed[name], self.capacity_bytes[name]))
            elif (model := self.models.get(Variant(name, base))) is not None and name in self.capacity_bytes:
                peak = model.predict(smallest).mean + model.shards.extra_bytes(_fewest_ranks(cluster))
                reasons.append(
                    f"a rank of {name} is expected to need {size(peak)} at a local batch of {smallest}, but the device "
                    f"has only {size(self.capacity_bytes[name])}"
                )
        return f"memory: no candidate is left because {'; '.join(reasons)}; {remedy}."


def _out_of_memory_runs(
    measured: Measured, summaries: Sequence[RunSummary]
) -> tuple[list[RunSummary], set[str], list[str]]:
    """Return the runs that ran out of memory, grouped by what they rule out, given the batches that were measured.

    The first result contains the runs that rule out their batch and all larger batches of their variant. If a larger
    batch fitted, a failed run rules out only its own configuration; the second result contains the ids of these runs,
    and the third a warning for each of them. If a batch fitted although the first result rules it out, it may have
    fitted by chance, so it does not contradict failures at smaller batches.
    """
    standing: list[RunSummary] = []
    contradicted: set[str] = set()
    warnings: list[str] = []
    bound: dict[Variant, float] = {}
    failed = [summary for summary in summaries if summary.state == "out_of_memory"]
    for summary in sorted(failed, key=failed_batch, reverse=True):
        variant, batch = summary.configuration.variant, failed_batch(summary)
        larger = [
            (c, s.run_id)
            for c, s in measured
            if c.variant == variant and batch < c.local_batch_size < bound.get(variant, math.inf)
        ]
        if larger:
            c, run_id = max(larger, key=lambda row: row[0].local_batch_size)
            contradicted.add(summary.run_id)
            warnings.append(
                f"Memory: {_run_name(summary)} ran out of memory, but {_name(run_id, c, c.local_batch_size)} fitted on "
                "the same instance type, so only the failed configuration is excluded; to retry it, check that no "
                "other process uses the device, and register the job again."
            )
        else:
            standing.append(summary)
            bound[variant] = batch
    return standing, contradicted, warnings


def _memory_evidence(spec: wire.JobSpec, measured: Measured, failures: Sequence[RunSummary]) -> MemoryEvidence:
    """Return the memory evidence of all variants; `failures` has the out-of-memory runs that rule out a batch."""
    models: dict[Variant, MemoryModel] = {}
    bounds: dict[Variant, int] = {}
    capacities: dict[str, float] = {}
    warnings: list[str] = []
    base = spec.base_options
    for cluster in spec.cluster:
        name = cluster.instance_type
        rows = [(c, s.memory) for c, s in measured if c.instance_type == name]
        failed = [run for run in failures if run.configuration.instance_type == name]
        capacity = _capacity(cluster, [memory for _, memory in rows if memory is not None])
        fitted, notes = _memory_models(spec, cluster, rows, failed, capacity)
        models |= fitted
        warnings += notes
        if capacity is not None:
            capacities[name] = capacity
            needed = _counted_bytes(spec.model, _fewest_ranks(cluster))
            if not rows and needed > capacity:  # a measured run fits, since its script shards the state
                remedy = _SHARD if spec.model.sharding == "none" else _MORE_SHARDS
                warnings.append(f"Memory of {name}: {_state_too_large(needed, capacity)}: {remedy}.")
        for options in spec.option_combinations:
            variant = Variant(name, options)
            ran = [(c, memory) for c, memory in rows if c.options == options]
            usable = [(c, memory) for c, memory in ran if memory is not None and memory.peak_bytes > 0]
            safety = _plan_safety(spec, len({c.local_batch_size for c, _ in usable}), of_base=options == base)
            model = fitted.get(variant)
            largest = [failed_batch(run) - 1 for run in failed if run.configuration.options == options]
            if model is not None and capacity is not None and safety is not None:
                room = _room(model, capacity, _fewest_ranks(cluster))
                fits = model.max_local_batch_size(room, safety_probability=safety)
                largest.append(max([fits, *(c.local_batch_size for c, _ in ran)]))  # a batch that ran fits
            if largest:
                bounds[variant] = min(largest)
            warnings += _unsure(name, usable, capacity, bounds.get(variant))
    held = [(c, (s.memory and s.memory.alloc_retries) or 0) for c, s in measured if s.num_samples >= _PROVING_STEPS]
    return MemoryEvidence(models, bounds, capacities, tuple(failures), tuple(warnings), tuple(held), _shares(spec))


def _memory_models(
    spec: wire.JobSpec, cluster: wire.ClusterSpec, rows: Rows, failed: Sequence[RunSummary], capacity: float | None
) -> tuple[dict[Variant, MemoryModel], list[str]]:
    """Return the memory model of each variant of one instance type, and warnings about readings that cannot be used.

    The base is modelled first, then the variants with readings, then all other variants. A variant without readings
    uses the model of the nearest variant modelled so far, adjusted by the assumed effects of the options. A variant
    with readings uses only the static bytes of the nearest variant, unless its own static bytes were counted.
    """
    models: dict[Variant, MemoryModel] = {}
    warnings: list[str] = []
    base, *further = spec.option_combinations
    read = {c.options for c, memory in rows if memory is not None and memory.peak_bytes > 0}
    for options in (base, *sorted(further, key=lambda choice: choice not in read)):
        variant = Variant(cluster.instance_type, options)
        start = nearest(variant, models)
        if options == base or options in read:
            own = [(c, memory) for c, memory in rows if c.options == options]
            batches = [failed_batch(run) for run in failed if run.configuration.options == options]
            static_bytes = None if start is None else models[start].static_bytes
            try:
                models[variant] = _memory_model(spec, cluster, own, batches, capacity, static_bytes)
            except ObservationError as error:
                if options in read:
                    warnings.append(f"Memory of {cluster.instance_type}: {error}")
        elif start is not None:
            models[variant] = switched(models[start], start.options, options)
    return models, warnings


def _memory_model(
    spec: wire.JobSpec,
    cluster: wire.ClusterSpec,
    rows: Rows,
    failed: Sequence[float],
    capacity: float | None,
    static_bytes: float | None,
) -> MemoryModel:
    """Return the memory model of one variant, fitted to its runs.

    For variants other than the base, `static_bytes` is from the nearest variant, because the specification describes
    only the base. Raises ObservationError if there is nothing to fit.
    """
    readings = [(c, memory) for c, memory in rows if memory is not None]
    usable = [(c, memory) for c, memory in readings if memory.peak_bytes > 0]
    context = assumed_context_bytes(math.inf if capacity is None else capacity)
    whole = bool(usable) and all(memory.method != "cuda_allocator" for _, memory in usable)
    beside = Beside() if whole else _beside(spec.model, [memory for _, memory in usable], context)
    shards = Shards(_shared_bytes(spec.model, readings), cluster.max_nodes * cluster.ranks_per_node)
    observed = _memory_observations(spec.model, readings, failed, capacity, context if whole else 0.0, shards)
    if static_bytes is not None:
        counted = any(_counts_static(memory) for _, memory in usable)
        static = observed.static_bytes if counted else max(static_bytes, 1.0)
        observed = replace(observed, static_bytes=static, static_sd=_COUNTING_SD, bytes_per_sample=None)
    return fit_memory(observed, shards=shards, beside=beside)


def _counts_static(memory: MemoryReading) -> bool:
    """Return True if the agent counted the parameters and optimizer state that are included in the reading's peak."""
    counted = memory.parameter_bytes is not None and memory.optimizer_bytes is not None
    return counted and memory.method == "cuda_allocator"


def _unsure(
    name: str, usable: Sequence[tuple[Configuration, MemoryReading]], capacity: float | None, bound: int | None
) -> list[str]:
    """Return [] or, if all measured batches are too small to show how memory grows, a list with a warning."""
    if capacity is None or bound is None or not usable:
        return []
    c, reading = max(usable, key=lambda row: row[0].local_batch_size)
    if reading.peak_bytes >= _TELLING_SHARE * capacity or bound < c.local_batch_size / _TELLING_SHARE:
        return []
    return [
        f"Memory of {name} is uncertain: the largest batch that ran, {c.local_batch_size} examples, used "
        f"{100.0 * reading.peak_bytes / capacity:.0f} % of the device, and larger batches may need more memory per "
        "example; measure a batch that uses about a quarter of the device."
    ]


def state_beyond_memory(model: wire.ModelSpec, cluster: wire.ClusterSpec) -> str | None:
    """Return a sentence if the model's state exceeds the specified memory even on the largest cluster, else None."""
    capacity = cluster.memory_bytes_per_rank
    needed = _counted_bytes(model, cluster.max_nodes * cluster.ranks_per_node)
    if capacity is None or needed <= capacity:
        return None
    return (
        f"The model's {_state_too_large(needed, capacity)}: specify a larger device, set model.sharding if the ranks "
        "share the state, or correct model.parameters."
    )


def required_fit_probability(spec: wire.JobSpec) -> float:
    """Return the probability of fitting into memory that a recommended batch must have."""
    return min(max(spec.profiling.memory_safety, 0.5), 0.999)


def failed_batch(failed: RunSummary) -> int:
    """Return the local batch that did not fit into memory."""
    return failed.failed_local_batch_size or failed.configuration.local_batch_size


def _shares(spec: wire.JobSpec) -> bool:
    return spec.model.sharding != "none"


def _fewest_ranks(cluster: wire.ClusterSpec) -> int:
    return cluster.min_nodes * cluster.ranks_per_node


def _room(model: MemoryModel, capacity: float, world_size: int) -> float:
    """Return the capacity in bytes to compare with a prediction of the model.

    The model describes the largest cluster. With `world_size` ranks, each rank has larger shards, and the difference is
    subtracted from the capacity.
    """
    return max(capacity - model.shards.extra_bytes(world_size), 1.0)


def _shared_bytes(model: wire.ModelSpec, readings: Sequence[tuple[Configuration, MemoryReading]]) -> float:
    """Return the total size of all shards in bytes, from readings or, if there are none, from the specification."""
    parts = _PARTS[: _NUM_SHARED[model.sharding]]
    read = [c.world_size * sum(getattr(m, part) or 0 for part in parts) for c, m in readings]
    return float(max(read, default=0)) or _counted_bytes(model, 1) - _counted_bytes(model, math.inf)


def _capacity(cluster: wire.ClusterSpec, readings: Sequence[MemoryReading]) -> float | None:
    reported = [m.capacity_bytes for m in readings if m.capacity_bytes and m.method == "cuda_allocator"]
    capacity = cluster.memory_bytes_per_rank or (min(reported) if reported else None)
    return None if capacity is None else float(capacity)


def _memory_observations(
    model: wire.ModelSpec,
    readings: Sequence[tuple[Configuration, MemoryReading]],
    failed: Sequence[float],
    capacity: float | None,
    context: float,
    shards: Shards,
) -> MemoryObservations:
    """Return the readings and the counted bytes to which the memory model of a variant is fitted.

    The agent counts the bytes of parameters, gradients and optimizer state. Until the agent has counted them, these
    bytes are computed from the specification in single precision, and `context` bytes are added.
    """

    def of_most_ranks(c: Configuration, amount: float) -> float:
        return max(amount - shards.extra_bytes(c.world_size), _LEAST_LEFT * amount)

    usable = [(c, memory) for c, memory in readings if memory.peak_bytes > 0]
    counted = _counted_bytes(model, shards.most_ranks)
    static = counted + context if model.parameters is not None else None
    sd = math.hypot(_COUNTING_SD * counted, _CONTEXT_SD * context) / static if static else _COUNTING_SD
    read = [row for row in readings if row[1].parameter_bytes is not None and row[1].optimizer_bytes is not None]
    if read and read[0][1].method == "cuda_allocator":
        amount = sum(getattr(read[0][1], part) or 0 for part in _PARTS)
        static = of_most_ranks(read[0][0], amount) if amount else static
    return MemoryObservations(
        [float(c.local_batch_size) for c, _ in usable],
        [of_most_ranks(c, memory.peak_bytes) for c, memory in usable],
        failed,
        capacity_bytes=capacity,
        static_bytes=static,
        static_sd=sd,
        bytes_per_sample=model.activation_bytes_per_sample or None,
    )


def _plan_safety(spec: wire.JobSpec, num_batches: int, *, of_base: bool) -> float | None:
    """Return the probability of fitting into memory that a batch to be profiled must have; None allows all batches.

    Unless the specification has the activation bytes, readings at a single batch size do not show how memory grows
    with the batch. In this case, a batch is ruled out only if it is more likely to fail than not; if the number of
    parameters is also unknown, no batch of the base is ruled out. The specification describes only the base; other
    variants start from the base's static bytes, and running out of memory is a useful result for these variants.
    """
    if num_batches > 1 or (of_base and spec.model.activation_bytes_per_sample):
        return required_fit_probability(spec)
    if not of_base:
        return _AS_LIKELY_AS_NOT
    return _AS_LIKELY_AS_NOT if spec.model.parameters is not None else None


def _counted_bytes(model: wire.ModelSpec, ranks: float) -> float:
    """Return the bytes of parameters, gradients and optimizer state on a device of one of `ranks` ranks.

    All values are assumed to be in single precision. If the number of parameters is unknown, the result is 0.
    """
    sizes = (_OPTIMIZER_BYTES[model.optimizer], 4, 4)
    shared = _NUM_SHARED[model.sharding]
    return (
        (model.parameters or 0)
        / job_data.devices_per_replica(model)
        * (sum(sizes[:shared]) / ranks + sum(sizes[shared:]))
    )


def _state_too_large(needed: float, capacity: float) -> str:
    return (
        f"parameters, gradients and optimizer state need at least {size(needed)} per rank in single precision, but the "
        f"device has only {size(capacity)}"
    )


def _beside(model: wire.ModelSpec, readings: Sequence[MemoryReading], assumed: float) -> Beside:
    """Return the device memory that is used in addition to the allocator's peaks.

    This memory consists of the context (the largest one measured, or else an assumed one) and of the memory that the
    allocator reserves beyond its peaks when the device is full. The reserved memory is not taken from readings, because
    the allocator releases cached memory when memory is short. It is assumed to be small only if the allocator used
    expandable segments in all runs.
    """
    contexts = [m.context_bytes for m in readings if m.context_bytes is not None]
    context, sd = (float(max(contexts)), 0.0) if contexts else (assumed, _CONTEXT_SD * assumed)
    growing = [m.growing_segments for m in readings if m.method == "cuda_allocator"]
    if growing and all(growing):
        return Beside(context, sd, 1.0, GROWING_SD)
    return Beside(context, sd, model.reserved_ratio or RESERVED_RATIO, _RESERVED_SD)


def _run_name(failed: RunSummary) -> str:
    return _name(failed.run_id, failed.configuration, failed_batch(failed))


def _name(run_id: str, c: Configuration, batch: int) -> str:
    return f"run {run_id} ({cluster_name(c)}, local batch {batch})"
