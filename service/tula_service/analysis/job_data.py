"""Defines `JobData`, the input of the analysis of a job, and converts specifications for the performance model."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tula_wire as wire
from tula_service.analysis.scaling import estimate_noise_scale
from tula_service.domain import FloatArray, RunRecord, RunSummary
from tula_service.perfmodel.guard import CAREFUL, SGD, TURNED, AccuracyGuard
from tula_service.perfmodel.intervals import Interval
from tula_service.perfmodel.objectives import Goal
from tula_service.perfmodel.points import ObservationError
from tula_service.perfmodel.pricing import Limits, Offer, Spot, Training
from tula_wire.configurations import Variant
from tula_wire.enums import Objective
from tula_wire.options import Options

_UNKNOWN_BOUND_DOUBLINGS = 5
_SETTLED_STEPS = 100  # the noise scale after 30 steps was 6 times too high or 10 times too low in our experiments
_MOST_DOUBLINGS = 12


@dataclass(frozen=True)
class EarlierJob:
    """An earlier job of the same project, with its results.

    `posteriors` (by instance type) were computed by `analysis.transfer.export_posteriors` for the options in `base`.
    `prediction_pairs` has, for each training run, the step time that the model predicted, both ends of its interval
    before calibration, and the measured step time, all in seconds.
    """

    model: wire.ModelSpec
    clusters: tuple[wire.ClusterSpec, ...]
    posteriors: Mapping[str, Mapping[str, Any]]
    prediction_pairs: Sequence[Sequence[float]] = ()
    base: Options = ()


@dataclass(frozen=True)
class JobData:
    """One version of a job: its specification, its runs with their measurements, and the results of earlier jobs.

    `runs` are in plan order. `summaries` describes the runs that have samples or ran out of memory, oldest first.
    `earlier_jobs` and `probes` (of this job's instance types) are sorted newest first. `trained_noise` (newest first),
    `profiled_noise` and `token_counts` are telemetry columns of the newest runs. `small_batch_size` (the batch for
    which the learning rate is tuned, or None if not reported) and `directions` (True if the optimizer turns the
    direction of its steps) are the last values that a `TulaOptimizer` reported in these runs. Failed runs with a key of
    at most `retried_up_to_key` do not rule out their configuration, since the job was registered again after them.
    `cross_validated_error` is valid only for the runs `cross_validated_runs` and this version of the model.
    """

    spec: wire.JobSpec
    objective: Objective
    data_version: int
    runs: Sequence[RunRecord] = ()
    summaries: Sequence[RunSummary] = ()
    earlier_jobs: Sequence[EarlierJob] = ()
    prediction_pairs: Sequence[Sequence[float]] = ()
    trained_noise: Sequence[FloatArray] = ()
    profiled_noise: Sequence[FloatArray] = ()
    token_counts: Sequence[FloatArray] = ()
    small_batch_size: float | None = None
    directions: bool = False
    retried_up_to_key: int = 0
    ignored_step_times: frozenset[str] = frozenset()
    probes: Sequence[wire.FabricProbe] = ()
    cross_validated_error: float | None = None
    cross_validated_runs: tuple[str, ...] = ()

    @property
    def trained_noise_scale(self) -> float | None:
        """Return the gradient noise scale, in examples, of the newest training run that reported one, or None."""
        return next(iter(_noise_scales(self.trained_noise)), None)

    @property
    def gradient_noise_scale(self) -> float | None:
        """Return the noise scale, in examples, of a training run or, if there is none, the median over profiling runs.

        Since short profiling runs measure only the start of training, those with fewer than 100 steps are used only if
        there are no longer ones.
        """
        return self.settled_noise_scale or self._noise_scale(least_steps=1)

    @property
    def settled_noise_scale(self) -> float | None:
        """Return the noise scale of a training run or, if there is none, of profiling runs of at least 100 steps.

        If there are no such runs, the result is None.
        """
        return self._noise_scale(least_steps=_SETTLED_STEPS)

    def _noise_scale(self, least_steps: int) -> float | None:
        if (trained := self.trained_noise_scale) is not None:
            return trained
        profiled = _noise_scales([values for values in self.profiled_noise if len(values) >= least_steps])
        return statistics.median(profiled) if profiled else None

    @property
    def seen_tokens(self) -> list[float]:
        """Return the number of tokens per example in each batch that the agents reported."""
        return [float(value) for values in self.token_counts for value in values if 1.0 <= value <= 1e12]

    @property
    def tokens_per_example(self) -> float | None:
        """Return the specified number of tokens per example or, if none is specified, the mean of the reported numbers.

        If no number was reported either, the result is None.
        """
        return self.spec.model.tokens_per_example or (statistics.fmean(seen) if (seen := self.seen_tokens) else None)

    @property
    def drift(self) -> str | None:
        """Return a sentence if the speed of the newest training run differs from the prediction, otherwise None."""
        newest = max((run for run in self.runs if run.kind == "train"), key=lambda run: run.key, default=None)
        return None if newest is None else newest.drift_sentence

    @property
    def profile_runs(self) -> list[RunRecord]:
        """Return the profiling runs, in plan order."""
        return [run for run in self.runs if run.kind == "profile"]


def devices_per_replica(model: wire.ModelSpec) -> int:
    """Return the number of devices among which a replica of the model is divided."""
    return model.pipeline_stages * model.tensor_parallel_size


def has_prices(spec: wire.JobSpec) -> bool:
    """Return True if every instance type has a price, in which case costs are in USD."""
    return all(is_priced(cluster.price) for cluster in spec.cluster)


def payable(spec: wire.JobSpec, memory: Collection[Variant]) -> wire.JobSpec:
    """Return the specification, omitting all prices if a price is per GB-hour and a variant's memory is unknown.

    `memory` contains the variants whose memory is known.
    """
    by_memory = [c.instance_type for c in spec.cluster if c.price.usd_per_gb_hour]
    if all(Variant(name, options) in memory for name in by_memory for options in spec.varied_combinations):
        return spec
    return spec.model_copy(update={"cluster": [c.model_copy(update={"price": wire.Price()}) for c in spec.cluster]})


def base_batch_size(data: JobData, candidates: Sequence[wire.Configuration]) -> int:
    """Return the global batch for which the learning rate is assumed to be tuned.

    This is the `small_batch_size` that the script reported or, if there is none, the smallest batch of the candidates.
    A reported value that is larger than all candidates is ignored, since its unit is not examples but, for example,
    tokens.
    """
    sizes = [c.global_batch_size for c in candidates]
    reported = data.small_batch_size
    return int(reported) if reported is not None and 1 <= reported <= max(sizes) else min(sizes)


def build_goal(
    data: JobData,
    spec: wire.JobSpec,
    objective: Objective,
    *,
    base_batch_size: int,
    power_w: Mapping[str, Interval] | None = None,
) -> Goal:
    """Return the goal of a choice, including the amount of training, the prices, the limits and an accuracy guard.

    If a run has reported that `TulaOptimizer` turns the direction of its steps, the guard uses the constants `TURNED`.
    Otherwise, the guard's constants depend on the specified optimizer: `SGD` for SGD, and `CAREFUL` for all other
    optimizers. If there are no prices, the budget is ignored.
    """
    priced = has_prices(spec)
    by_optimizer = SGD if spec.model.optimizer in ("sgd", "momentum") else CAREFUL
    return Goal(
        objective,
        Training(dataset_size=float(spec.dataset.size), epochs=spec.epochs),
        list_offers(spec),
        Limits(
            deadline_s=spec.limits.deadline_s,
            budget_usd=spec.limits.budget_usd if priced else None,  # without prices, costs are not in USD
            max_global_batch_size=spec.limits.max_global_batch_size,
        ),
        spot_offers=list_spot_offers(spec),
        priced=priced,
        usd_per_hour_of_waiting=spec.usd_per_hour_of_waiting,
        batch_normalization=bool(spec.model.batch_normalization),
        sharded=spec.model.sharding != "none",
        guard=AccuracyGuard(
            examples=float(spec.dataset.size) * spec.epochs,
            base_batch_size=base_batch_size,
            noise_scale=data.settled_noise_scale,
            constants=TURNED if data.directions else by_optimizer,
        ),
        power_w=power_w or {},
        options=spec.options,
    )


def list_offers(spec: wire.JobSpec) -> dict[str, Offer]:
    """Return the on-demand prices by instance type.

    If no prices are specified, a node-hour is priced at 1, so that costs are numbers of node-hours.
    """
    prices = {cluster.instance_type: cluster.price for cluster in spec.cluster}
    if not any(is_priced(price) for price in prices.values()):
        return dict.fromkeys(prices, Offer(usd_per_node_hour=1.0))
    return {
        name: Offer(usd_per_node_hour=price.usd_per_node_hour or 0.0, usd_per_gb_hour=price.usd_per_gb_hour or 0.0)
        for name, price in prices.items()
        if price.usd_per_node_hour is not None or price.usd_per_gb_hour is not None
    }


def list_spot_offers(spec: wire.JobSpec) -> dict[str, Offer]:
    """Return the spot prices by instance type, for the types that have a spot price."""
    prices = {cluster.instance_type: cluster.price.spot for cluster in spec.cluster}
    return {
        name: Offer(price.usd_per_node_hour, spot=Spot(**price.model_dump(exclude={"usd_per_node_hour"})))
        for name, price in prices.items()
        if price is not None
    }


def list_candidates(spec: wire.JobSpec, memory_bound: Mapping[Variant, int]) -> tuple[wire.Configuration, ...]:
    """Return all configurations that may be chosen, sorted.

    `memory_bound` has the largest local batch that fits into memory, for each variant with such a limit. A bound is
    rounded down to the smallest batch times a power of two, so that a new fit does not change every candidate. For a
    variant without a bound, the smallest batch is doubled up to five times. Configurations whose global batch exceeds
    the data set are omitted. Raises ObservationError if there are no candidates.
    """
    variants = [(cluster, options) for cluster in spec.cluster for options in spec.varied_combinations]
    possible = {
        replace(c, options=options)
        for cluster, options in variants
        for c in _on(cluster, spec.batch, memory_bound.get(Variant(cluster.instance_type, options)))
    }
    held = spec.batch.grad_accum_steps
    if not possible and held is not None and spec.batch.global_batch_size is not None:
        raise ObservationError(
            f"batch: no local batch gives a global batch of {spec.batch.global_batch_size} with grad_accum_steps "
            f"= {held}; change either of these two, batch.max_local_batch_size or the cluster."
        )
    if not possible:
        raise ObservationError(
            "batch: no candidates are left; lower min_local_batch_size, increase the batch limit or use a larger "
            "instance type."
        )
    most_steps = held or spec.batch.max_grad_accum_steps
    accumulated = {c for c in possible if c.grad_accum_steps <= most_steps}
    if not accumulated:
        fewest = min(c.grad_accum_steps for c in possible)
        raise ObservationError(
            f"batch: a global batch of {spec.batch.global_batch_size} needs at least {fewest} accumulation steps, but "
            f"max_grad_accum_steps is {most_steps}; increase this limit, batch.max_local_batch_size or "
            "cluster.max_nodes."
        )
    fitting = {c for c in accumulated if c.global_batch_size <= spec.dataset.size}
    if not fitting:
        smallest = min(c.global_batch_size for c in accumulated)
        raise ObservationError(
            f"batch: the smallest global batch, {smallest}, exceeds the data set of {spec.dataset.size} examples; "
            "lower batch.global_batch_size, batch.min_local_batch_size or cluster.min_nodes."
        )
    return tuple(sorted(fitting))


def _on(cluster: wire.ClusterSpec, batch: wire.BatchSpec, memory_bound: int | None) -> Iterator[wire.Configuration]:
    """Yield the configurations on one instance type; nodes and batches are doubled from the smallest to the largest."""
    largest = _largest_batch(batch, memory_bound)
    batches = powers_of_two(batch.min_local_batch_size, largest)
    # Accumulation is only combined with the largest batch, since the same global batch takes longer with a smaller one.
    steps = powers_of_two(2, batch.max_grad_accum_steps) if batches else ()
    shapes = [*((size, batch.grad_accum_steps or 1) for size in batches), *((batches[-1], number) for number in steps)]
    for nodes in powers_of_two(cluster.min_nodes, cluster.max_nodes):
        world = nodes * cluster.ranks_per_node
        if batch.global_batch_size is not None:
            shapes = _at_global_batch(batch, largest, *divmod(batch.global_batch_size, world))
        for local, number in shapes:
            yield wire.Configuration(
                num_nodes=nodes,
                ranks_per_node=cluster.ranks_per_node,
                local_batch_size=local,
                grad_accum_steps=number,
                instance_type=cluster.instance_type,
            )


def powers_of_two(smallest: int, largest: int) -> tuple[int, ...]:
    """Return smallest, 2 * smallest, 4 * smallest, ... and `largest`, or no numbers if largest < smallest."""
    values = []
    value = smallest
    while value < largest:
        values.append(value)
        value *= 2
    return (*values, largest) if largest >= smallest else ()


def _at_global_batch(batch: wire.BatchSpec, largest: int, per_rank: int, rest: int) -> list[tuple[int, int]]:
    """Return up to three pairs (local batch, micro-steps) whose product is `per_rank`, largest batch first."""
    if rest or not per_rank:
        return []
    if (held := batch.grad_accum_steps) is not None:
        return [(per_rank // held, held)] if per_rank % held == 0 and per_rank // held <= largest else []
    small = [number for number in range(1, math.isqrt(per_rank) + 1) if per_rank % number == 0]
    locals_ = sorted({*small, *(per_rank // number for number in small)}, reverse=True)
    fitting = [local for local in locals_ if local <= largest]
    kept = [local for local in fitting if local == fitting[0] or local >= batch.min_local_batch_size]
    return [(local, per_rank // local) for local in kept[:3]]


def _largest_batch(batch: wire.BatchSpec, memory_bound: int | None) -> int:
    smallest, given = batch.min_local_batch_size, batch.max_local_batch_size
    if memory_bound is not None and (given is None or memory_bound < given):
        doublings = max(0, min(_MOST_DOUBLINGS, (memory_bound // smallest).bit_length() - 1))
        return smallest << doublings if memory_bound >= smallest else memory_bound
    return given if given is not None else smallest << _UNKNOWN_BOUND_DOUBLINGS


def is_priced(price: wire.Price) -> bool:
    """Return True if at least one of the prices is specified."""
    return price.usd_per_node_hour is not None or price.usd_per_gb_hour is not None or price.spot is not None


def _noise_scales(columns: Sequence[FloatArray]) -> list[float]:
    return [noise.mean for values in columns if (noise := estimate_noise_scale(values)) is not None]
