"""The step-time model that the rest of the service sees: fit it to a few measurements, predict any configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from tula_service.perfmodel.intervals import Interval, log_interval
from tula_service.perfmodel.map_fit import Posterior, fit_posterior, prior_posterior, targets_of
from tula_service.perfmodel.paper_form import PaperFit, fit_paper_form
from tula_service.perfmodel.points import FloatArray, ObservationError, Points, StepTimeObservations
from tula_service.perfmodel.priors import Hardware, Priors, StepTimePrior, generic_prior, prior_from_other_type
from tula_service.perfmodel.reduction import NO_WAIT, InputWait, of_type, reduce_observations
from tula_service.perfmodel.step_time_form import AT
from tula_wire.configurations import Configuration
from tula_wire.enums import Basis, StepTimeForm

_RANGE_TOLERANCE = 1.05


@dataclass(frozen=True)
class StepTimePredictions:
    """Predictions as columns of shape (n,), seconds; compute + exposed communication + waiting for data = mean.

    `low_s` and `high_s` hold 90 % of measured step times, noise included. `extrapolated` points lie outside what was
    measured; `measured` points were profiled themselves.
    """

    mean_s: FloatArray
    low_s: FloatArray
    high_s: FloatArray
    extrapolated: npt.NDArray[np.bool_]
    measured: npt.NDArray[np.bool_]
    compute_s: FloatArray
    comm_s: FloatArray
    exposed_comm_s: FloatArray
    input_s: FloatArray

    def intervals(self) -> tuple[Interval, ...]:
        """The same as one `Interval` per prediction."""
        rows = zip(self.mean_s, self.low_s, self.high_s, strict=True)
        return tuple(Interval(float(mean), float(low), float(high)) for mean, low, high in rows)


@dataclass(frozen=True)
class StepTimeModel:
    """A fitted model of the step time; `basis` is what it rests on.

    `observations` are what was fitted, one row for each configuration, and `extremes`, shape (n, 2), the least and the
    largest step time of its runs in seconds. `posteriors` covers the instance types that were measured, the type with
    most runs first; any other type rests on its prior or on the type measured most, at `reference_batch_size` unless
    that prior names another batch. `paper_fits` holds the paper's form where the job asked for it and enough was
    measured; the form `overlap` makes every other prediction. All of these describe a step without its waits for data.
    `input_waits` adds the waits by instance type; a type without an entry waits like the type that was measured most.
    `accumulates` says that some candidate or run has several micro-steps, so that what comes once a step counts.
    """

    form: StepTimeForm
    basis: Basis
    observations: StepTimeObservations | None
    priors: Priors = field(repr=False)
    posteriors: Mapping[str, Posterior] = field(repr=False)
    reference_batch_size: float = field(repr=False)
    extremes: FloatArray = field(default_factory=lambda: np.zeros((0, 2)), repr=False)
    paper_fits: Mapping[str, PaperFit | None] = field(default_factory=dict, repr=False)
    interval_scale: float = 1.0
    input_waits: Mapping[str, InputWait] = field(default_factory=dict, repr=False)
    accumulates: bool = False

    def predict(self, configurations: Points | Sequence[Configuration]) -> StepTimePredictions:
        """Predicted step times of n configurations with their 90 % intervals."""
        points = Points.of(configurations)
        extrapolated = self._extrapolated(points)
        mean_s, low_s, high_s, compute_s, comm_s, input_s = (np.zeros(len(points)) for _ in range(6))
        for name in set(points.instance_type):
            at = points.rows_of(name)
            rows = points.take(at)
            step = (self.paper_fits.get(name) or self.posterior_for(name)).predict_step(rows)
            whole_s, wait = np.exp(step.mean), of_type(self.input_waits, name, NO_WAIT)
            input_s[at] = wait.predict(rows, whole_s)
            mean_s[at] = whole_s + input_s[at]
            sd_s = np.hypot(step.sd * self.interval_scale * whole_s, wait.relative_sd * input_s[at])
            low_s[at], high_s[at] = log_interval(mean_s[at], sd_s / mean_s[at], step.dof)
            compute_s[at], comm_s[at] = np.exp(step.compute), np.exp(step.communication)
        compute_s = np.minimum(compute_s, mean_s - input_s)
        seen = set() if self.observations is None else set(self.observations.points.rows())
        return StepTimePredictions(
            mean_s=mean_s,
            low_s=low_s,
            high_s=high_s,
            extrapolated=extrapolated,
            measured=np.array([row in seen for row in points.rows()], dtype=np.bool_),
            compute_s=compute_s,
            comm_s=comm_s,
            exposed_comm_s=mean_s - input_s - compute_s,
            input_s=input_s,
        )

    def posterior_for(self, instance_type: str) -> Posterior:
        """The posterior of the form `overlap` for an instance type; planning reads its covariance.

        Raises ObservationError where neither a measurement nor a prior covers the type.
        """
        if (measured := self.posteriors.get(instance_type)) is not None:
            return measured
        if (prior := _believed(instance_type, self.posteriors, self.priors)) is None:
            raise ObservationError(f"instance type {instance_type!r} has no measurement and no prior; profile it.")
        of_steps = _of_steps(prior, self.accumulates, self.priors.slow_from.get(instance_type, math.inf))
        return prior_posterior(of_steps, prior.reference_batch_size or self.reference_batch_size)

    def _extrapolated(self, points: Points) -> npt.NDArray[np.bool_]:
        """Return which points lie outside the box of what was measured on their type: all, where nothing was."""
        outside = np.ones(len(points), dtype=np.bool_)
        seen = Points.of([]) if self.observations is None else self.observations.points
        for name in set(seen.instance_type):
            at, known = points.rows_of(name), seen.rows_of(name)
            outside[at] = False
            for column in ("num_nodes", "world_size", "local_batch_size"):
                value, measured = getattr(points, column)[at], getattr(seen, column)[known]
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
    """Fit the step time of every instance type that was measured.

    `candidates` only sets b_ref (the largest batch in question), which makes the generic prior mean the same before and
    after the largest batch is profiled. A type that was measured less, or not at all, starts from the type that was
    measured most, moved by the difference of their hardware. `form` RING or PARAMETER_SERVER predicts by the paper's
    equation 2 wherever enough was measured to fit it. Raises ObservationError when there is neither a measurement nor a
    prior with a scale.
    """
    prior = prior or Priors()
    if observations is None or not len(observations):
        if not prior.believed or not all(known.absolute for known in prior.believed.values()):
            raise ObservationError("no step time was measured; profile one configuration or give hardware figures.")
        return unmeasured_model(prior, candidates, form=form, interval_scale=interval_scale)
    largest = max(_largest_batch(candidates), _largest_batch(observations.points))
    accumulates = _accumulates(candidates) or _accumulates(observations.points)
    if not accumulates:
        observations = replace(observations, optimizer_time_s=np.full(len(observations), np.nan))
    reduced = reduce_observations(observations)
    posteriors: dict[str, Posterior] = {}
    paper_fits: dict[str, PaperFit | None] = {}
    for name, (rows, repeats) in reduced.by_type.items():
        believed = _believed(name, posteriors, prior) or generic_prior()
        start = _of_steps(believed, accumulates, prior.slow_from.get(name, math.inf))
        targets = targets_of(rows, repeats, start.scales)
        posteriors[name] = fit_posterior(targets, start, start.reference_batch_size or largest)
        if form != "overlap":
            paper_fits[name] = fit_paper_form(rows, form)
    # Where only a probe of the links tells of several nodes, the predictions rest on that probe.
    probed = float(observations.points.num_nodes.max()) == 1.0 and prior.probed & set(posteriors)
    return StepTimeModel(
        form=form,
        basis="probed" if probed else "profiled",
        observations=reduced.merged,
        priors=prior,
        posteriors=posteriors,
        reference_batch_size=largest,
        extremes=reduced.extremes,
        paper_fits=paper_fits,
        interval_scale=interval_scale,
        input_waits=reduced.input_waits,
        accumulates=accumulates,
    )


def unmeasured_model(
    prior: Priors,
    candidates: Points | Sequence[Configuration] | None,
    *,
    form: StepTimeForm = "overlap",
    interval_scale: float = 1.0,
) -> StepTimeModel:
    """Return the model without data. Without a scale its times mean nothing; planning reads its covariance."""
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


def _believed(name: str, posteriors: Mapping[str, Posterior], priors: Priors) -> StepTimePrior | None:
    """Return the prior of a type: the runs on the type measured most, unless earlier jobs know the scale better."""
    own = priors.believed.get(name)
    if not posteriors:
        return own
    most, measured = next(iter(posteriors.items()))
    hardware = (priors.hardware.get(each, Hardware()) for each in (most, name))
    carried = prior_from_other_type(measured.as_prior(), *hardware)
    return own if own is not None and own.absolute and own.sd[AT.compute] < carried.sd[AT.compute] else carried


def _of_steps(prior: StepTimePrior, accumulates: bool, slow_from: float) -> StepTimePrior:
    of_job = replace(prior, slow_from=slow_from)
    return of_job if accumulates else of_job.without_accumulation()


def _accumulates(configurations: Points | Sequence[Configuration] | None) -> bool:
    """True where some configuration has several micro-steps."""
    return float(Points.of(configurations or []).grad_accum_steps.max(initial=1.0)) > 1.0


def _largest_batch(configurations: Points | Sequence[Configuration] | None) -> float:
    return float(Points.of(configurations or []).local_batch_size.max(initial=1.0))
