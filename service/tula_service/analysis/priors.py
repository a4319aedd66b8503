"""What is believed of a job's step time before its own runs: from earlier jobs of the project and from data sheets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import tula_wire as wire
from tula_service.analysis import job_data
from tula_service.analysis.job_data import JobData
from tula_service.domain import RunSummary
from tula_service.perfmodel.fabric import AllReduceCost, Buckets, Fabric, fit_all_reduce, with_fabric
from tula_service.perfmodel.intervals import LEVEL
from tula_service.perfmodel.priors import (
    GUESSED_ACTIVATIONS_SD,
    ROOFLINE_SD,
    UNKNOWN_PRECISION_SD,
    Hardware,
    ModelFacts,
    Priors,
    ScaleError,
    StepTimePrior,
    generic_prior,
    guessed_activation_bytes,
    prior_from_hardware,
    prior_from_jobs,
    prior_from_other_type,
    scale_from_jobs,
)
from tula_service.perfmodel.step_time_form import COLLECTIVES
from tula_service.perfmodel.step_time_model import StepTimeModel
from tula_wire import Configuration
from tula_wire.devices import DEVICES, PROCESSOR, capacities_gib, known_device
from tula_wire.jobs import Precision

_PROCESSOR_SD = 1.0
_UNKNOWN_PARAMETERS = 25_000_000
_FLOPS_PER_PARAMETER = 300.0
_UNKNOWN_FLOPS_SD = 1.0
_COUNTED = ("precision", "parameters", "activation_bytes_per_sample")
BYTES_PER_NUMBER = {"fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0}
_RECOMPUTED = 4.0 / 3.0  # a second forward pass beside a forward and a backward one, which is twice as long
_OF_A_STEP = (
    "name", "activation_checkpointing", "sharding", "pipeline_stages", "tensor_parallel_size", "micro_batch_size",
)  # fmt: skip
_MAX_PRIORS = 10
_MAX_SCALES = 20
_MAX_PAIRS = 100
_MIN_PAIRS_TO_CALIBRATE = 3
_TRUST_IN_MODEL = 10.0
_WIDTH_BOUNDS = (0.5, 5.0)


@dataclass(frozen=True)
class Lessons:
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


def lessons_of(data: JobData) -> Lessons:
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
    return Lessons(
        same_network={name: tuple(found[:_MAX_PRIORS]) for name, found in same.items()},
        other_networks={name: tuple(found[:_MAX_PRIORS]) for name, found in related.items()},
        other_hardware=tuple(elsewhere[:_MAX_PRIORS]),
        scales=tuple(scales.values()),
        pairs=tuple(pairs[:_MAX_PAIRS]),
        fabrics={each.instance_type: found for each in data.spec.cluster if (found := fabric_of(data.probes, each))},
        buckets=_buckets_of(data.summaries),
    )


def prior_of(lessons: Lessons, spec: wire.JobSpec, candidates: Sequence[Configuration], *, measured: bool) -> Priors:
    """The priors of a job's fit, one for each instance type.

    `measured`: the job has runs. Then a type starts from the generic prior unless earlier jobs ran on its hardware.
    A probe of the links of a type replaces what is known less well of its collectives; it needs buckets that a run
    timed, or `model.parameters`.
    """
    hardware = {cluster.instance_type: hardware_of(cluster, spec.model.precision) for cluster in spec.cluster}
    believed: dict[str, StepTimePrior] = {}
    probed = set()
    for cluster in spec.cluster:
        name, related = cluster.instance_type, lessons.other_networks.get(cluster.instance_type)
        if name in lessons.same_network:
            believed[name] = prior_from_jobs(lessons.same_network[name])
        elif related is not None or not measured:
            batches = [c.local_batch_size for c in candidates if c.instance_type == name]
            reference = float(max(batches or [c.local_batch_size for c in candidates]))
            # The job's own runs tell its scale better than the scales of other jobs do.
            believed[name] = _scale(
                lessons, spec.model, cluster, hardware, reference, () if measured else lessons.scales
            )
            if related is not None:
                learned, ratios = zip(*related, strict=True)
                believed[name] = prior_from_jobs(learned, scale=believed[name], gradient_ratios=ratios)
        fabric, buckets = lessons.fabrics.get(name), lessons.buckets.get(name) or _counted_buckets(spec.model)
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
    lessons = {name: posterior.lesson() for name, posterior in sorted(model.posteriors.items())}
    return {
        name: {
            "mean": learned.mean.tolist(),
            "sd": learned.sd.tolist(),
            "reference_batch_size": learned.reference_batch_size or 1.0,
            "optimizer_s": model.optimizer_s.get(name, 0.0),
        }
        for name, learned in lessons.items()
    }


def guesses_of(spec: wire.JobSpec) -> list[str]:
    """What the prior guesses because the specification leaves it out, one sentence each with its remedy."""
    sentences = []
    if spec.model.flops_per_sample is None:
        sentences.append("The model's FLOPs per sample are unknown and were guessed: give model.flops_per_sample.")
    names = [f"model.{name}" for name in _COUNTED if getattr(spec.model, name) is None]
    if names:
        sentences.append(f"The first guess of the step time is wider without {', '.join(names)}: give what is missing.")
    for cluster in spec.cluster:
        if hardware_of(cluster).peak_tflops is None:
            sentences.append(
                f"The accelerator of {cluster.instance_type} is not known and its speed was guessed: "
                "give cluster.accelerator, for example V100-16GB."
                if cluster.accelerator is None
                else f"{cluster.accelerator} has no data sheet here and its speed was guessed: if it is like one of "
                f"{', '.join(sorted(DEVICES))}, give that as cluster.accelerator."
            )
        if cluster.network_gbps is None and cluster.max_nodes > 1:
            sentences.append(f"The network of {cluster.instance_type} was guessed: give cluster.network_gbps.")
    return sentences


def hardware_of(cluster: wire.ClusterSpec, precision: Precision | None = None) -> Hardware:
    """The figures of an instance type, with the peak at `precision`; None where specification and data sheets leave
    them open."""
    name = known_device(cluster.accelerator)
    if name is None:
        return Hardware(inter_node_gbps=cluster.network_gbps)
    device = DEVICES[name]
    # A rank's share of a processor may be one core or forty; the specification does not say.
    uncertain = _PROCESSOR_SD if name == PROCESSOR else 0.0
    # Jobs that were registered before it was checked may name a precision that the device lacks.
    peak = device.peak if precision is None else device.tflops(precision) or device.fp32
    return Hardware(peak, cluster.network_gbps, memory_gb_per_s=device.memory_gb_per_s, figures_sd=uncertain)


def same_hardware(one: wire.ClusterSpec | wire.FabricProbe, other: wire.ClusterSpec) -> bool:
    """True when both name the same hardware. If neither names it, ranks and memory, if known, must agree as well."""
    if any(getattr(one, name) != getattr(other, name) for name in ("instance_type", "accelerator", "network_gbps")):
        return False
    if one.accelerator is not None or one.instance_type != wire.DEFAULT_INSTANCE_TYPE:
        return True
    if isinstance(one, wire.ClusterSpec) and one.memory_bytes_per_rank != other.memory_bytes_per_rank:
        return False
    return one.ranks_per_node == other.ranks_per_node


def device_of(cluster: wire.ClusterSpec) -> str:
    """A key that is equal for equal devices: V100-16GB and Tesla V100 share one, processors of two instance types do
    not."""
    name = known_device(cluster.accelerator)
    if cluster.accelerator is None or name == PROCESSOR:
        return f"{name or 'device'} of {cluster.instance_type}"
    return name or cluster.accelerator.upper().replace(" ", "").replace("-", "")


def _scale(
    lessons: Lessons,
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
    near = [(prior, hardware[other]) for other, found in sorted(lessons.same_network.items()) for prior in found]
    moved = [
        prior_from_other_type(learned, other, mine)
        for learned, other in (*near, *lessons.other_hardware)
        if other.memory_gb_per_s is not None and mine.memory_gb_per_s is not None
    ]
    # A run on hardware of uncertain speed says less of a device than its data sheet does.
    nearest = min((guess, *moved), key=lambda prior: float(prior.sd[0]))
    if nearest is not guess:
        return replace(nearest, basis="prior")
    return scale_from_jobs(guess, _scale_error(facts, cluster, mine), scales)


def facts_of(model: wire.ModelSpec) -> ModelFacts:
    """What the specification says of a network, and guesses with their widths where it is silent."""
    parameters = float(model.parameters or _UNKNOWN_PARAMETERS)
    known = model.flops_per_sample
    # The wire counts forward and backward, the performance model one forward pass.
    flops = _FLOPS_PER_PARAMETER * parameters if known is None else known / 3.0
    devices = job_data.devices_of(model)
    again = _RECOMPUTED if model.activation_checkpointing else 1.0
    # What a checkpointed network keeps says little of what it computes, so there a count is not used.
    counted = None if model.activation_checkpointing else model.activation_bytes_per_sample
    guess = guessed_activation_bytes(flops, parameters, BYTES_PER_NUMBER[model.precision or "fp32"]) / devices
    return ModelFacts(
        parameters,
        again * flops / devices,
        again * float(counted or guess),
        BYTES_PER_NUMBER["fp32"] * parameters / devices,
        flops_sd=math.hypot(_UNKNOWN_FLOPS_SD if known is None else 0.0, 0.0 if counted else GUESSED_ACTIVATIONS_SD),
        rule_sd=UNKNOWN_PRECISION_SD if model.precision is None else ROOFLINE_SD,
        volumes=3.0 if model.sharding == "zero3" else 2.0,
        idle_samples=float((model.pipeline_stages - 1) * (model.micro_batch_size or 1)),
    )


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
    log_ratio, sd = float(learned.mean[0] - guess.mean[0]), math.hypot(facts.flops_sd, float(learned.sd[0]))
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
    if any(getattr(one, name) != getattr(other, name) for name in _OF_A_STEP):
        return False
    pairs = ((one.parameters, other.parameters), (one.precision, other.precision))
    return all(first == second or None in (first, second) for first, second in pairs)


def contradiction(model: wire.ModelSpec, cluster: wire.ClusterSpec) -> tuple[str, str] | None:
    """(field of the specification, sentence) of a precision or capacity that the accelerator does not have."""
    name = known_device(cluster.accelerator)
    if name is None:
        return None
    device = DEVICES[name]
    if model.precision is not None and device.tflops(model.precision) is None:
        has = ", ".join(each for each in ("fp32", "tf32", "bf16", "fp16") if device.tflops(each) is not None)
        return "model.precision", (
            f"{cluster.accelerator} does not compute in {model.precision}: give one of {has}, or correct "
            "cluster.accelerator."
        )
    given = cluster.memory_bytes_per_rank or 0
    most = max(capacities_gib(cluster.accelerator or "", device), default=None)
    if most is not None and given > most * 2**30:
        return "cluster.memory_bytes_per_rank", (
            f"memory_bytes_per_rank is {given / 2**30:.3g} GiB, and {cluster.accelerator} has at most {most} GiB: "
            "give what one device has, or correct cluster.accelerator."
        )
    return None


def cost_of(readings: Sequence[wire.AllReduceReading]) -> AllReduceCost:
    """The line through the readings of one group of ranks."""
    return fit_all_reduce(
        [each.size_bytes for each in readings],
        [each.time_s for each in readings],
        [each.relative_sd / each.repeats**0.5 for each in readings],
    )


def fabric_of(probes: Sequence[wire.FabricProbe], cluster: wire.ClusterSpec) -> Fabric | None:
    """The probe with most ranks of those on nodes like these, the first of `probes` among equals; None without one."""
    if not (mine := probes_of(probes, cluster)):
        return None
    probe = max(mine, key=lambda each: each.num_nodes * each.ranks_per_node)
    in_node = None if probe.in_node is None else cost_of(probe.in_node)
    return Fabric(probe.num_nodes, probe.ranks_per_node, cost_of(probe.all_ranks), in_node)


def probes_of(probes: Sequence[wire.FabricProbe], cluster: wire.ClusterSpec) -> list[wire.FabricProbe]:
    """Those on nodes like the cluster's."""
    return [probe for probe in probes if same_hardware(probe, cluster)]


def probe_of_run(
    measured: wire.AllReduces, configuration: wire.Configuration, cluster: wire.ClusterSpec
) -> wire.FabricProbe | None:
    """What the ranks of a run measured, as a probe of its cluster; None where another number of ranks took part.

    Nodes are those of the configuration, as in its samples; what was measured in one node counts where the ranks saw
    the same nodes.
    """
    c = configuration
    if measured.num_nodes * measured.ranks_per_node != c.world_size:
        return None
    same = (measured.num_nodes, measured.ranks_per_node) == (c.num_nodes, c.ranks_per_node)
    return wire.FabricProbe(
        instance_type=cluster.instance_type,
        accelerator=cluster.accelerator,
        network_gbps=cluster.network_gbps,
        backend=measured.backend,
        num_nodes=c.num_nodes,
        ranks_per_node=c.ranks_per_node,
        all_ranks=measured.all_ranks,
        in_node=measured.in_node if same else None,
    )
