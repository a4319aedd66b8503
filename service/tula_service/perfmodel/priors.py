"""Priors of the step-time parameters before a job's own runs: generic, from hardware figures, or from earlier jobs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from tula_service.perfmodel.points import FloatArray, column
from tula_service.perfmodel.step_time_form import (
    ABSENT,
    AT,
    COLLECTIVES,
    NUM_PARAMETERS,
    ResidualScales,
    to_seconds,
)
from tula_wire.enums import Basis
from tula_wire.options import Options

_UNKNOWN_SCALE_SD = 5.0
_ABSENT_SD = 0.01
ROOFLINE_SD = 0.35
UNKNOWN_PRECISION_SD = 0.8  # the root of the sum of squares of the three widths of `scale_from_jobs`
_LINK_SHARE = 0.5
_BYTES_PER_PARAMETER = 4.0
_ALL_REDUCE_VOLUMES = 2.0
_LOG_BEND_OF_A_SUM = -3.0
_UNKNOWN_TFLOPS, _UNKNOWN_GB_PER_S, _UNKNOWN_DEVICE_SD = 20.0, 900.0, 1.0
_UNKNOWN_GBPS = 10.0
_BETWEEN_JOBS_SD = 0.25
_TAUGHT_CLUSTERS = 2
_LEAST_TAUGHT = 0.05  # of what the generic prior knows: below it, a rounding difference would be an estimate
_WORTH_OF_BETWEEN_SD = 2.0  # the number of jobs that the usual spread weighs as much as
_BETWEEN_TYPES_SD, _UNKNOWN_TYPE_SD = 0.5, 1.0
_EVERYWHERE_SD, _DEVICE_SD, _NETWORK_SD = 0.5, 0.4, 0.5  # of log(c / guess)
_WORTH_OF_NETWORK_SD = 6.0  # the number of jobs that the prior of _NETWORK_SD weighs as much as
_BELIEVED_SDS = 4.0
_OF_ARITHMETIC, _OF_ACTIVATIONS, _OF_PARAMETERS = 0.634, 18.5, 30.7
"""Fitted to timm's table (Apache-2.0: 765 rows, one RTX 3090 with AMP) and the tables of Lambda, TensorFlow, DLPerf
and mxnet-finetuner (BSD-3-Clause, Apache-2.0: eleven devices), and scored with each network or device left out in
turn.
"""
_OF_ACTIVATIONS_ALONE = 16.2
"""For half precision, if the bytes that convolutions convert are counted separately; fitted to timm's rows in two
layouts with the other two numbers unchanged.

With each family left out in turn, the result is also 16.2.
"""
FLOOR_S: Final = 0.03
"""Seconds that launches and the optimizer take on any accelerator if operations were not counted.

Batch sweeps on one device in the tables of Pollux and DLPerf (Apache-2.0) have floors of 7 to 215 ms, around 30. No
table has small batches on another class of devices.
"""
LAUNCH_S: Final = 30e-6
"""Seconds that the host of an accelerator takes to launch one operation in PyTorch without compilation, if no probe
timed it.

On an H100, steps of 8 examples took 23 to 50 us per counted operation.
"""
_LOG_BEND_OF_A_QUEUE: Final = math.log(3.0)
"""The bend h = 4: the host queues operations while the device computes, so the longer time dominates.
"""


@dataclass(frozen=True)
class StepTimePrior:
    """A Gaussian over the parameters of the form `overlap`, in the order and encoding of `step_time_form`.

    `absolute` is True if c is known; otherwise a fit needs at least one measurement. `reference_batch_size` is b_ref;
    None stands for the largest batch in question. `in_seconds` lists entries that are known in seconds although the
    form has them relative to c: their `sd` is the deviation of log(entry * c), even if c itself is uncertain.
    `slow_from` is the smallest local batch at which convolutions are slower.
    """

    mean: FloatArray
    sd: FloatArray
    scales: ResidualScales = field(default_factory=ResidualScales)
    basis: Basis = "prior"
    absolute: bool = False
    reference_batch_size: float | None = None
    in_seconds: tuple[int, ...] = ()
    slow_from: float = math.inf

    def __post_init__(self) -> None:
        """Raise ObservationError unless each parameter has a finite mean and a positive deviation."""
        object.__setattr__(self, "mean", column("prior mean", self.mean, NUM_PARAMETERS))
        object.__setattr__(self, "sd", column("prior sd", self.sd, NUM_PARAMETERS, above=0.0))

    @property
    def precision(self) -> FloatArray:
        """Return the inverse of theta's covariance, shape (11, 11)."""
        transform = to_seconds(self.in_seconds)
        return np.asarray(transform.T @ (transform / self.sd[:, None] ** 2))

    def without_accumulation(self) -> StepTimePrior:
        """Return this prior for steps that never accumulate.

        The compute of such a step includes the once-per-step part, since no measurement can separate the two.
        """
        mean, sd = self.mean.copy(), self.sd.copy()
        mean[AT.once], sd[AT.once] = ABSENT, _ABSENT_SD
        return replace(self, mean=mean, sd=sd)


@dataclass(frozen=True)
class ModelFacts:
    """The facts of a network that are known without running it.

    `flops_per_sample` counts one forward pass, and a multiplication and an addition as two.
    `activation_bytes_per_sample` is the number of bytes that a sample leaves on one device for the backward pass, and
    `parameter_bytes` the bytes of the parameters on one device in single precision. `flops_sd` is the uncertainty of
    the logarithm of the compute due to guesses, 0 if everything was counted. `rule_sd` is the remaining error of the
    roofline in that logarithm, which is larger if the precision is unknown. `volumes` is how often the bytes of the
    parameters cross a link in a step: 2 for an all-reduce, or a reduce-scatter and an all-gather; 3 if the backward
    pass gathers the parameters again. `idle_samples` is the number of examples for whose compute a device of a pipeline
    is idle: with m micro-batches and p stages, a step takes the time of m + p - 1 micro-batches. `operations` is the
    number of operations of a micro-step that start a kernel, or None if they were not counted.
    `transposed_bytes_per_sample` is the number of bytes of a sample's images that are read and written because
    convolutions in half precision change the memory layout; None if they were not counted, or in single precision.
    """

    parameter_count: float
    flops_per_sample: float
    activation_bytes_per_sample: float
    parameter_bytes: float
    flops_sd: float = 0.0
    rule_sd: float = ROOFLINE_SD
    volumes: float = _ALL_REDUCE_VOLUMES
    idle_samples: float = 0.0
    operations: float | None = None
    transposed_bytes_per_sample: float | None = None

    def __post_init__(self) -> None:
        """Raise ObservationError unless the counts are positive and finite; a third of a tiny number may be 0."""
        for name in ("parameter_count", "flops_per_sample"):
            column(name, [getattr(self, name)], above=0.0)


@dataclass(frozen=True)
class Hardware:
    """The figures of an instance type; None stands for an unknown figure.

    Network bandwidths are in gigabits per second. The peak in teraflop per second and the memory bandwidth in gigabytes
    per second describe one rank's device. `figures_sd` is the uncertainty of the logarithms of these two, 0 for a data
    sheet. Equal devices have the same name in `device`. `launch_s` is how many seconds the host takes to start an
    operation, if a probe timed it.
    """

    peak_tflops: float | None = None
    inter_node_gbps: float | None = None
    memory_gb_per_s: float | None = None
    figures_sd: float = 0.0
    device: str = ""
    launch_s: float | None = None

    @property
    def device_sd(self) -> float:
        """Return the uncertainty of the logarithm of the device's speed, which is a guess if the peak is unknown."""
        return _UNKNOWN_DEVICE_SD if self.peak_tflops is None else self.figures_sd


@dataclass(frozen=True)
class Priors:
    """The prior of each instance type before a job's own runs; a type that is not in `believed` starts from the generic
    prior.

    The fit uses `hardware` to transfer the measurements of one type to a type without any. `probed` lists the types
    whose links between nodes a probe measured. `slow_from` is the smallest local batch of a type at which convolutions
    are slower. `base` has the options of the variants in `believed`: the first value of each.
    """

    believed: Mapping[str, StepTimePrior] = field(default_factory=dict)
    hardware: Mapping[str, Hardware] = field(default_factory=dict)
    probed: frozenset[str] = frozenset()
    slow_from: Mapping[str, float] = field(default_factory=dict)
    base: Options = ()


def generic_prior() -> StepTimePrior:
    """Return the prior of any synchronous data-parallel job, made from 43 measured grids.

    Means and deviations were chosen by the error of held-out predictions on grids of Pollux (Apache-2.0), Gavel (MIT),
    ElasticFlow, DLPerf and TensorFlow's benchmarks (Apache-2.0), and then rounded: at the largest batch, a third of
    compute is floor, two ranks of a node add 4 % of compute, two nodes add 30 %, and about a third of the communication
    that could overlap does not. The once-per-step share, 3 % of compute, comes from tables of training with
    accumulation that are not in the project.
    """
    return StepTimePrior(
        mean=np.array(
            [0.0, math.log(0.31), -0.04, -0.7, math.log(0.037), 0.38, math.log(0.3), 0.38, -0.09, -1.1, math.log(0.03)]
        ),
        sd=np.array([_UNKNOWN_SCALE_SD, 1.2, 0.09, 1.3, 1.1, 0.39, 1.4, 0.21, 0.29, 1.1, 1.2]),
    )


def prior_from_hardware(facts: ModelFacts, hardware: Hardware, *, reference_batch_size: float) -> StepTimePrior:
    """Return a prior with a scale (basis `prior`) for a job without runs.

    The compute of a step on one device comes from a roofline, within a factor of about 1.3,

        t(b) = b (arithmetic 3 F / peak + (activations A + X) / W) + parameters P / W + floor

    or, if the operations of a step were counted, (g^4 + l^4)^(1/4): g has the terms in b, and l the term of the
    parameters and `operations` launches. F is the FLOPs of one forward pass per sample, A the bytes that one sample
    keeps for the backward pass, X the bytes that one sample moves because convolutions in half precision change the
    memory layout of its images, P the bytes of parameters, and W the memory bandwidth. Between nodes, s_inter = volumes
    * (1 - 1/2) * gradient bytes * 8 / (0.5 * bandwidth) / c (a ring over two). An unknown figure of the hardware is
    replaced by a guess, which makes c less certain.
    """
    base = generic_prior()
    b_ref = float(column("reference_batch_size", [reference_batch_size], above=0.0)[0])
    peak, bandwidth = hardware.peak_tflops or _UNKNOWN_TFLOPS, hardware.memory_gb_per_s or _UNKNOWN_GB_PER_S
    # This computes in logarithms, since a specification may have any finite number of FLOPs, and ratios could
    # underflow.
    log_bandwidth = math.log(bandwidth * 1e9)
    arithmetic = math.log(3.0 * _OF_ARITHMETIC) + math.log(facts.flops_per_sample) - math.log(peak * 1e12)
    transposed = facts.transposed_bytes_per_sample
    passes = _OF_ACTIVATIONS if transposed is None else _OF_ACTIVATIONS_ALONE
    moved = math.log(passes) + (math.log(facts.activation_bytes_per_sample) - log_bandwidth)
    if transposed:
        moved = float(np.logaddexp(moved, math.log(transposed) - log_bandwidth))
    log_compute = math.log(b_ref) + float(np.logaddexp(arithmetic, moved))
    per_step = math.log(_OF_PARAMETERS) + (math.log(facts.parameter_bytes) - log_bandwidth)
    log_bits = math.log(8.0) + math.log(facts.parameter_count) + math.log(_BYTES_PER_PARAMETER)
    mean, sd = base.mean.copy(), base.sd.copy()
    mean[AT.compute], sd[AT.compute] = log_compute, math.hypot(facts.rule_sd, facts.flops_sd, hardware.device_sd)
    launches, bend = math.log(FLOOR_S), _LOG_BEND_OF_A_SUM
    if facts.operations is not None:
        launches, bend = math.log(facts.operations * (hardware.launch_s or LAUNCH_S)), _LOG_BEND_OF_A_QUEUE
    mean[AT.floor], mean[AT.bend] = np.logaddexp(launches, per_step) - log_compute, bend
    if facts.idle_samples:
        mean[AT.floor] = np.logaddexp(mean[AT.floor], math.log(facts.idle_samples / b_ref))
    more = math.log(facts.volumes / _ALL_REDUCE_VOLUMES)
    mean[AT.intra] += more
    mean[AT.inter] = (
        more + log_bits - math.log(_LINK_SHARE * (hardware.inter_node_gbps or _UNKNOWN_GBPS) * 1e9) - log_compute
    )
    return StepTimePrior(mean, sd, base.scales, "prior", absolute=True, reference_batch_size=b_ref)


@dataclass(frozen=True)
class ScaleError:
    """The error of the hardware-based prior for a job with any network, at its reference batch size.

    `log_ratio` is log(fitted c / c of `prior_from_hardware`), 0 before a fit, and `sd` its own uncertainty (guessed
    FLOPs, runs that did not determine c). `device_sd` is the uncertainty due to the figures of `device`
    (`Hardware.device_sd`), and `rule_sd` the uncertainty of the rule.
    """

    log_ratio: float
    device: str
    sd: float = 0.0
    device_sd: float = 0.0
    rule_sd: float = UNKNOWN_PRECISION_SD


@dataclass(frozen=True)
class Lesson:
    """The posterior of a network's runs on one instance type, and the facts that are known without a run."""

    learned: StepTimePrior
    facts: ModelFacts
    hardware: Hardware

    @property
    def scale_error(self) -> ScaleError:
        """Return the error of the prior from hardware figures compared with the posterior of the runs."""
        b_ref = self.learned.reference_batch_size or 1.0
        guess = prior_from_hardware(self.facts, self.hardware, reference_batch_size=b_ref)
        return ScaleError(
            float(self.learned.mean[AT.compute] - guess.mean[AT.compute]),
            self.hardware.device,
            math.hypot(self.facts.flops_sd, float(self.learned.sd[AT.compute])),
            self.hardware.device_sd,
            self.facts.rule_sd,
        )


@dataclass(frozen=True)
class Lessons:
    """The results of earlier jobs, grouped by what they have in common with a job.

    `same_network` and `other_networks` come from runs on the job's hardware, by instance type. Each prior of another
    network is paired with the ratio of the job's parameter count to that network's, or None if a count is unknown.
    `other_hardware` comes from runs of the same network on hardware that the job does not have. `scales` covers any
    network on any hardware.
    """

    same_network: Mapping[str, tuple[StepTimePrior, ...]] = field(default_factory=dict)
    other_networks: Mapping[str, tuple[tuple[StepTimePrior, float | None], ...]] = field(default_factory=dict)
    other_hardware: tuple[tuple[StepTimePrior, Hardware], ...] = ()
    scales: tuple[Lesson, ...] = ()


def prior_of_type(
    name: str,
    facts: ModelFacts,
    hardware: Mapping[str, Hardware],
    lessons: Lessons,
    *,
    reference_batch_size: float,
    measured: bool,
    measured_clusters: int = 0,
) -> StepTimePrior | None:
    """Return the prior of a network on the instance type `name`, or None for the generic prior.

    `hardware` covers every type of the job. `measured` is True if the job has runs: they determine its scale better
    than the scales of other jobs, so the result is None unless earlier jobs ran on this hardware. `measured_clusters`
    is the number of cluster sizes of this type that have runs: from three on, the job's own collectives are better than
    those of other networks, which would then do harm.
    """
    if name in lessons.same_network:
        return prior_from_jobs(lessons.same_network[name])
    related = lessons.other_networks.get(name) if measured_clusters <= _TAUGHT_CLUSTERS else None
    if related is None and measured:
        return None
    guess = prior_from_hardware(facts, hardware[name], reference_batch_size=reference_batch_size)
    near = [(prior, hardware[other]) for other, priors in sorted(lessons.same_network.items()) for prior in priors]
    moved = [
        prior_from_other_type(learned, other, hardware[name])
        for learned, other in (*near, *lessons.other_hardware)
        if other.memory_gb_per_s is not None and hardware[name].memory_gb_per_s is not None
    ]
    # This is the more certain of two guesses: the same network on other hardware, scaled by the ratio of the data
    # sheets, or the hardware figures, corrected by the speed of earlier jobs. A run on hardware of uncertain speed says
    # less about a device than its data sheet does.
    scale = min((guess, *moved), key=lambda prior: float(prior.sd[AT.compute]))
    if scale is guess:
        error = ScaleError(0.0, hardware[name].device, facts.flops_sd, hardware[name].device_sd, facts.rule_sd)
        scale = scale_from_jobs(guess, error, () if measured else [lesson.scale_error for lesson in lessons.scales])
    else:
        scale = replace(scale, basis="prior")  # only earlier jobs on the same hardware make a `transfer`
    if related is None:
        return scale
    learned, ratios = zip(*related, strict=True)
    return prior_from_jobs(learned, scale=scale, gradient_ratios=ratios)


def scale_from_jobs(guess: StepTimePrior, error: ScaleError, earlier: Sequence[ScaleError]) -> StepTimePrior:
    """Return `guess` (from `prior_from_hardware`, with this error) with its compute scale corrected by errors of other
    jobs.

    log(c / guess) = everywhere + device + network: the effect of a team's framework, precision and kernels on every
    network, their effect on one device, and the effect of the network itself. The first two are normal around 0 (sd 0.5
    and 0.4, plus `device_sd`); the sd of the third is estimated from the jobs, and is 0.5 before any job. All three
    shrink with the `rule_sd` of the guess, the first two with its square, since a rule that knows precision and memory
    traffic leaves less in common. Jobs with a larger `rule_sd` count less. `earlier` has each network at most once per
    device, since a repetition would count as another job that agrees. A job that is off by more than four sd is
    ignored, since it was described wrongly (FLOPs in another unit). The deviations come from step times of six networks
    on eight devices in two precisions (Lambda's TensorFlow benchmark, BSD-3-Clause).
    """
    widths, share = (_EVERYWHERE_SD, _DEVICE_SD, _NETWORK_SD), error.rule_sd / UNKNOWN_PRECISION_SD
    everywhere_sd, on_device_sd = share**2 * _EVERYWHERE_SD, share**2 * _DEVICE_SD
    all_three = share * math.hypot(*widths)
    network_sd = math.sqrt(all_three**2 - everywhere_sd**2 - on_device_sd**2)
    usable = [
        job for job in earlier if abs(job.log_ratio) <= _BELIEVED_SDS * math.hypot(*widths, job.device_sd, job.sd)
    ]
    if not usable:
        return guess
    from sklearn.linear_model import BayesianRidge  # imported on use: it takes half a second, and few starts need it

    devices = [error.device, *sorted({job.device for job in usable} - {error.device})]
    same = np.array([[job.device == device for device in devices] for job in usable])
    on = np.hypot(on_device_sd, [job.device_sd for job in usable])
    parts = np.column_stack([np.full(len(usable), everywhere_sd), on[:, None] * same])
    own = [job.sd**2 + max(job.rule_sd**2 - error.rule_sd**2, 0.0) for job in usable]
    certainty = network_sd**2 / (network_sd**2 + np.array(own))
    # The columns are scaled by their sd, so the weights have a sd of 1; a prior worth 1e6 jobs keeps lambda at 1.
    ridge = BayesianRidge(
        fit_intercept=False,
        alpha_init=network_sd**-2,
        alpha_1=_WORTH_OF_NETWORK_SD / 2.0,
        alpha_2=_WORTH_OF_NETWORK_SD / 2.0 * network_sd**2,
        lambda_init=1.0,
        lambda_1=1e6,
        lambda_2=1e6,
    ).fit(parts, np.array([job.log_ratio for job in usable]), sample_weight=certainty)
    this_job = np.zeros((1, parts.shape[1]))
    this_job[0, :2] = everywhere_sd, math.hypot(on_device_sd, error.device_sd)
    shift, spread = ridge.predict(this_job, return_std=True)
    mean, sd = guess.mean.copy(), guess.sd.copy()
    mean[AT.compute] += shift[0]
    mean[[AT.floor, AT.intra, AT.inter]] -= shift[0]  # launches and links take as long as before, relative to another c
    sd[AT.compute] = math.hypot(float(spread[0]), error.sd)
    return replace(guess, mean=mean, sd=sd)


def prior_from_other_type(learnt: StepTimePrior, measured: Hardware, other: Hardware) -> StepTimePrior:
    """Return the prior of a network on one instance type from its runs on another (basis `transfer`).

    The shape is kept. With W the memory bandwidth of a device and L the bandwidth of a link, c' = c W / W', a' = a c /
    c' and s' = s (c / c') (L / L'): step times of networks follow memory bandwidth more closely than peak arithmetic,
    since each generation of devices reaches a different share of its peak. If a figure of either type is unknown, the
    means do not change and c is less certain; c is also less certain if the figures are.
    """

    def times(name: str) -> float | None:
        before, after = getattr(measured, name), getattr(other, name)
        return None if before is None or after is None else math.log(after / before)

    shape = prior_from_jobs([learnt])
    mean, sd, collectives = shape.mean.copy(), shape.sd.copy(), list(COLLECTIVES)
    faster = times("memory_gb_per_s")
    if faster is None:
        faster = times("peak_tflops")
    sd[AT.compute] = _UNKNOWN_TYPE_SD
    if faster is not None:
        sd[AT.compute] = math.hypot(learnt.sd[AT.compute], _BETWEEN_TYPES_SD, measured.figures_sd, other.figures_sd)
        mean[AT.compute] -= faster
        mean[[AT.floor, *collectives]] += faster
    mean[AT.inter] -= times("inter_node_gbps") or 0.0
    sd[collectives] = np.hypot(sd[collectives], _BETWEEN_TYPES_SD)
    return replace(shape, mean=mean, sd=sd)


def prior_from_jobs(
    posteriors: Sequence[StepTimePrior],
    *,
    scale: StepTimePrior | None = None,
    gradient_ratios: Sequence[float | None] = (),
) -> StepTimePrior:
    """Return the prior of the next job (basis `transfer`) from k earlier jobs on the same hardware.

    Each posterior (`Posterior.without_prior`) includes the generic prior, which is divided out before they are
    combined, so that a job contributes nothing about what it did not measure. The next job differs from the others as
    they differ from one another, so its deviation is sqrt(between^2 + own^2 / k), never the error of the mean alone.
    Collectives carry over in seconds.

    The compute scale c belongs to one network: it comes from `scale` (from `prior_from_hardware`) or, if the jobs are
    runs of the same network, from these runs. With `scale`, the jobs are other networks, and their collectives are
    transferred as seconds per gradient byte, c s / (4 P). `gradient_ratios` are the ratios of this network's parameters
    to theirs, one for each posterior; a job with None, whose count is unknown, contributes nothing about collectives.
    Parameters about which no job contributes come from `scale` or, without it, from the generic prior.
    """
    generic, base, collectives = generic_prior(), scale or generic_prior(), list(COLLECTIVES)
    b_ref = base.reference_batch_size
    b_ref = b_ref or next((p.reference_batch_size for p in posteriors if p.reference_batch_size is not None), None)
    means, now = np.array([p.mean for p in posteriors]), np.array([p.sd for p in posteriors]) ** -2.0
    log_c, before = means[:, :1].copy(), generic.sd**-2.0
    precision = np.where(now > (1.0 + _LEAST_TAUGHT) * before, now - before, 0.0)
    parted = (means * now - generic.mean * before) / np.maximum(precision, 1e-12)
    means = np.where(precision > 0.0, parted, means)
    # For another reference batch, c grows with it, and values relative to c shrink.
    times = [b_ref / p.reference_batch_size if b_ref and p.reference_batch_size else 1.0 for p in posteriors]
    shift = np.exp(means[:, 2]) * np.log(times)
    means[:, AT.compute] = log_c[:, 0] + shift
    means[:, [AT.floor, AT.once]] -= shift[:, None]
    means[:, collectives] += log_c
    centre = base.mean.copy()
    centre[collectives] += np.mean(means[:, AT.compute]) if scale is None else scale.mean[AT.compute]
    if scale is not None:
        ratios = np.array(gradient_ratios or [None] * len(posteriors), np.float64)[:, None]  # NaN if unknown
        means[:, collectives] += np.log(np.nan_to_num(ratios, nan=1.0))
        precision[:, collectives] *= np.isfinite(ratios)
    mean, sd = _predictive(means, precision, centre, base.sd)
    sd[AT.compute] = max(float(sd[AT.compute]), 0.5)
    if scale is not None:
        mean[AT.compute], sd[AT.compute] = scale.mean[AT.compute], scale.sd[AT.compute]
    mean[collectives] -= mean[AT.compute]
    return StepTimePrior(
        mean,
        sd,
        base.scales,
        "transfer",
        absolute=True,
        reference_batch_size=b_ref,
        in_seconds=COLLECTIVES,
    )


def _predictive(
    means: FloatArray, precision: FloatArray, centre: FloatArray, sd: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the mean and deviation of the next job's parameters, shape (11,) each.

    `means` and `precision`, shape (k, 11), are estimates from k other jobs; `centre` and `sd`, shape (11,), are the
    prior without these estimates.
    """
    usual = np.minimum(_BETWEEN_JOBS_SD, 0.5 * sd)
    informed = precision > 0.0
    own = np.where(informed, 1.0 / np.maximum(precision, 1e-12), 0.0)
    share = informed * usual**2 / (own + usual**2)  # how much of a job a vague estimate counts for
    count = share.sum(axis=0)
    middle = np.sum(share * means, axis=0) / np.maximum(count, 1e-12)
    excess = np.maximum(np.sum(share * ((means - middle) ** 2 - own), axis=0), 0.0)
    between = (_WORTH_OF_BETWEEN_SD * usual**2 + excess) / (_WORTH_OF_BETWEEN_SD + np.maximum(count - 1.0, 0.0))
    weight = np.where(informed, 1.0 / (own + between), 0.0)
    prior_weight = 1.0 / (sd**2 - usual**2)
    prior_weight[AT.compute] = 1e-6  # c has a unit: it is known from jobs of the same network, or not at all
    total = weight.sum(axis=0) + prior_weight
    mean = (np.sum(weight * means, axis=0) + prior_weight * centre) / total
    return mean, np.sqrt(np.where(informed.any(axis=0), between, usual**2) + 1.0 / total)
