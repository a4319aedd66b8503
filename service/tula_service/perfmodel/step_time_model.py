"""Fits the step-time model to a few measurements and predicts the step time of any configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress

import numpy as np
import numpy.typing as npt

from tula_service.perfmodel.intervals import Interval, log_interval
from tula_service.perfmodel.map_fit import Posterior, build_targets, fit_posterior, prior_posterior
from tula_service.perfmodel.paper_form import PaperFit, fit_paper_form
from tula_service.perfmodel.points import FloatArray, ObservationError, PointKey, Points, StepTimeObservations
from tula_service.perfmodel.priors import Priors, StepTimePrior, generic_prior
from tula_service.perfmodel.step_time_form import RUN_NOISE
from tula_service.perfmodel.variants import believed_effect, nearest_for_waits, start_of_variant, switches
from tula_wire.configurations import Configuration, Variant
from tula_wire.enums import Basis, StepTimeForm

_RANGE_TOLERANCE = 1.05
_LEAST_SHARE = 0.01  # of a step; a smaller share is only the time that it takes to get a batch from a full queue
_HIDES_NOTHING = 0.02  # weight of h = 0, which decides if the runs cannot separate loading time from hidden time
_PRIOR_DOF, _PRIOR_SD = 3.0, 0.1
_MOST_ROUNDS = 5


@dataclass(frozen=True)
class InputWait:
    """The time that each step of a variant waits for data.

    A loader takes `s_per_example` seconds (L) for each example. The loader can work during a share `hidden` (h, from 0
    to 1) of the time t - t_input in which the step does not wait. With m b examples per rank and step:

        t_input = max(0, L m b - h (t - t_input))

    A loader in the training process hides no loading time (h = 0); workers that fill a queue can load all the time
    (h = 1). `relative_sd` is the relative error of a wait, and `measured_s` has the measured waits in seconds. If L is
    assumed rather than measured, `unsure_s_per_example` is its uncertainty in seconds per example.
    """

    s_per_example: float
    hidden: float
    relative_sd: float
    measured_s: Mapping[PointKey, float]
    unsure_s_per_example: float = 0.0

    def predict(self, points: Points, rest_s: FloatArray) -> FloatArray:
        """Return the wait in seconds, shape (n,), of steps that take `rest_s` seconds without it.

        If the wait at a point was measured, the measured wait is returned.
        """
        loading = self.s_per_example * points.local_batch_size * points.grad_accum_steps
        waits = np.maximum(loading - self.hidden * rest_s, 0.0)
        measured = [self.measured_s.get(row) for row in points.rows()]
        return np.array([wait if seen is None else seen for wait, seen in zip(waits, measured, strict=True)])

    def sd_s(self, points: Points, rest_s: FloatArray) -> FloatArray:
        """Return the standard deviations of the waits that `predict` returns, shape (n,), in seconds."""
        slower = replace(self, s_per_example=self.s_per_example + self.unsure_s_per_example)
        wait_s = self.predict(points, rest_s)
        return np.hypot(self.relative_sd * wait_s, slower.predict(points, rest_s) - wait_s)

    def with_loader(self, factor: float) -> InputWait:
        """Return the waits for a loader that takes `factor` times as long per example.

        The standard deviation is half of the change, because additional workers shorten only a part of the loading
        time.
        """
        s_per_example = self.s_per_example * factor
        unsure = 0.5 * abs(self.s_per_example - s_per_example)
        return replace(self, s_per_example=s_per_example, measured_s={}, unsure_s_per_example=unsure)


NO_WAIT = InputWait(0.0, 0.0, 0.0, {})


@dataclass(frozen=True)
class StepTimePredictions:
    """Predicted step times in seconds, as columns of shape (n,).

    `mean_s` is the sum of compute, exposed communication and the wait for data. `low_s` and `high_s` are the ends of
    the 90 % interval of a measured step time, including the noise of a run; `known_sd` is the standard deviation of the
    logarithm without this noise. `extrapolated` points are outside the measured range, and `measured` points have been
    profiled.
    """

    mean_s: FloatArray
    low_s: FloatArray
    high_s: FloatArray
    known_sd: FloatArray
    extrapolated: npt.NDArray[np.bool_]
    measured: npt.NDArray[np.bool_]
    compute_s: FloatArray
    comm_s: FloatArray
    exposed_comm_s: FloatArray
    input_s: FloatArray

    def intervals(self) -> tuple[Interval, ...]:
        """Return each prediction as an `Interval`."""
        rows = zip(self.mean_s, self.low_s, self.high_s, strict=True)
        return tuple(Interval(float(mean), float(low), float(high)) for mean, low, high in rows)


@dataclass(frozen=True)
class StepTimeModel:
    """A fitted model of the step time, with the `basis` of its predictions.

    `observations` contains the fitted measurements, one row per configuration. `extremes`, shape (n, 2), has the
    shortest and the longest step time in seconds among the runs of each configuration. `posteriors` has an entry for
    each measured variant, starting with the base variant of the instance type with the most runs. Other variants are
    predicted from their prior or from the nearest measured variant, with `reference_batch_size` unless their prior has
    a reference batch size. `paper_fits` contains the fits of the paper's form if the job selected this form and there
    are enough measurements; all other predictions use the form `overlap`. All fits describe steps without waits for
    data. `input_waits` has the waits by variant; a variant without an entry is assumed to wait like the nearest
    measured variant. `accumulates` is True if any candidate or run has several micro-steps, in which case the
    once-per-step part must be modelled.
    """

    form: StepTimeForm
    basis: Basis
    observations: StepTimeObservations | None
    priors: Priors = field(repr=False)
    posteriors: Mapping[Variant, Posterior] = field(repr=False)
    reference_batch_size: float = field(repr=False)
    extremes: FloatArray = field(default_factory=lambda: np.zeros((0, 2)), repr=False)
    paper_fits: Mapping[Variant, PaperFit | None] = field(default_factory=dict, repr=False)
    interval_scale: float = 1.0
    input_waits: Mapping[Variant, InputWait] = field(default_factory=dict, repr=False)
    accumulates: bool = False
    _unmeasured: dict[Variant, Posterior] = field(default_factory=dict, init=False, repr=False, compare=False)

    def predict(self, configurations: Points | Sequence[Configuration]) -> StepTimePredictions:
        """Return the predicted step times of n configurations with their 90 % intervals."""
        points = Points.of(configurations)
        extrapolated = self._extrapolated(points)
        mean_s, low_s, high_s, known_sd, compute_s, comm_s, input_s = (np.zeros(len(points)) for _ in range(7))
        for variant in set(points.variant):
            at = points.find_rows(variant)
            rows = points.take(at)
            step = (self.paper_fits.get(variant) or self.posterior_for(variant)).predict_step(rows)
            whole_s, wait = np.exp(step.mean), self._input_wait(variant)
            input_s[at] = wait.predict(rows, whole_s)
            mean_s[at] = whole_s + input_s[at]
            wait_sd_s = wait.sd_s(rows, whole_s)
            sd_s = np.hypot(step.sd * self.interval_scale * whole_s, wait_sd_s)
            known_sd[at] = np.hypot(step.known_sd * self.interval_scale * whole_s, wait_sd_s) / mean_s[at]
            low_s[at], high_s[at] = log_interval(mean_s[at], sd_s / mean_s[at], step.dof)
            compute_s[at], comm_s[at] = np.exp(step.compute), np.exp(step.communication)
        compute_s = np.minimum(compute_s, mean_s - input_s)
        seen = set() if self.observations is None else set(self.observations.points.rows())
        measured = np.array([row in seen for row in points.rows()], dtype=np.bool_)
        return StepTimePredictions(
            mean_s=mean_s,
            low_s=low_s,
            high_s=high_s,
            known_sd=np.where(measured, np.minimum(known_sd, RUN_NOISE), known_sd),
            extrapolated=extrapolated,
            measured=measured,
            compute_s=compute_s,
            comm_s=comm_s,
            exposed_comm_s=mean_s - input_s - compute_s,
            input_s=input_s,
        )

    def posterior_for(self, variant: Variant) -> Posterior:
        """Return the posterior of the form `overlap` for a variant; the planner uses its covariance.

        Raises ObservationError if the variant's instance type has neither a measurement nor a prior.
        """
        if (measured := self.posteriors.get(variant)) is not None:
            return measured
        if (earlier := self._unmeasured.get(variant)) is not None:
            return earlier
        name = variant.instance_type
        prior, start = start_of_variant(variant, self.posteriors, self.priors)
        if prior is None:
            raise ObservationError(f"instance type {name!r} has neither a measurement nor a prior; profile it first.")
        of_steps = _of_steps(prior, self.accumulates, self.priors.slow_from.get(name, math.inf))
        posterior = prior_posterior(of_steps, prior.reference_batch_size or self.reference_batch_size, start)
        self._unmeasured[variant] = posterior
        return posterior

    def _input_wait(self, variant: Variant) -> InputWait:
        """Return a variant's waits for data.

        If none were measured, the nearest variant's waits are adapted to this variant's loader.
        """
        start = nearest_for_waits(variant, self.input_waits)
        if start is None:
            return NO_WAIT
        wait = self.input_waits[start]
        faster = sum(believed_effect(switch).loading for switch in switches(start.options, variant.options))
        return wait.with_loader(math.exp(faster)) if faster else wait

    def _extrapolated(self, points: Points) -> npt.NDArray[np.bool_]:
        """Return a mask that marks points outside their variant's measured range and points of unmeasured variants."""
        outside = np.ones(len(points), dtype=np.bool_)
        seen = Points.of([]) if self.observations is None else self.observations.points
        for variant in set(seen.variant):
            at, rows = points.find_rows(variant), seen.find_rows(variant)
            outside[at] = False
            for column in ("num_nodes", "world_size", "local_batch_size"):
                value, measured = getattr(points, column)[at], getattr(seen, column)[rows]
                outside[at] |= (value > measured.max() * _RANGE_TOLERANCE) | (value < measured.min() / _RANGE_TOLERANCE)
        return outside


def fit_step_time(
    observations: StepTimeObservations | None,
    *,
    form: StepTimeForm = "overlap",
    prior: Priors | None = None,
    candidates: Points | Sequence[Configuration] | None = None,
    interval_scale: float = 1.0,
) -> StepTimeModel:
    """Return the fitted step-time model of all measured variants.

    `candidates` determine the largest batch b_ref, so that the generic prior does not change when this batch is
    profiled; they also determine whether the fit requires the once-per-step part. The fit of each variant starts from
    the nearest variant fitted so far, corrected for the difference in hardware and for the effects of the switches
    between the two variants. If `form` is not `overlap`, predictions use the paper's equation 2 once there are enough
    measurements to fit it. Raises ObservationError if there is neither a measurement nor a prior with a scale.
    """
    prior = prior or Priors()
    if observations is None or not len(observations):
        if not prior.believed or not all(believed.absolute for believed in prior.believed.values()):
            raise ObservationError(
                "no step time has been measured; profile one configuration or provide hardware figures."
            )
        return unmeasured_model(prior, candidates, form=form, interval_scale=interval_scale)
    largest = max(_largest_batch(candidates), _largest_batch(observations.points))
    accumulates = _accumulates(candidates) or _accumulates(observations.points)
    if not accumulates:
        observations = replace(observations, optimizer_time_s=np.full(len(observations), np.nan))
    measured = observations.by_variant()
    merged, repeats, extremes = observations.without_waits().merge_repeats()
    rows_by_variant = {variant: merged.points.find_rows(variant) for variant in measured}
    # The variant with the fewest switches from the base comes first; a tie is decided by the number of rows.
    ordered = sorted(measured, key=lambda v: (len(switches(prior.base, v.options)), -rows_by_variant[v].size))
    posteriors: dict[Variant, Posterior] = {}
    paper_fits: dict[Variant, PaperFit | None] = {}
    for variant in ordered:
        believed, start = start_of_variant(variant, posteriors, prior)
        slow_from = prior.slow_from.get(variant.instance_type, math.inf)
        of_steps = _of_steps(believed or generic_prior(), accumulates, slow_from)
        rows = merged.take(rows_by_variant[variant])
        targets = build_targets(rows, repeats[rows_by_variant[variant]], of_steps.scales)
        posteriors[variant] = fit_posterior(targets, of_steps, of_steps.reference_batch_size or largest, start)
        if form != "overlap":
            paper_fits[variant] = fit_paper_form(rows, form)
    # If all profiled runs used one node, a probe of the links is the only source for predictions of several nodes.
    types = {variant.instance_type for variant in posteriors}
    probed = float(observations.points.num_nodes.max()) == 1.0 and prior.probed & types
    return StepTimeModel(
        form=form,
        basis="probed" if probed else "profiled",
        observations=merged,
        priors=prior,
        posteriors=posteriors,
        reference_batch_size=largest,
        extremes=extremes,
        paper_fits=paper_fits,
        interval_scale=interval_scale,
        input_waits={variant: fit_input_wait(measured[variant]) for variant in ordered},
        accumulates=accumulates,
    )


def fit_input_wait(observations: StepTimeObservations) -> InputWait:
    """Return the waits of one variant, fitted to its rows by least squares relative to the step time.

    The fit uses only rows whose measured or predicted wait exceeds `_LEAST_SHARE` of the step. If no measured wait
    exceeds this share, `NO_WAIT` is returned.
    """
    from scipy.optimize import lsq_linear  # imported here because few jobs wait for data

    reported, points = np.isfinite(observations.input_time_s), observations.points
    step_s, input_s = observations.step_time_s[reported], observations.input_time_s[reported]
    share = input_s / step_s
    examples = (points.local_batch_size * points.grad_accum_steps)[reported]
    columns = np.column_stack([examples / step_s, share - 1.0])
    waiting = share > _LEAST_SHARE
    if not waiting.any():
        return NO_WAIT
    scale = float(columns[:, 0].max())
    for _ in range(_MOST_ROUNDS):
        design = np.vstack([columns[waiting] / [scale, 1.0], [0.0, _HIDES_NOTHING]])
        solution = lsq_linear(design, np.append(share[waiting], 0.0), bounds=([0.0, 0.0], [np.inf, 1.0])).x / [
            scale,
            1.0,
        ]
        predicted = np.maximum(columns @ solution, 0.0)
        before, waiting = waiting, waiting | (predicted > _LEAST_SHARE)
        if (before == waiting).all():
            break
    missed = (predicted - share)[waiting] / np.maximum(share[waiting], _LEAST_SHARE)
    dof = _PRIOR_DOF + max(int(waiting.sum()) - 2, 0)
    variance = (_PRIOR_DOF * _PRIOR_SD**2 + float(missed @ missed)) / dof
    measured = dict(zip(compress(points.rows(), reported), input_s.tolist(), strict=True))
    return InputWait(float(solution[0]), float(solution[1]), float(np.sqrt(variance)), measured)


def unmeasured_model(
    prior: Priors,
    candidates: Points | Sequence[Configuration] | None,
    *,
    form: StepTimeForm = "overlap",
    interval_scale: float = 1.0,
) -> StepTimeModel:
    """Return a model without measurements; if its prior has no scale, only its covariances are meaningful."""
    given = prior.believed.values()
    return StepTimeModel(
        form=form,
        basis="transfer" if given and all(p.basis == "transfer" for p in given) else "prior",
        observations=None,
        priors=prior,
        posteriors={},
        reference_batch_size=_largest_batch(candidates),
        interval_scale=interval_scale,
        accumulates=_accumulates(candidates),
    )


def _of_steps(prior: StepTimePrior, accumulates: bool, slow_from: float) -> StepTimePrior:
    of_job = replace(prior, slow_from=slow_from)
    return of_job if accumulates else of_job.without_accumulation()


def _accumulates(configurations: Points | Sequence[Configuration] | None) -> bool:
    """Return True if any configuration has several micro-steps."""
    return float(Points.of(configurations or []).grad_accum_steps.max(initial=1.0)) > 1.0


def _largest_batch(configurations: Points | Sequence[Configuration] | None) -> float:
    return float(Points.of(configurations or []).local_batch_size.max(initial=1.0))
