"""What is believed before anything is measured anywhere: generic, or from hardware figures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tula_service.domain import Basis, Collective
from tula_service.perfmodel.predict.observations import FloatArray, column
from tula_service.perfmodel.predict.physical import PARAMETERS
from tula_service.perfmodel.predict.residual import ResidualScales

__all__ = [
    "Hardware",
    "ModelFacts",
    "Priors",
    "StepTimePrior",
    "generic_prior",
    "prior_from_hardware",
]

_UNKNOWN_SCALE_SD = 5.0
_SUSTAINED_SHARE = 0.6
_SUSTAINED_SHARE_SD = 0.8  # what the three widths of `scale_from_jobs` make together
_BACKWARD_AND_FORWARD = 3.0
_LINK_SHARE = 0.5
_FLOPS_PER_BYTE = 11.0
_UNKNOWN_TFLOPS, _UNKNOWN_TFLOPS_SD = 20.0, 1.0
_UNKNOWN_GBPS = 10.0


@dataclass(frozen=True)
class StepTimePrior:
    """A Gaussian over the parameters of the physical form, in the order and encoding of `PARAMETERS`.

    `absolute` says whether c is known; without it at least one measurement is needed. `reference_batch_size` is b_ref,
    None for "the largest batch in question".
    """

    mean: FloatArray
    sd: FloatArray
    scales: ResidualScales = field(default_factory=ResidualScales)
    basis: Basis = Basis.PRIOR
    absolute: bool = False
    reference_batch_size: float | None = None

    def __post_init__(self) -> None:
        """Raise ObservationError unless there is one finite centre and one positive width for each parameter."""
        object.__setattr__(self, "mean", column("prior mean", self.mean, len(PARAMETERS)))
        object.__setattr__(self, "sd", column("prior sd", self.sd, len(PARAMETERS), above=0.0))


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a network without running it.

    `flops_per_sample` is one forward pass, a multiplication and an addition counted as two; `flops_sd` is how uncertain
    its logarithm is, 0 where it was counted.
    """

    parameter_count: float
    flops_per_sample: float
    bytes_per_parameter: float = 4.0
    flops_sd: float = 0.0

    def __post_init__(self) -> None:
        """Raise ObservationError unless everything is positive and finite; `flops_sd` may be 0."""
        for name in ("parameter_count", "flops_per_sample", "bytes_per_parameter"):
            column(name, [getattr(self, name)], above=0.0)
        column("flops_sd", [self.flops_sd], at_least=0.0)


@dataclass(frozen=True)
class Hardware:
    """What is known of an instance type; None where it is not.

    Network bandwidths in gigabits per second; peak in teraflop per second and memory bandwidth in gigabytes per second,
    both of one rank's device. `figures_sd` is how uncertain the logarithms of those two are: 0 from a data sheet.
    """

    peak_tflops: float | None = None
    inter_node_gbps: float | None = None
    intra_node_gbps: float | None = None
    memory_gb_per_s: float | None = None
    launch_overhead_s: float = 0.005
    figures_sd: float = 0.0

    def __post_init__(self) -> None:
        """Raise ObservationError unless everything that is known is positive and finite; `figures_sd` may be 0."""
        for name in ("peak_tflops", "inter_node_gbps", "intra_node_gbps", "memory_gb_per_s", "launch_overhead_s"):
            if getattr(self, name) is not None:
                column(name, [getattr(self, name)], above=0.0)
        column("figures_sd", [self.figures_sd], at_least=0.0)

    @property
    def device_sd(self) -> float:
        """How uncertain the logarithm of the device's speed is; where no peak is known it is a guess."""
        return _UNKNOWN_TFLOPS_SD if self.peak_tflops is None else self.figures_sd


@dataclass(frozen=True)
class Priors:
    """What is believed before a job's own runs, by instance type; a type that is not in `believed` starts generic.

    `hardware` carries what was measured on one type over to another that was not. `anywhere` stands for every type.
    """

    believed: Mapping[str, StepTimePrior] = field(default_factory=dict)
    hardware: Mapping[str, Hardware] = field(default_factory=dict)
    anywhere: StepTimePrior | None = None

    @classmethod
    def of(cls, prior: StepTimePrior | Priors | None) -> Priors:
        """One prior for all types, as priors by type."""
        return prior if isinstance(prior, Priors) else cls(anywhere=prior)

    def of_type(self, name: str) -> StepTimePrior | None:
        """The prior of one instance type, None for the generic one."""
        return self.believed.get(name, self.anywhere)


def generic_prior(collective: Collective = Collective.RING) -> StepTimePrior:
    """What holds of any synchronous data-parallel job, as far as 43 measured grids tell.

    Centres and widths were chosen by the error of held-out predictions on grids of Pollux (Apache-2.0), Gavel (MIT),
    ElasticFlow, DLPerf and TensorFlow's benchmarks (Apache-2.0), and rounded: at the largest batch a third of compute
    is floor, two ranks of a node add 4 % of it, two nodes 30 %, and about a third of what can overlap does not.
    """
    growth = _COLLECTIVE_GROWTH[collective]
    return StepTimePrior(
        mean=np.array([0.0, math.log(0.31), -0.04, -0.7, math.log(0.037), growth, math.log(0.3), growth, -0.09, -1.1]),
        sd=np.array([_UNKNOWN_SCALE_SD, 1.2, 0.09, 1.3, 1.1, 0.39, 1.4, 0.21, 0.29, 1.1]),
    )


# Two participants cost s; twice as many cost 2^k times that: a ring's 2(N-1)/N grows by 1.5 and then levels off while
# its latency term grows with N, a tree's depth grows by a step, a parameter server's link carries every rank.
_COLLECTIVE_GROWTH = {
    Collective.RING: 0.38,
    Collective.TREE: 0.3,
    Collective.PARAMETER_SERVER: 0.7,
    Collective.HIERARCHICAL: 0.3,
}


def prior_from_hardware(
    facts: ModelFacts, hardware: Hardware, *, reference_batch_size: float, collective: Collective = Collective.RING
) -> StepTimePrior:
    """A prior with a scale, for a job that has no runs: basis `prior`, a factor of about two either way.

    c = 3 * FLOPs per sample * b_ref / sustained, a = launch overhead / c, and for each level of the network
    s = 2 * (1 - 1/2) * gradient bytes * 8 / (0.5 * bandwidth) / c (a ring over two participants). Sustained is
    0.6 * peak, or, where memory bandwidth W is known, the geometric mean of that and of 11 FLOP per byte * W: half-way
    between networks bound by arithmetic and by memory, and between single precision (of which most of the measured
    networks reach 0.4 to 0.7 of the peak) and mixed (twice the single precision peak and more, on tensor cores). What
    is not known of the hardware is guessed, and c is wider.
    """
    base = generic_prior(collective)
    b_ref = float(column("reference_batch_size", [reference_batch_size], above=0.0)[0])
    # In logarithms throughout: a specification may name any finite number of FLOPs, and ratios of such underflow.
    log_flops = math.log(_BACKWARD_AND_FORWARD) + math.log(facts.flops_per_sample) + math.log(b_ref)
    log_sustained = math.log(_SUSTAINED_SHARE * (hardware.peak_tflops or _UNKNOWN_TFLOPS) * 1e12)
    if hardware.memory_gb_per_s is not None:
        log_sustained = 0.5 * (log_sustained + math.log(_FLOPS_PER_BYTE * hardware.memory_gb_per_s * 1e9))
    log_compute = log_flops - log_sustained
    log_bits = math.log(8.0) + math.log(facts.parameter_count) + math.log(facts.bytes_per_parameter)
    mean, sd = base.mean.copy(), base.sd.copy()
    mean[0] = log_compute
    sd[0] = math.hypot(_SUSTAINED_SHARE_SD, facts.flops_sd, hardware.device_sd)
    mean[1], sd[1] = math.log(hardware.launch_overhead_s) - log_compute, 1.2
    if hardware.intra_node_gbps is not None:
        mean[4] = log_bits - math.log(_LINK_SHARE * hardware.intra_node_gbps * 1e9) - log_compute
    mean[6] = log_bits - math.log(_LINK_SHARE * (hardware.inter_node_gbps or _UNKNOWN_GBPS) * 1e9) - log_compute
    return StepTimePrior(mean, sd, base.scales, Basis.PRIOR, absolute=True, reference_batch_size=b_ref)
