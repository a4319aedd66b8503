"""The step-time model that the rest of the service sees: fit it to a few measurements, predict any configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tula_service.perfmodel.intervals import Interval, log_interval
from tula_service.perfmodel.map_fit import (
    Posterior,
    fit_posterior,
    merge_repeats,
    prior_posterior,
    targets_of,
)
from tula_service.perfmodel.paper_form import PaperFit, fit_paper_form
from tula_service.perfmodel.points import FloatArray, ObservationError, PointKey, Points, StepTimeObservations
from tula_service.perfmodel.priors import Hardware, Priors, StepTimePrior, generic_prior, prior_from_other_type
from tula_service.perfmodel.step_time_form import AT
from tula_wire.configurations import Configuration
from tula_wire.enums import Basis, StepTimeForm

V = TypeVar("V")

_RANGE_TOLERANCE = 1.05
_LEAST_SHARE = 0.01  # of a step: below it, a wait is that of taking a batch from a full queue
_HIDES_NOTHING = 0.02  # how strongly, where the runs do not tell loading from hiding
_LEAST_REST = 0.02  # of a step
_PRIOR_DOF, _PRIOR_SD = 3.0, 0.1
_MOST_ROUNDS = 5


@dataclass(frozen=True)
class StepTimePredictions:
    """Predictions as columns of shape (n,), seconds; compute + exposed communication + waiting for data = mean.

    `low_s` and `high_s` hold 90 % of measured step times, noise included. `extrapolated`: outside what was measured.
    `measured`: profiled itself.
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
class InputWait:
    """How long a step waits for data: a loader needs so long for each example, and a share of the step's rest hides it.

        t_input = max(0, L m b - h (t - t_input))        m b examples of a rank a step; 0 <= h <= 1

    A loader in the training process hides nothing (h = 0), workers that fill a queue hide up to all of the rest
    (h = 1). Of one instance type: L in seconds, h, the relative error of a wait, and the waits that were measured, s.
    """

    s_per_example: float
    hidden: float
    relative_sd: float
    measured_s: Mapping[PointKey, float]

    def predict(self, points: Points, rest_s: FloatArray) -> FloatArray:
        """Seconds of waiting, shape (n,), in steps that take `rest_s` without; as measured where it was."""
        loading = self.s_per_example * points.local_batch_size * points.grad_accum_steps
        waits = np.maximum(loading - self.hidden * rest_s, 0.0)
        known = [self.measured_s.get(row) for row in points.rows()]
        return np.array([wait if seen is None else seen for wait, seen in zip(waits, known, strict=True)])


_NO_WAIT = InputWait(0.0, 0.0, 0.0, {})


@dataclass(frozen=True)
class StepTimeModel:
    """A fitted model. `basis` is what it rests on. `observations` are what was fitted, one row for each configuration,
    and `extremes` the least and the largest step time of its runs, s, shape (n, 2).

    `posteriors` are of the instance types that were measured, that with most runs first; others have what is believed
    of them at `reference_batch_size`, unless a prior says another. `paper_fits` holds the paper's form where the job
    asked for it and enough was measured; every other prediction is that of the form `overlap`. All of these are of the
    step without its waits for data, which `input_waits` adds: by instance type, an unmeasured one as that which was
    measured most. The fits repeat the whole compute of a step with each micro-step, so predictions are less by the
    `optimizer_s` that are not repeated, by type like the waits.
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
    optimizer_s: Mapping[str, float] = field(default_factory=dict, repr=False)

    def predict(self, configurations: Points | Sequence[Configuration]) -> StepTimePredictions:
        """Predicted step times of n configurations with their 90 % intervals."""
        points = Points.of(configurations)
        mean_s, low_s, high_s, compute_s, comm_s, input_s = (np.zeros(len(points)) for _ in range(6))
        for name in set(points.instance_type):
            at = points.rows_of(name)
            rows = points.take(at)
            step = (self.paper_fits.get(name) or self.posterior_for(name)).predict_step(rows)
            whole_s, computing_s, micro_steps = np.exp(step.mean), np.exp(step.compute), rows.grad_accum_steps
            once_s = np.minimum(_of_type(self.optimizer_s, name, 0.0), computing_s / micro_steps)
            repeated_s = (micro_steps - 1.0) * once_s
            wait = _of_type(self.input_waits, name, _NO_WAIT)
            input_s[at] = wait.predict(rows, whole_s - repeated_s)
            mean_s[at] = whole_s - repeated_s + input_s[at]
            sd_s = np.hypot(step.sd * self.interval_scale * whole_s, wait.relative_sd * input_s[at])
            low_s[at], high_s[at] = log_interval(mean_s[at], sd_s / mean_s[at], step.dof)
            compute_s[at], comm_s[at] = computing_s - repeated_s, np.exp(step.communication)
        compute_s = np.minimum(compute_s, mean_s - input_s)
        seen = set() if self.observations is None else set(self.observations.points.rows())
        return StepTimePredictions(
            mean_s=mean_s,
            low_s=low_s,
            high_s=high_s,
            extrapolated=self._extrapolated(points),
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
        return prior_posterior(prior, prior.reference_batch_size or self.reference_batch_size)

    def _extrapolated(self, points: Points) -> npt.NDArray[np.bool_]:
        """Outside the box of what was measured on that instance type, or across nodes when nothing was."""
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
    after the largest batch is profiled. A type that was measured less, or not at all, starts from the one that was
    measured most, moved by what the hardware of the two differs in. `form` RING or PARAMETER_SERVER predicts by the
    paper's equation 2 wherever enough was measured to fit it. Raises ObservationError when there is neither a
    measurement nor a prior with a scale.
    """
    prior = prior or Priors()
    if observations is None or not len(observations):
        if not prior.believed or not all(known.absolute for known in prior.believed.values()):
            raise ObservationError("no step time was measured; profile one configuration or give hardware figures.")
        return unmeasured_model(prior, candidates, form=form, interval_scale=interval_scale)
    largest = max(_largest_batch(candidates), _largest_batch(observations.points))
    optimizer_s = _optimizer_s(observations)
    merged, repeats, extremes = merge_repeats(_as_counted(observations, optimizer_s))
    measured = merged.points
    counts = Counter(sorted(measured.instance_type))
    by_count = sorted(counts, key=lambda name: -counts[name])
    posteriors: dict[str, Posterior] = {}
    paper_fits: dict[str, PaperFit | None] = {}
    input_waits: dict[str, InputWait] = {}
    for name in by_count:
        start = _believed(name, posteriors, prior) or generic_prior()
        rows = measured.rows_of(name)
        targets = targets_of(merged.take(rows), repeats[rows], start.scales)
        posteriors[name] = fit_posterior(targets, start, start.reference_batch_size or largest)
        input_waits[name] = fit_input_wait(observations.take(observations.points.rows_of(name)))
        if form != "overlap":
            paper_fits[name] = fit_paper_form(merged.take(rows), form)
    # Where all that is known of several nodes is a probe of their links, the predictions rest on that.
    probed = float(measured.num_nodes.max()) == 1.0 and prior.probed & set(posteriors)
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
        input_waits=input_waits,
        optimizer_s=optimizer_s,
    )


def fit_input_wait(observations: StepTimeObservations) -> InputWait:
    """Least squares, relative to the step, over the rows of one type that wait or would."""
    from scipy.optimize import lsq_linear  # imported on use: few jobs wait for data

    reported = observations.take(np.isfinite(observations.input_time_s))
    points, step_s = reported.points, reported.step_time_s
    share = reported.input_time_s / step_s
    columns = np.column_stack([points.local_batch_size * points.grad_accum_steps / step_s, share - 1.0])
    waiting = share > _LEAST_SHARE
    if not waiting.any():
        return _NO_WAIT
    scale = float(columns[:, 0].max())
    for _ in range(_MOST_ROUNDS):
        known = np.vstack([columns[waiting] / [scale, 1.0], [0.0, _HIDES_NOTHING]])
        found = lsq_linear(known, np.append(share[waiting], 0.0), bounds=([0.0, 0.0], [np.inf, 1.0])).x / [scale, 1.0]
        predicted = np.maximum(columns @ found, 0.0)
        before, waiting = waiting, waiting | (predicted > _LEAST_SHARE)
        if (before == waiting).all():
            break
    missed = (predicted - share)[waiting] / np.maximum(share[waiting], _LEAST_SHARE)
    dof = _PRIOR_DOF + max(int(waiting.sum()) - 2, 0)
    variance = (_PRIOR_DOF * _PRIOR_SD**2 + float(missed @ missed)) / dof
    measured = dict(zip(points.rows(), reported.input_time_s.tolist(), strict=True))
    return InputWait(float(found[0]), float(found[1]), float(np.sqrt(variance)), measured)


def _optimizer_s(observations: StepTimeObservations) -> dict[str, float]:
    """Seconds of an optimizer's step by measured type: the median over the runs that report it, of most runs first.

    A type that reports none takes that of most runs, as an unmeasured one does; 0 where no run reports it.
    """
    known = observations.take(np.isfinite(observations.optimizer_time_s))
    rows = {name: known.points.rows_of(name) for name in sorted(set(known.points.instance_type))}
    by_count = sorted(rows, key=lambda name: -len(rows[name]))
    found = {name: float(np.median(known.optimizer_time_s[rows[name]])) for name in by_count}
    return {name: _of_type(found, name, 0.0) for name in dict.fromkeys([*found, *observations.points.instance_type])}


def _of_type(by_type: Mapping[str, V], name: str, otherwise: V) -> V:
    """What is known of a type; of one of which nothing is, what is known of the first: of the one measured most."""
    return by_type.get(name, next(iter(by_type.values()), otherwise))


def _as_counted(observations: StepTimeObservations, optimizer_s: Mapping[str, float]) -> StepTimeObservations:
    """The runs as the forms count them: no step waits for data, and the optimizer steps with each micro-step.

    What is known less surely than the whole step was measured says so.
    """
    each_s = np.array([optimizer_s[name] for name in observations.points.instance_type])
    added_s = (observations.points.grad_accum_steps - 1.0) * each_s
    rest_s = observations.step_time_s - np.nan_to_num(observations.input_time_s)
    step_s = np.maximum(rest_s, _LEAST_REST * observations.step_time_s) + added_s
    return replace(
        observations,
        step_time_s=step_s,
        relative_sd=observations.relative_sd * observations.step_time_s / step_s,
        compute_time_s=observations.compute_time_s + added_s,
    )


def unmeasured_model(
    prior: Priors,
    candidates: Points | Sequence[Configuration] | None,
    *,
    form: StepTimeForm = "overlap",
    interval_scale: float = 1.0,
) -> StepTimeModel:
    """The model of no data. With a prior that knows no scale its times mean nothing; planning reads its covariance."""
    given = prior.believed.values()
    return StepTimeModel(
        form=form,
        basis="transfer" if given and all(p.basis == "transfer" for p in given) else "prior",
        observations=None,
        priors=prior,
        posteriors={},
        reference_batch_size=_largest_batch(candidates),
        interval_scale=interval_scale,
        optimizer_s={name: each.optimizer_s for name, each in prior.believed.items()},
    )


def _believed(name: str, posteriors: Mapping[str, Posterior], priors: Priors) -> StepTimePrior | None:
    """The prior of a type: this job's own runs on the type measured most, unless earlier jobs know the scale better."""
    own = priors.believed.get(name)
    if not posteriors:
        return own
    most, measured = next(iter(posteriors.items()))
    hardware = (priors.hardware.get(each, Hardware()) for each in (most, name))
    carried = prior_from_other_type(measured.as_prior(), *hardware)
    return own if own is not None and own.absolute and own.sd[AT.compute] < carried.sd[AT.compute] else carried


def _largest_batch(configurations: Points | Sequence[Configuration] | None) -> float:
    return float(Points.of(configurations or []).local_batch_size.max(initial=1.0))
