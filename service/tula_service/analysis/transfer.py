"""What earlier jobs teach: the prior of a job's step time before its own runs, and what its runs teach later jobs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import tula_wire as wire
from tula_service.analysis.hardware import device_of, fabric_of, facts_of, hardware_of, same_hardware
from tula_service.analysis.job_data import JobData
from tula_service.domain import RunSummary
from tula_service.perfmodel.fabric import Buckets, Fabric, with_fabric
from tula_service.perfmodel.intervals import LEVEL
from tula_service.perfmodel.priors import (
    Hardware,
    ModelFacts,
    Priors,
    ScaleError,
    StepTimePrior,
    generic_prior,
    prior_from_hardware,
    prior_from_jobs,
    prior_from_other_type,
    scale_from_jobs,
)
from tula_service.perfmodel.step_time_form import AT, COLLECTIVES
from tula_service.perfmodel.step_time_model import StepTimeModel
from tula_wire import Configuration

_STEP_DEFINING_FIELDS = (
    "name", "activation_checkpointing", "sharding", "pipeline_stages", "tensor_parallel_size", "micro_batch_size",
)  # fmt: skip
_MAX_PRIORS = 10
_MAX_SCALES = 20
_MAX_PAIRS = 100
_MIN_PAIRS_TO_CALIBRATE = 3
_TRUST_IN_MODEL = 10.0
_WIDTH_BOUNDS = (0.5, 5.0)


@dataclass(frozen=True)
class EarlierEvidence:
    """What earlier jobs of the project learned, sorted by how much they have in common with this job.

    `same_network` and `other_networks` ran on the hardware of this job, by instance type; beside one of another network
    stands how many times as many parameters this job has, None where a count is unknown. `other_hardware` is the same
    network on hardware that this job does not have. `scales` are of all earlier jobs: of each network the newest on
    each device, since repeating one network says nothing about others. `pairs` are of trainings on this hardware,
    including those of the job itself. `fabrics` are the probed links of this job's nodes, `buckets` its gradients where
    a run timed them; both by instance type.
    """

    same_network: Mapping[str, tuple[StepTimePrior, ...]]
    other_networks: Mapping[str, tuple[tuple[StepTimePrior, float | None], ...]]
    other_hardware: tuple[tuple[StepTimePrior, Hardware], ...]
    scales: tuple[ScaleError, ...]
    pairs: tuple[Sequence[float], ...]
    fabrics: Mapping[str, Fabric] = field(default_factory=dict)
    buckets: Mapping[str, Buckets] = field(default_factory=dict)

    @property
    def interval_scale(self) -> float:
        """The factor on the log width of intervals that makes them hold what trainings measured; 1 with few pairs.

        Each pair's score is |log(measured / predicted)| over the half-width of its interval; the factor is the 90 %
        quantile of the scores (split-conformal, Vovk 2005), shrunk towards 1 by ten imagined pairs that the model got
        right, and bounded to 0.5..5.
        """
        if (number := len(self.pairs)) < _MIN_PAIRS_TO_CALIBRATE:
            return 1.0
        predicted, low, high, measured = np.array(self.pairs).T
        half = np.maximum(np.where(measured > predicted, np.log(high / predicted), np.log(predicted / low)), 1e-6)
        scores = np.abs(np.log(measured / predicted)) / half
        quantile = max(float(np.quantile(scores, min(1.0, LEVEL * (number + 1) / number))), 1e-3)
        weight = number / (number + _TRUST_IN_MODEL)
        return float(np.clip(np.exp(weight * np.log(quantile)), *_WIDTH_BOUNDS))


def earlier_evidence(data: JobData) -> EarlierEvidence:
    """Sort what earlier jobs learned by network and hardware; `data.earlier_jobs` are newest first."""
    same: dict[str, list[StepTimePrior]] = {}
    related: dict[str, list[tuple[StepTimePrior, float | None]]] = {}
    elsewhere: list[tuple[StepTimePrior, Hardware]] = []
    scales: dict[tuple[str, int | None, str], ScaleError] = {}
    pairs = [*data.prediction_pairs]
    for job in data.earlier_jobs:
        known = _same_network(job.model, data.spec.model)
        ran_on_this = False
        for cluster in job.clusters:
            on_this = any(same_hardware(cluster, mine) for mine in data.spec.cluster)
            ran_on_this |= on_this
            if cluster.instance_type not in job.posteriors:
                continue
            learned = _as_prior(job.posteriors[cluster.instance_type])
            if len(scales) < _MAX_SCALES:
                key = (job.model.name, job.model.parameters, device_of(cluster))
                scales.setdefault(key, earlier_scale(job.model, cluster, learned))
            if on_this and known:
                same.setdefault(cluster.instance_type, []).append(learned)
            elif on_this:
                counts = data.spec.model.parameters, job.model.parameters
                ratio = counts[0] / counts[1] if counts[0] and counts[1] else None
                related.setdefault(cluster.instance_type, []).append((learned, ratio))
            elif known:
                elsewhere.append((learned, hardware_of(cluster, job.model.precision)))
        if ran_on_this:
            pairs += job.prediction_pairs
    return EarlierEvidence(
        same_network={name: tuple(found[:_MAX_PRIORS]) for name, found in same.items()},
        other_networks={name: tuple(found[:_MAX_PRIORS]) for name, found in related.items()},
        other_hardware=tuple(elsewhere[:_MAX_PRIORS]),
        scales=tuple(scales.values()),
        pairs=tuple(pairs[:_MAX_PAIRS]),
        fabrics={each.instance_type: found for each in data.spec.cluster if (found := fabric_of(data.probes, each))},
        buckets=_buckets_of(data.summaries),
    )


def prior_of(
    earlier: EarlierEvidence, spec: wire.JobSpec, candidates: Sequence[Configuration], *, measured: bool
) -> Priors:
    """The priors of a job's fit, one for each instance type.

    `measured`: the job has runs. Then a type starts from the generic prior unless earlier jobs ran on its hardware.
    A probe of the links of a type replaces what is known less well of its collectives; it needs buckets that a run
    timed, or `model.parameters`.
    """
    hardware = {cluster.instance_type: hardware_of(cluster, spec.model.precision) for cluster in spec.cluster}
    believed: dict[str, StepTimePrior] = {}
    probed = set()
    for cluster in spec.cluster:
        name, related = cluster.instance_type, earlier.other_networks.get(cluster.instance_type)
        if name in earlier.same_network:
            believed[name] = prior_from_jobs(earlier.same_network[name])
        elif related is not None or not measured:
            batches = [c.local_batch_size for c in candidates if c.instance_type == name]
            reference = float(max(batches or [c.local_batch_size for c in candidates]))
            # The job's own runs tell its scale better than the scales of other jobs do.
            believed[name] = _scale(
                earlier, spec.model, cluster, hardware, reference, () if measured else earlier.scales
            )
            if related is not None:
                learned, ratios = zip(*related, strict=True)
                believed[name] = prior_from_jobs(learned, scale=believed[name], gradient_ratios=ratios)
        fabric, buckets = earlier.fabrics.get(name), earlier.buckets.get(name) or _counted_buckets(spec.model)
        if fabric is None or buckets is None:
            continue
        believed[name] = with_fabric(
            believed.get(name) or generic_prior(),
            fabric,
            buckets=buckets,
            max_nodes=cluster.max_nodes,
            ranks_per_node=cluster.ranks_per_node,
        )
        if fabric.num_nodes > 1 and cluster.max_nodes > 1:
            probed.add(name)
    return Priors(believed, hardware, probed=frozenset(probed))


def _counted_buckets(model: wire.ModelSpec) -> Buckets | None:
    """Of all-reduces that pass as many bytes over a link as a step does; None without a count of parameters."""
    if model.parameters is None:
        return None
    facts = facts_of(model)
    return Buckets.of(facts.parameter_bytes * facts.volumes / 2.0)


def posteriors_of(model: StepTimeModel) -> dict[str, dict[str, Any]]:
    """What a job's runs taught about each instance type, for later jobs: parameters in the order of
    `perfmodel.PARAMETERS`, as JSON. `_as_prior` is the inverse."""
    learned = {name: posterior.without_prior() for name, posterior in sorted(model.posteriors.items())}
    return {
        name: {
            "mean": prior.mean.tolist(),
            "sd": prior.sd.tolist(),
            "reference_batch_size": prior.reference_batch_size or 1.0,
            "optimizer_s": model.optimizer_s.get(name, 0.0),
        }
        for name, prior in learned.items()
    }


def _scale(
    earlier: EarlierEvidence,
    model: wire.ModelSpec,
    cluster: wire.ClusterSpec,
    hardware: Mapping[str, Hardware],
    reference: float,
    scales: Sequence[ScaleError],
) -> StepTimePrior:
    """The narrower of two guesses: the same network on other hardware, moved by the ratio of the data sheets, or the
    hardware figures corrected by how fast earlier jobs ran.

    Its basis is `prior` either way: only earlier jobs on the same hardware make a `transfer`.
    """
    facts, mine = facts_of(model), hardware[cluster.instance_type]
    guess = prior_from_hardware(facts, mine, reference_batch_size=reference)
    near = [(prior, hardware[other]) for other, found in sorted(earlier.same_network.items()) for prior in found]
    moved = [
        prior_from_other_type(learned, other, mine)
        for learned, other in (*near, *earlier.other_hardware)
        if other.memory_gb_per_s is not None and mine.memory_gb_per_s is not None
    ]
    # A run on hardware of uncertain speed says less of a device than its data sheet does.
    nearest = min((guess, *moved), key=lambda prior: float(prior.sd[AT.compute]))
    if nearest is not guess:
        return replace(nearest, basis="prior")
    return scale_from_jobs(guess, _scale_error(facts, cluster, mine), scales)


def _buckets_of(summaries: Sequence[RunSummary]) -> dict[str, Buckets]:
    """Those of the run with the fewest ranks, which waits least for others, and of these of the largest batch."""
    timed = [(each.configuration, each.timeline) for each in summaries if each.timeline is not None]
    usable = [(c, timeline) for c, timeline in timed if min(*timeline.bucket_bytes, *timeline.ready_s) > 0.0]
    best_first = sorted(usable, key=lambda each: (each[0].world_size, -each[0].local_batch_size))
    return {c.instance_type: Buckets(np.array(t.bucket_bytes), np.array(t.ready_s)) for c, t in reversed(best_first)}


def earlier_scale(model: wire.ModelSpec, cluster: wire.ClusterSpec, learned: StepTimePrior) -> ScaleError:
    """Error of the hardware-based prior for an earlier job, which learned this on such a cluster."""
    facts, hardware = facts_of(model), hardware_of(cluster, model.precision)
    guess = prior_from_hardware(facts, hardware, reference_batch_size=learned.reference_batch_size or 1.0)
    log_ratio, sd = (
        float(learned.mean[AT.compute] - guess.mean[AT.compute]),
        math.hypot(facts.flops_sd, float(learned.sd[AT.compute])),
    )
    return replace(_scale_error(facts, cluster, hardware), log_ratio=log_ratio, sd=sd)


def _scale_error(facts: ModelFacts, cluster: wire.ClusterSpec, hardware: Hardware) -> ScaleError:
    """Before a fit."""
    return ScaleError(0.0, device_of(cluster), facts.flops_sd, hardware.device_sd, facts.rule_sd)


def _as_prior(learned: Mapping[str, Any]) -> StepTimePrior:
    return StepTimePrior(
        np.array(learned["mean"]),
        np.array(learned["sd"]),
        absolute=True,
        reference_batch_size=float(learned["reference_batch_size"]),
        in_seconds=COLLECTIVES,
        optimizer_s=float(learned["optimizer_s"]),
    )


def _same_network(one: wire.ModelSpec, other: wire.ModelSpec) -> bool:
    """True when the names agree, what a step does, and parameter counts and precisions where both give them."""
    if any(getattr(one, name) != getattr(other, name) for name in _STEP_DEFINING_FIELDS):
        return False
    pairs = ((one.parameters, other.parameters), (one.precision, other.precision))
    return all(first == second or None in (first, second) for first, second in pairs)
