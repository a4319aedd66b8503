"""How large a local batch fits: memory models by instance type, and what they rule out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

import tula_wire as wire
from tula_service.perfmodel.memory_model import MemoryModel, MemoryPrior, fit_memory
from tula_service.perfmodel.points import MemoryObservations, ObservationError
from tula_service.store import MemoryReading, RunSummary
from tula_service.usecases.out_of_memory import batch_of, named
from tula_wire import Configuration

__all__ = ["fitted", "nothing_fits", "safety_of", "why_not"]

_OPTIMIZER_BYTES = {"sgd": 0, "momentum": 4, "adam": 8, "other": 8}
_AS_LIKELY_AS_NOT = 0.5
_COUNTING_SD = 0.1
_SHARD = "data parallelism keeps a whole copy on every rank, so shard the optimizer or take a larger device"
# Context, kernels and libraries of a process on a device, where nobody read them: half to one and a quarter GB on
# accelerators, and never much of what is there.
_CONTEXT_BYTES, _MOST_OF_CAPACITY, _CONTEXT_SD = 0.75e9, 0.1, 0.7


def safety_of(spec: wire.JobSpec) -> float:
    """The probability with which a recommended batch must fit, within what a probability can be."""
    return min(max(spec.profiling.memory_safety, 0.5), 0.999)


def fitted(
    spec: wire.JobSpec, rows: Sequence[tuple[Configuration, RunSummary]], failures: Sequence[RunSummary]
) -> tuple[dict[str, MemoryModel], dict[str, int], dict[str, float], list[str]]:
    """Memory models, batch bounds and capacities by instance type, with what was odd.

    `failures` ran out of memory, and no larger batch on their instance type fitted.
    """
    models: dict[str, MemoryModel] = {}
    bounds: dict[str, int] = {}
    capacities: dict[str, float] = {}
    sentences: list[str] = []
    for cluster in spec.cluster:
        name = cluster.instance_type
        read = [(c, s.memory) for c, s in rows if c.instance_type == name and s.memory is not None]
        failed = [batch_of(each) for each in failures if each.configuration.instance_type == name]
        reported = [m.capacity_bytes for _, m in read if m.capacity_bytes and m.method == "cuda_allocator"]
        capacity = cluster.memory_bytes_per_rank or (min(reported) if reported else None)
        context = _CONTEXT_BYTES if capacity is None else min(_CONTEXT_BYTES, _MOST_OF_CAPACITY * capacity)
        prior = _memory_prior(spec.model, context)
        static = [m for _, m in read if m.parameter_bytes is not None and m.optimizer_bytes is not None]
        usable = [(c, m) for c, m in read if m.peak_bytes > 0]
        try:
            model = fit_memory(
                MemoryObservations(
                    np.array([float(c.local_batch_size) for c, _ in usable]),
                    np.array([_on_device(m, context, capacity) for _, m in usable]),
                    np.array([float(batch) for batch in failed]),
                    capacity_bytes=None if capacity is None else float(capacity),
                    static_bytes=_static_bytes(static[0], context)
                    if static and static[0].method == "cuda_allocator"
                    else None,
                ),
                prior=prior,
            )
        except ObservationError as error:
            if usable:
                sentences.append(f"Memory of {name}: {error}")
            model = None
        if capacity is not None:
            capacities[name] = float(capacity)
            tried = any(c.instance_type == name for c, _ in rows)
            if not tried and _counted(spec.model) > capacity:  # a script that shards was measured, and fits
                sentences.append(f"Memory of {name}: {_too_large(spec.model, capacity)}: {_SHARD}.")
        fitting = max((c.local_batch_size for c, s in rows if c.instance_type == name), default=0)
        bound: int | None = None
        if model is not None:
            models[name] = model
            safety = _plan_safety(spec, prior, len({c.local_batch_size for c, _ in usable}))
            if capacity is not None and safety is not None:
                bound = max(model.max_local_batch_size(float(capacity), safety_probability=safety), fitting)
        if failed:
            bound = min(failed) - 1 if bound is None else min(bound, min(failed) - 1)
        if bound is not None:
            bounds[name] = bound
    return models, bounds, capacities, sentences


def _plan_safety(spec: wire.JobSpec, prior: MemoryPrior, batches: int) -> float | None:
    """With which probability a batch must fit to be worth planning; None where memory cannot yet be told.

    One batch alone cannot say what grows with it, and must not rule out what was never tried: then only what is more
    likely to fail than not is left out, and without any idea of the static share nothing is.
    """
    if batches > 1 or prior.bytes_per_sample is not None:
        return safety_of(spec)
    return _AS_LIKELY_AS_NOT if prior.static_bytes is not None else None


def _memory_prior(model: wire.ModelSpec, context: float) -> MemoryPrior:
    """What the specification says: parameters, gradients and optimizer state in single precision, and a context."""
    slope = model.activation_bytes_per_sample or None
    if model.parameters is None:
        return MemoryPrior(bytes_per_sample=slope)
    counted = _counted(model)
    static = counted + context
    sd = math.hypot(_COUNTING_SD * counted, _CONTEXT_SD * context) / static
    return MemoryPrior(bytes_per_sample=slope, static_bytes=static, static_sd=sd)


def _counted(model: wire.ModelSpec) -> float:
    """Bytes of parameters, gradients and optimizer state in single precision; 0 where nobody counted parameters."""
    return float((model.parameters or 0) * (8 + _OPTIMIZER_BYTES[model.optimizer]))


def _too_large(model: wire.ModelSpec, capacity: float) -> str:
    return (
        f"parameters, gradients and optimizer state alone need at least {_gib(_counted(model))} a rank in single "
        f"precision, of which the device has {_gib(capacity)}"
    )


def _context_of(reading: MemoryReading, assumed: float) -> float:
    """What the process holds on the device beside the allocator's own count, which other methods include."""
    if reading.method != "cuda_allocator":
        return 0.0
    return assumed if reading.context_bytes is None else float(reading.context_bytes)


def _on_device(reading: MemoryReading, assumed: float, capacity: float | None) -> float:
    """The peak as capacity sees it; a context beside it never makes what did fit too large."""
    peak = float(reading.peak_bytes)
    whole = peak + _context_of(reading, assumed)
    return whole if capacity is None or peak > capacity else min(whole, float(capacity))


def _static_bytes(reading: MemoryReading, assumed: float) -> float | None:
    parts = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
    counted = float(sum(getattr(reading, part) or 0 for part in parts))
    return counted + _context_of(reading, assumed) if counted else None


def why_not(c: Configuration, bound: Mapping[str, int], failures: Sequence[RunSummary]) -> str:
    """In a sentence, why this configuration is not feasible."""
    for failed in failures:
        if failed.configuration.instance_type == c.instance_type and c.local_batch_size >= batch_of(failed):
            return f"its local batch {c.local_batch_size} is not below {batch_of(failed)}, which ran out of memory."
    return f"its local batch {c.local_batch_size} is above {bound[c.instance_type]}, the largest that safely fits."


def nothing_fits(
    spec: wire.JobSpec,
    models: Mapping[str, MemoryModel],
    capacities: Mapping[str, float],
    failures: Sequence[RunSummary],
) -> str:
    """In a sentence, that memory leaves no candidate, for which reason on each instance type, and the remedy."""
    smallest = spec.batch.min_local_batch_size
    reasons, remedy = [], "use a larger instance type, or shard parameters and optimizer state"
    if any(_counted(spec.model) <= capacities.get(cluster.instance_type, math.inf) for cluster in spec.cluster):
        remedy = f"lower min_local_batch_size, {remedy}"
    for cluster in spec.cluster:
        name = cluster.instance_type
        own = [failed for failed in failures if failed.configuration.instance_type == name]
        if own:
            reasons.append(f"{named(min(own, key=batch_of))} ran out of memory")
        elif name in capacities and _counted(spec.model) > capacities[name]:
            reasons.append(_too_large(spec.model, capacities[name]))
        elif name in models and name in capacities:
            needed = float(models[name].predict([float(smallest)]).mean_bytes[0])
            reasons.append(
                f"a rank of {name} is expected to need {_gib(needed)} at a local batch of {smallest}, of which the "
                f"device has {_gib(capacities[name])}"
            )
    return f"memory: no candidate is left, since {'; '.join(reasons)}; {remedy}."


def _gib(amount: float) -> str:
    return f"{amount / 2**30:,.3g} GiB" if amount < 1000 * 2**30 else f"{amount / 2**30:,.0f} GiB"
