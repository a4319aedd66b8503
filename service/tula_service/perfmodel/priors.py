"""Computes priors of the step-time parameters: a generic prior, or priors from hardware figures or earlier jobs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from tula_service.perfmodel.points import FloatArray, ObservationError, column
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
UNKNOWN_PRECISION_SD = 0.8  # root of the sum of the three variances in `scale_from_jobs`
_LINK_SHARE = 0.5
_BYTES_PER_PARAMETER = 4.0
_ALL_REDUCE_VOLUMES = 2.0
_LOG_BEND_OF_A_SUM = -3.0
_UNKNOWN_TFLOPS, _UNKNOWN_GB_PER_S, _UNKNOWN_DEVICE_SD = 20.0, 900.0, 1.0
_UNKNOWN_GBPS = 10.0
_BETWEEN_JOBS_SD = 0.25
_TAUGHT_CLUSTERS = 2
_LEAST_TAUGHT = 0.05  # share of the generic prior's precision; a smaller gain may be only a rounding difference
_WORTH_OF_BETWEEN_SD = 2.0  # number of jobs whose weight equals that of the usual spread between jobs
_BETWEEN_TYPES_SD, _UNKNOWN_TYPE_SD = 0.5, 1.0
_EVERYWHERE_SD, _DEVICE_SD, _NETWORK_SD = 0.5, 0.4, 0.5  # of log(c / guess)
_WORTH_OF_NETWORK_SD = 6.0  # number of jobs whose weight equals that of the prior of _NETWORK_SD
_BELIEVED_SDS = 4.0
_OF_ARITHMETIC, _OF_ACTIVATIONS, _OF_PARAMETERS = 0.634, 18.5, 30.7
"""The factors on arithmetic, activations and parameters in the roofline.

They were fitted to timm's table (Apache-2.0: 765 rows, one RTX 3090 with AMP) and to the tables of Lambda, TensorFlow,
DLPerf and mxnet-finetuner (BSD-3-Clause, Apache-2.0: eleven devices). They were scored by leaving out each network or
device.
"""
_OF_ACTIVATIONS_ALONE = 16.2
"""The factor on activations in half precision if the bytes that convolutions convert are counted separately.

It was fitted to timm's rows in two layouts, with the other two factors unchanged. The result is the same if any one
family of networks is left out.
"""
FLOOR_S: Final = 0.03
"""The seconds of launches and the optimizer on any accelerator, used if operations were not counted.

Batch sweeps on one device in the tables of Pollux and DLPerf (Apache-2.0) have floors of 7 to 215 ms, around 30. No
table has small batches on other classes of devices.
"""
LAUNCH_S: Final = 30e-6
"""The seconds in which a host launches one operation in PyTorch without compilation, used if no probe timed it.

On an H100, steps of 8 examples took 23 to 50 us per counted operation.
"""
_LOG_BEND_OF_A_QUEUE: Final = math.log(3.0)
"""The logarithm of h - 1 for h = 4, with which the longer time dominates, as when a host queues operations for a
computing device.
"""


@dataclass(frozen=True)
class StepTimePrior:
    """A Gaussian prior of the parameters of the form `overlap`, in the order and encoding of `step_time_form`.

    `absolute` is True if the prior includes c; otherwise, a fit requires at least one measurement.
    `reference_batch_size` is b_ref; None means the largest batch among the candidates and runs. `in_seconds` lists the
    entries whose prior is in seconds although they are relative to c in the form; the `sd` of such an entry is the
    standard deviation of log(entry * c). `slow_from` is the smallest local batch at which convolutions are slower.
    `covariance`, shape (11, 11), has the squares of `sd` on its diagonal; None stands for independent parameters.
    """

    mean: FloatArray
    sd: FloatArray
    scales: ResidualScales = field(default_factory=ResidualScales)
    basis: Basis = "prior"
    absolute: bool = False
    reference_batch_size: float | None = None
    in_seconds: tuple[int, ...] = ()
    slow_from: float = math.inf
    covariance: FloatArray | None = None

    def __post_init__(self) -> None:
        """Raise ObservationError unless `mean` is finite, and `sd` is positive and consistent with `covariance`."""
        object.__setattr__(self, "mean", column("prior mean", self.mean, NUM_PARAMETERS))
        object.__setattr__(self, "sd", column("prior sd", self.sd, NUM_PARAMETERS, above=0.0))
        if self.covariance is not None and not np.allclose(np.diag(self.covariance), self.sd**2):
            raise ObservationError(
                "the diagonal of the prior covariance must equal the squares of the prior standard deviations."
            )

    @property
    def precision(self) -> FloatArray:
        """Return the inverse of theta's covariance, shape (11, 11)."""
        transform = to_seconds(self.in_seconds)
        if self.covariance is None:
            return np.asarray(transform.T @ (transform / self.sd[:, None] ** 2))
        return np.asarray(transform.T @ np.linalg.inv(self.covariance) @ transform)

    def widened(self, sd: FloatArray) -> StepTimePrior:
        """Return this prior with additional independent errors, given their standard deviations, shape (11,)."""
        covariance = None if self.covariance is None else self.covariance + np.diag(sd**2)
        return replace(self, sd=np.hypot(self.sd, sd), covariance=covariance)

    def without_accumulation(self) -> StepTimePrior:
        """Return this prior for a job whose steps never accumulate gradients.

        The compute of its steps includes the once-per-step part, since no measurement can separate the two.
        """
        mean, sd, covariance = self.mean.copy(), self.sd.copy(), self.covariance
        mean[AT.once], sd[AT.once] = ABSENT, _ABSENT_SD
        if covariance is not None:
            covariance = covariance.copy()
            covariance[AT.once], covariance[:, AT.once] = 0.0, 0.0
            covariance[AT.once, AT.once] = _ABSENT_SD**2
        return replace(self, mean=mean, sd=sd, covariance=covariance)


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a network that can be determined without running it.

    `flops_per_sample` is the number of floating-point operations of one forward pass, with a multiplication and an
    addition counted as two. `activation_bytes_per_sample` is the number of bytes per sample that one device keeps for
    the backward pass, and `parameter_bytes` is the size of the parameters on one device in single precision. `flops_sd`
    is the uncertainty of log compute time due to guessed counts, and 0 if nothing was guessed. `rule_sd` is the
    remaining error of the roofline in log compute time, which is larger if the precision is unknown. `volumes` is the
    number of times that the bytes of the parameters cross a link per step: two for an all-reduce, or for a
    reduce-scatter and an all-gather; three if the backward pass gathers the parameters again. `idle_samples` expresses
    the idle time of a pipeline as a number of examples: with m micro-batches and p stages, a step takes the time of m +
    p - 1 micro-batches. `operations` is the number of operations that start a kernel in each micro-step, or None if
    they were not counted. `transposed_bytes_per_sample` is the number of bytes of a sample's images that convolutions
    in half precision read and write to change the memory layout, or None for single precision or if they were not
    counted.
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
        """Raise ObservationError unless the counts of parameters and FLOPs are positive and finite."""
        for name in ("parameter_count", "flops_per_sample"):
            column(name, [getattr(self, name)], above=0.0)


@dataclass(frozen=True)
class Hardware:
    """The hardware figures of an instance type; None means that a figure is unknown.

    `peak_tflops` (teraflop per second) and `memory_gb_per_s` (gigabytes per second) describe the device of one rank,
    and `figures_sd` is the uncertainty of their logarithms, which is 0 for figures from a data sheet. `inter_node_gbps`
    is the network bandwidth in gigabits per second. Equal devices have the same name in `device`. `launch_s` is the
    time in seconds that the host needs to start an operation, if a probe measured this time.
    """

    peak_tflops: float | None = None
    inter_node_gbps: float | None = None
    memory_gb_per_s: float | None = None
    figures_sd: float = 0.0
    device: str = ""
    launch_s: float | None = None

    @property
    def device_sd(self) -> float:
        """Return the uncertainty of the device's log speed, which is larger if the peak is unknown."""
        return _UNKNOWN_DEVICE_SD if self.peak_tflops is None else self.figures_sd


@dataclass(frozen=True)
class Priors:
    """The priors of a job's instance types before the job has runs.

    `believed` has the prior of each type; a type without an entry starts from the generic prior. The fit uses
    `hardware` to transfer measurements from one type to a type without measurements. `probed` lists the types for which
    a probe has measured the links between nodes. `slow_from` is the smallest local batch of each type at which
    convolutions are slower. `base` has the first value of each option, to which the priors in `believed` apply.
    """

    believed: Mapping[str, StepTimePrior] = field(default_factory=dict)
    hardware: Mapping[str, Hardware] = field(default_factory=dict)
    probed: frozenset[str] = frozenset()
    slow_from: Mapping[str, float] = field(default_factory=dict)
    base: Options = ()


def generic_prior() -> StepTimePrior:
    """Return the prior of any synchronous data-parallel job, derived from 43 grids of measured step times.

    Means and standard deviations were chosen for a low error of held-out predictions on grids from Pollux (Apache-2.0),
    Gavel (MIT), ElasticFlow, DLPerf and TensorFlow's benchmarks (Apache-2.0), and then rounded. On average, the floor
    is a third of the compute at the largest batch, the collective takes 4 % of the compute time for two ranks of a node
    and 30 % for two nodes, and about a third of the communication that could overlap does not overlap. The
    once-per-step part is 3 % of the compute; this value comes from measurements of gradient accumulation that are not
    part of the repository.
    """
    return StepTimePrior(
        mean=np.array(
            [0.0, math.log(0.31), -0.04, -0.7, math.log(0.037), 0.38, math.log(0.3), 0.38, -0.09, -1.1, math.log(0.03)]
        ),
        sd=np.array([_UNKNOWN_SCALE_SD, 1.2, 0.09, 1.3, 1.1, 0.39, 1.4, 0.21, 0.29, 1.1, 1.2]),
    )


def prior_from_hardware(facts: ModelFacts, hardware: Hardware, *, reference_batch_size: float) -> StepTimePrior:
    """Return a prior with a compute scale (basis `prior`) for a job without runs.

    The compute time of a step on one device comes from a roofline, which is accurate to a factor of about 1.3:

        t(b) = b (arithmetic 3 F / peak + (activations A + X) / W) + parameters P / W + floor

    If the operations of a step were counted, the compute time is instead (g^4 + l^4)^(1/4), where g is the part
    proportional to b, and l is the sum of the term with P and the time of `operations` launches. F is the number of
    FLOPs per sample of one forward pass, A the bytes per sample that are kept for the backward pass, X the bytes per
    sample that are moved because convolutions in half precision change the memory layout of images, P the bytes of the
    parameters, and W the memory bandwidth. Between nodes, s_inter = volumes * (1 - 1/2) * gradient bytes * 8 / (0.5 *
    bandwidth) / c, for a ring of two nodes. An unknown hardware figure is replaced by a guess, which makes c less
    certain.
    """
    base = generic_prior()
    b_ref = float(column("reference_batch_size", [reference_batch_size], above=0.0)[0])
    peak, bandwidth = hardware.peak_tflops or _UNKNOWN_TFLOPS, hardware.memory_gb_per_s or _UNKNOWN_GB_PER_S
    # All terms are logarithms, because a job may specify any finite number of FLOPs, and ratios could underflow.
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
    """The error of the prior from hardware figures for one job, at the job's reference batch size.

    `log_ratio` is log(fitted c / c of `prior_from_hardware`), and 0 before a fit. `sd` is the uncertainty of this ratio
    due to guessed FLOPs and to the uncertainty of the fitted c. `device_sd` is the uncertainty due to the figures of
    `device` (`Hardware.device_sd`), and `rule_sd` the uncertainty of the roofline.
    """

    log_ratio: float
    device: str
    sd: float = 0.0
    device_sd: float = 0.0
    rule_sd: float = UNKNOWN_PRECISION_SD


@dataclass(frozen=True)
class Lesson:
    """A result of a job: the posterior of a network's runs on one instance type, and the facts about the network."""

    learned: StepTimePrior
    facts: ModelFacts
    hardware: Hardware

    @property
    def scale_error(self) -> ScaleError:
        """Return the error of the prior from hardware figures, relative to the posterior of the runs."""
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
    """The results of earlier jobs, grouped by their similarity to a new job.

    `same_network` and `other_networks` are from runs on the new job's hardware, by instance type. The prior of another
    network is paired with the ratio of the new job's parameter count to the network's count, or with None if one of the
    two is unknown. `other_hardware` is from runs of the same network on hardware that the new job does not have.
    `scales` is from runs of any network on any hardware.
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
    """Return the prior of a network on the instance type `name`, or None if the generic prior should be used.

    `hardware` has all instance types of the job. `measured` is True if the job has runs. The job's own runs determine
    its scale better than other jobs do, so if `measured` is True, the result is None unless earlier jobs ran on the
    same hardware. `measured_clusters` is the number of cluster sizes of this type that have runs. If there are three or
    more, the collectives of other networks are ignored, because predictions are better without them.
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
    # Of two kinds of guesses, the most certain one is used: the same network on other hardware, scaled by the ratio of
    # the hardware figures, or this hardware's figures, corrected by the speed of earlier jobs. A run on hardware of
    # uncertain speed predicts a device less accurately than the device's data sheet.
    scale = min((guess, *moved), key=lambda prior: float(prior.sd[AT.compute]))
    if scale is guess:
        error = ScaleError(0.0, hardware[name].device, facts.flops_sd, hardware[name].device_sd, facts.rule_sd)
        scale = scale_from_jobs(guess, error, () if measured else [lesson.scale_error for lesson in lessons.scales])
    else:
        scale = replace(scale, basis="prior")  # the basis is `transfer` only for earlier jobs on the same hardware
    if related is None:
        return scale
    learned, ratios = zip(*related, strict=True)
    return prior_from_jobs(learned, scale=scale, gradient_ratios=ratios)


def scale_from_jobs(guess: StepTimePrior, error: ScaleError, earlier: Sequence[ScaleError]) -> StepTimePrior:
    """Return `guess`, with its compute scale corrected by the errors of the corresponding guesses for earlier jobs.

    `guess` is a result of `prior_from_hardware`, and `error` describes its uncertainty. The correction log(c / guess)
    is the sum of three effects: the effect of a team's framework, precision and kernels on all networks, their
    additional effect on one device, and the effect of the network. The first two have a normal prior around 0, with
    standard deviations of 0.5 and 0.4; `device_sd` is added to the second. The standard deviation of the third is
    estimated from the jobs, starting from 0.5. The standard deviation of the sum is proportional to the `rule_sd` of
    the guess. Those of the first two effects are proportional to its square, because the errors of a rule that includes
    precision and memory traffic have less in common.

    Jobs with a larger `rule_sd` have less weight. `earlier` must contain each network at most once per device, since a
    repetition would be treated as confirmation by another job. A job whose error exceeds four standard deviations is
    ignored, because its description is probably wrong, for example with FLOPs in another unit. The standard deviations
    come from step times of six networks on eight devices in two precisions (Lambda's TensorFlow benchmark,
    BSD-3-Clause).
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
    from sklearn.linear_model import BayesianRidge  # imported here because the import takes half a second

    devices = [error.device, *sorted({job.device for job in usable} - {error.device})]
    same = np.array([[job.device == device for device in devices] for job in usable])
    on = np.hypot(on_device_sd, [job.device_sd for job in usable])
    parts = np.column_stack([np.full(len(usable), everywhere_sd), on[:, None] * same])
    own = [job.sd**2 + max(job.rule_sd**2 - error.rule_sd**2, 0.0) for job in usable]
    certainty = network_sd**2 / (network_sd**2 + np.array(own))
    # Each column is multiplied by its standard deviation, so the weights have a standard deviation of 1. Since
    # lambda_1 and lambda_2 have the weight of 1e6 jobs, lambda stays at 1.
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
    mean[[AT.floor, AT.intra, AT.inter]] -= shift[0]  # they are relative to c; their seconds stay the same
    sd[AT.compute] = math.hypot(float(spread[0]), error.sd)
    return replace(guess, mean=mean, sd=sd)


def prior_from_other_type(learnt: StepTimePrior, measured: Hardware, other: Hardware) -> StepTimePrior:
    """Return the prior of a network on one instance type, given its runs on another type (basis `transfer`).

    The shape of the step-time curve is kept. If W is the memory bandwidth of a device and L the bandwidth of a link,
    then c' = c W / W', a' = a c / c' and s' = s (c / c') (L / L'). The memory bandwidth is used because step times
    correlate with it more closely than with the arithmetic peak, since each generation of devices reaches a different
    share of its peak. If a figure of either type is unknown, the means do not change and c is less certain. Uncertain
    figures also make c less certain.
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
    """Return the prior of the next job (basis `transfer`), given the posteriors of k earlier jobs on the same hardware.

    Each posterior (`Posterior.without_prior`) includes the generic prior, which is divided out before the posteriors
    are combined, so that a job does not contribute to parameters that it did not measure. The next job is assumed to
    differ from the earlier jobs as much as these differ from one another, so its standard deviation is sqrt(between^2 +
    own^2 / k), which is larger than the error of the mean of the earlier jobs. Collectives are transferred in seconds.

    The compute scale c is specific to one network. If `scale` (from `prior_from_hardware`) is given, the earlier jobs
    used other networks, c comes from `scale`, and collectives are transferred as seconds per gradient byte, c s / (4
    P). Otherwise, the earlier jobs used the same network and determine c. For each posterior, `gradient_ratios` has the
    ratio of the next job's parameter count to the earlier job's parameter count; a job whose ratio is None does not
    contribute to the collectives. Parameters to which no job contributes come from `scale` or, if it is not given, from
    the generic prior.
    """
    generic, base, collectives = generic_prior(), scale or generic_prior(), list(COLLECTIVES)
    b_ref = base.reference_batch_size
    b_ref = b_ref or next((p.reference_batch_size for p in posteriors if p.reference_batch_size is not None), None)
    means, now = np.array([p.mean for p in posteriors]), np.array([p.sd for p in posteriors]) ** -2.0
    log_c, before = means[:, :1].copy(), generic.sd**-2.0
    precision = np.where(now > (1.0 + _LEAST_TAUGHT) * before, now - before, 0.0)
    parted = (means * now - generic.mean * before) / np.maximum(precision, 1e-12)
    means = np.where(precision > 0.0, parted, means)
    # c increases with the reference batch, and values relative to c decrease.
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
    """Return the mean and the standard deviation of the next job's parameters, shape (11,) each.

    `means` and `precision`, shape (k, 11), are estimates from k earlier jobs; `centre` and `sd`, shape (11,), are the
    prior without these estimates.
    """
    usual = np.minimum(_BETWEEN_JOBS_SD, 0.5 * sd)
    informed = precision > 0.0
    own = np.where(informed, 1.0 / np.maximum(precision, 1e-12), 0.0)
    share = informed * usual**2 / (own + usual**2)  # weight of an estimate, less than 1 if it is uncertain
    count = share.sum(axis=0)
    middle = np.sum(share * means, axis=0) / np.maximum(count, 1e-12)
    excess = np.maximum(np.sum(share * ((means - middle) ** 2 - own), axis=0), 0.0)
    between = (_WORTH_OF_BETWEEN_SD * usual**2 + excess) / (_WORTH_OF_BETWEEN_SD + np.maximum(count - 1.0, 0.0))
    weight = np.where(informed, 1.0 / (own + between), 0.0)
    prior_weight = 1.0 / (sd**2 - usual**2)
    prior_weight[AT.compute] = 1e-6  # c has a unit, so only jobs of the same network determine it
    total = weight.sum(axis=0) + prior_weight
    mean = (np.sum(weight * means, axis=0) + prior_weight * centre) / total
    return mean, np.sqrt(np.where(informed.any(axis=0), between, usual**2) + 1.0 / total)
