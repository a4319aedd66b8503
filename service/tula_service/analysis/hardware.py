"""Collects properties of a job's network, devices and links from the specification, data sheets, probes and runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

import tula_wire as wire
from tula_service.analysis import job_data
from tula_service.analysis.job_data import EarlierJob, JobData
from tula_service.domain import RunSummary
from tula_service.perfmodel.fabric import BUCKET_BYTES, AllReduceCost, Fabric, fit_all_reduce
from tula_service.perfmodel.intervals import Interval
from tula_service.perfmodel.priors import ROOFLINE_SD, UNKNOWN_PRECISION_SD, Hardware, ModelFacts
from tula_wire.devices import DEVICES, PROCESSOR, capacities_gib
from tula_wire.format import size
from tula_wire.jobs import Precision

_PROCESSOR_SD = 1.0
_UNKNOWN_PARAMETERS = 25_000_000
_FLOPS_PER_PARAMETER = 300.0
_UNKNOWN_FLOPS_SD = 1.0
_COUNTED = ("precision", "parameters", "activation_bytes_per_sample")
BYTES_PER_NUMBER = {"fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0}
RECOMPUTED: Final = 4.0 / 3.0  # factor of a second forward pass, if a backward pass takes twice as long
_GUESS: Final = (4.15, 1.02, -0.61)
"""The coefficients of log(bytes kept / bytes per number) = g0 + g1 log F + g2 log parameters.

They were fitted to the networks in the tables that `perfmodel.priors` names.
"""
_GUESSED_ACTIVATIONS_SD: Final = 0.3
_READ_AND_WRITTEN: Final = 2.0
_HALF: Final = ("bf16", "fp16")
_LEAST_POWER_SD: Final = 0.1  # of the logarithm of the power of different configurations
_OTHER_TYPE_POWER_SD: Final = 0.5
MANY_ELEMENTS: Final = 2**31
_SDS_TO_THE_END: Final = 1.645
_LOG_BYTES: Final = (0.0, 60.0 * math.log(2.0))


@dataclass(frozen=True)
class EarlierFigures:
    """An earlier job, with the facts about its network and the hardware of its instance types.

    `types` contains, for each of the earlier job's instance types, its name, its hardware, and whether the current job
    uses the same hardware.
    """

    job: EarlierJob
    facts: ModelFacts
    types: tuple[tuple[str, Hardware, bool], ...]


@dataclass(frozen=True)
class Figures:
    """Hardware figures of a job and of earlier jobs, from specifications, data sheets and probes.

    Four fields map instance types to values: `hardware`; `fabrics`, the links measured by probes on the same hardware;
    `power_w`, the power of a rank's device, for all types or none; and `slow_from`, the smallest local batch for which
    cuDNN uses slower convolution kernels. `earlier` has the earlier jobs, newest first.
    """

    facts: ModelFacts
    hardware: Mapping[str, Hardware]
    fabrics: Mapping[str, Fabric]
    power_w: Mapping[str, Interval]
    slow_from: Mapping[str, float]
    earlier: tuple[EarlierFigures, ...]


def look_up_figures(data: JobData) -> Figures:
    """Return the hardware figures of a job and of the earlier jobs whose results can be used for this job."""
    spec = data.spec
    probed = {cluster.instance_type: fit_fabric(data.probes, cluster) for cluster in spec.cluster}
    fabrics = {name: fabric for name, fabric in probed.items() if fabric is not None}
    hardware = {cluster.instance_type: look_up_hardware(cluster, spec.model.precision) for cluster in spec.cluster}
    hardware |= {name: replace(hardware[name], launch_s=fabric.launch_s) for name, fabric in fabrics.items()}
    return Figures(
        facts=read_facts(spec.model),
        hardware=hardware,
        fabrics=fabrics,
        power_w=estimate_power(spec, data.summaries),
        slow_from=slow_from(spec.model, spec.cluster),
        earlier=tuple(
            EarlierFigures(
                job,
                read_facts(job.model),
                tuple(
                    (
                        cluster.instance_type,
                        look_up_hardware(cluster, job.model.precision),
                        any(same_hardware(cluster, mine) for mine in spec.cluster),
                    )
                    for cluster in job.clusters
                ),
            )
            for job in data.earlier_jobs
        ),
    )


def look_up_hardware(cluster: wire.ClusterSpec, precision: Precision | None = None) -> Hardware:
    """Return the hardware figures of an instance type, with the arithmetic peak for `precision`.

    A figure is None if neither the specification nor a data sheet contains it. Different names of the same device, such
    as V100-16GB and Tesla V100, are treated as equal; the CPUs of two instance types are treated as different.
    """
    name = cluster.device
    if cluster.accelerator is None or name == PROCESSOR:
        key = f"{name or 'device'} of {cluster.instance_type}"
    else:
        key = name or cluster.accelerator.upper().replace(" ", "").replace("-", "")
    if name is None:
        return Hardware(inter_node_gbps=cluster.network_gbps, device=key)
    device = DEVICES[name]
    # The number of CPU cores that a rank uses is unknown and may be 1 or 40, for example.
    uncertain = _PROCESSOR_SD if name == PROCESSOR else 0.0
    # Jobs that were registered before precisions were checked may have a precision that the device does not support.
    peak = device.peak if precision is None else device.tflops[precision] or device.fp32
    return Hardware(peak, cluster.network_gbps, device.memory_gb_per_s, uncertain, key)


def same_hardware(one: wire.ClusterSpec | wire.FabricProbe, other: wire.ClusterSpec) -> bool:
    """Return True if both specify the same hardware.

    If neither of them specifies its hardware, they must also have the same number of ranks per node and, if both are
    clusters, the same memory per rank.
    """
    if any(getattr(one, name) != getattr(other, name) for name in ("instance_type", "accelerator", "network_gbps")):
        return False
    if one.accelerator is not None or one.instance_type != wire.DEFAULT_INSTANCE_TYPE:
        return True
    if isinstance(one, wire.ClusterSpec) and one.memory_bytes_per_rank != other.memory_bytes_per_rank:
        return False
    return one.ranks_per_node == other.ranks_per_node


def read_facts(model: wire.ModelSpec) -> ModelFacts:
    """Return the facts about a network; facts that are not specified are guessed, with an uncertainty."""
    parameters = float(model.parameters or _UNKNOWN_PARAMETERS)
    counted_flops = model.flops_per_sample
    # The FLOPs in a specification are those of a forward and a backward pass; the performance model needs one forward
    # pass.
    flops = _FLOPS_PER_PARAMETER * parameters if counted_flops is None else counted_flops / 3.0
    devices = job_data.devices_per_replica(model)
    again = RECOMPUTED if model.activation_checkpointing else 1.0
    # With activation checkpointing, the kept bytes are a poor measure of the computation, so they are not used.
    counted = None if model.activation_checkpointing else model.activation_bytes_per_sample
    transposed_bytes = None
    if model.transposed_elements_per_sample is not None and model.precision in _HALF:
        per_element = _READ_AND_WRITTEN * BYTES_PER_NUMBER[model.precision]
        transposed_bytes = again * per_element * model.transposed_elements_per_sample / devices
    guess = _guessed_activation_bytes(flops, parameters, BYTES_PER_NUMBER[model.precision or "fp32"]) / devices
    return ModelFacts(
        parameters,
        again * flops / devices,
        again * float(counted or guess),
        BYTES_PER_NUMBER["fp32"] * parameters / devices,
        flops_sd=math.hypot(
            _UNKNOWN_FLOPS_SD if counted_flops is None else 0.0, 0.0 if counted else _GUESSED_ACTIVATIONS_SD
        ),
        rule_sd=UNKNOWN_PRECISION_SD if model.precision is None else ROOFLINE_SD,
        volumes=3.0 if model.sharding == "zero3" else 2.0,
        idle_samples=float((model.pipeline_stages - 1) * (model.micro_batch_size or 1)),
        operations=None if model.operations_per_step is None else float(model.operations_per_step),
        transposed_bytes_per_sample=transposed_bytes,
    )


def _guessed_activation_bytes(flops_per_sample: float, parameter_count: float, bytes_per_number: float) -> float:
    """Return an estimate, accurate within a factor of about two, of the bytes per sample kept for the backward pass."""
    of_flops, of_parameters = math.log(max(flops_per_sample, 1e-300)), math.log(parameter_count)
    guess = _GUESS[0] + _GUESS[1] * of_flops + _GUESS[2] * of_parameters + math.log(bytes_per_number)
    return math.exp(min(max(guess, _LOG_BYTES[0]), _LOG_BYTES[1]))


def slow_from(model: wire.ModelSpec, clusters: Sequence[wire.ClusterSpec]) -> dict[str, float]:
    """Return the smallest local batch at which a convolution has 2^31 elements, by instance type.

    For this batch and larger ones, cuDNN uses slower kernels. Only known GPUs have an entry, since CPUs have no such
    limit and it is unknown whether other devices have one. If the number of elements is unknown, the result is empty.
    """
    elements = model.convolution_elements_per_sample
    if elements is None:
        return {}
    gpus = [cluster.instance_type for cluster in clusters if cluster.device not in (None, PROCESSOR)]
    return dict.fromkeys(gpus, MANY_ELEMENTS / elements)


def describe_guesses(spec: wire.JobSpec) -> list[str]:
    """Return a sentence and remedy for each fact about the job that the first prediction had to guess."""
    sentences = []
    if spec.model.flops_per_sample is None:
        sentences.append("The model's FLOPs per sample are unknown and were guessed; set model.flops_per_sample.")
    if spec.model.transposed_elements_per_sample and spec.model.precision in _HALF:
        sentences.append(
            f"Convolutions in {spec.model.precision} convert images between memory layouts, which the guess takes into "
            "account; to avoid this, apply .to(memory_format=torch.channels_last) to the model and the images."
        )
    names = [f"model.{name}" for name in _COUNTED if getattr(spec.model, name) is None]
    if names:
        sentences.append(f"To make the first guess of the step time more certain, set {', '.join(names)}.")
    for cluster in spec.cluster:
        if look_up_hardware(cluster).peak_tflops is None:
            sentences.append(
                f"The accelerator of {cluster.instance_type} is unknown and its speed was guessed; "
                "set cluster.accelerator, for example to V100-16GB."
                if cluster.accelerator is None
                else f"The service has no data sheet for {cluster.accelerator}, so its speed was guessed; if it is "
                f"similar to one of {', '.join(sorted(DEVICES))}, set cluster.accelerator to that device."
            )
        if cluster.network_gbps is None and cluster.max_nodes > 1:
            sentences.append(f"The network bandwidth of {cluster.instance_type} was guessed; set cluster.network_gbps.")
    return sentences


def contradiction(model: wire.ModelSpec, cluster: wire.ClusterSpec) -> tuple[str, str] | None:
    """Return (field, sentence) if the specified precision or memory contradicts the accelerator, otherwise None."""
    if cluster.device is None:
        return None
    device = DEVICES[cluster.device]
    if model.precision is not None and device.tflops[model.precision] is None:
        has = ", ".join(name for name, peak in device.tflops.items() if peak is not None)
        return "model.precision", (
            f"{cluster.accelerator} does not support {model.precision}: use one of {has}, or correct "
            "cluster.accelerator."
        )
    given = cluster.memory_bytes_per_rank or 0
    most = max(capacities_gib(cluster.accelerator or "", device), default=None)
    if most is not None and given > most * 2**30:
        return "cluster.memory_bytes_per_rank", (
            f"memory_bytes_per_rank is {size(given)}, but {cluster.accelerator} has at most {most} GiB: "
            "use the memory of one device, or correct cluster.accelerator."
        )
    return None


def fit_cost(readings: Sequence[wire.AllReduceReading]) -> AllReduceCost:
    """Return the all-reduce cost fitted to the readings of one group of ranks."""
    return fit_all_reduce(
        [reading.size_bytes for reading in readings],
        [reading.time_s for reading in readings],
        [reading.relative_sd / reading.repeats**0.5 for reading in readings],
    )


def fit_fabric(probes: Sequence[wire.FabricProbe], cluster: wire.ClusterSpec) -> Fabric | None:
    """Return the fabric measured by the probe with the most ranks on the cluster's hardware.

    If several probes have the most ranks, the first one is used. If there is no probe, the result is None.
    """
    if not (mine := select_probes(probes, cluster)):
        return None
    probe = max(mine, key=lambda probe: probe.num_nodes * probe.ranks_per_node)
    in_node = None if probe.in_node is None else fit_cost(probe.in_node)
    return Fabric(probe.num_nodes, probe.ranks_per_node, fit_cost(probe.all_ranks), in_node, probe.launch_time_s)


def select_probes(probes: Sequence[wire.FabricProbe], cluster: wire.ClusterSpec) -> list[wire.FabricProbe]:
    """Return the probes that ran on the same hardware as the cluster."""
    return [probe for probe in probes if same_hardware(probe, cluster)]


def agree(one: wire.FabricProbe, other: wire.FabricProbe) -> bool:
    """Return True if two probes have the same shape and their times for a bucket differ by at most a factor of 2."""
    shapes = {(probe.instance_type, probe.num_nodes, probe.ranks_per_node) for probe in (one, other)}
    costs = (fit_cost(probe.all_ranks) for probe in (one, other))
    times = sorted(cost.latency_s.mean + cost.seconds_per_byte.mean * BUCKET_BYTES for cost in costs)
    return len(shapes) == 1 and times[1] <= 2 * times[0]


def build_probe(
    measured: wire.AllReduces, configuration: wire.Configuration, cluster: wire.ClusterSpec
) -> wire.FabricProbe | None:
    """Return a run's all-reduce timings as a probe of the cluster, or None if they are for a different number of ranks.

    The number of nodes comes from the configuration, as for the run's samples. The measurements within a node are used
    only if the ranks reported the same number of nodes.
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
        launch_time_s=measured.launch_time_s,
        num_nodes=c.num_nodes,
        ranks_per_node=c.ranks_per_node,
        all_ranks=measured.all_ranks,
        in_node=measured.in_node if same else None,
    )


def estimate_power(spec: wire.JobSpec, summaries: Sequence[RunSummary]) -> Mapping[str, Interval]:
    """Return the power of a rank's device by instance type, in watts, with 90 % intervals.

    The power of a run is the energy of a step divided by the step time, and the power of an instance type is the
    geometric mean over the runs on this type. A type without runs is assigned the mean over all runs, with a wider
    interval. If no run has reported energy, the result is empty.
    """
    read: dict[str, list[float]] = {}
    for summary in summaries:
        if summary.energy_per_step_j and summary.step_time_s:
            log_w = math.log(summary.energy_per_step_j / summary.step_time_s)
            read.setdefault(summary.configuration.instance_type, []).append(log_w)
    if not read:
        return {}
    everywhere = [log_w for logs in read.values() for log_w in logs]
    power_w = {}
    for cluster in spec.cluster:
        name = cluster.instance_type
        logs = read.get(name, everywhere)
        sd = math.hypot(_LEAST_POWER_SD, float(np.std(logs)), 0.0 if name in read else _OTHER_TYPE_POWER_SD)
        mean, width = math.exp(float(np.mean(logs))), math.exp(_SDS_TO_THE_END * sd)
        power_w[name] = Interval(mean, mean / width, mean * width)
    return power_w
