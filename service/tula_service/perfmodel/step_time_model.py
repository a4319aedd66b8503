"""The step-time model that the rest of the service sees: fit it to a few measurements, predict any configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from tula_service.domain import Basis, Collective
from tula_service.perfmodel.intervals import Interval, log_interval
from tula_service.perfmodel.map_fit import Posterior, fit_posterior, merge_repeats, prior_posterior, statements
from tula_service.perfmodel.paper_form import BaselineFit, fit_baseline
from tula_service.perfmodel.points import FloatArray, ObservationError, Points, StepTimeObservations
from tula_service.perfmodel.priors import Priors, StepTimePrior, generic_prior, prior_from_other_type
from tula_service.perfmodel.residual_gp import HYPOTHESES, Hypothesis
from tula_service.perfmodel.step_time_form import PARAMETERS, log_terms
from tula_wire.configurations import Configuration

_RANGE_TOLERANCE = 1.05


class Form(str, Enum):
    """Which equation is fitted; the paper's two are baselines."""

    PHYSICAL = "physical"
    RING = "ring"
    PARAMETER_SERVER = "parameter_server"


@dataclass(frozen=True)
class StepTimePredictions:
    """Predictions as columns of shape (n,), seconds; compute + exposed communication = mean.

    `log_sd` is the standard deviation of log step time, measurement noise included; `low_s` and `high_s` hold a
    measured step time with the level asked for. `extrapolated`: outside what was measured. `measured`: profiled itself.
    """

    configurations: Points
    mean_s: FloatArray
    low_s: FloatArray
    high_s: FloatArray
    log_sd: FloatArray
    extrapolated: npt.NDArray[np.bool_]
    measured: npt.NDArray[np.bool_]
    compute_s: FloatArray
    comm_s: FloatArray
    exposed_comm_s: FloatArray

    def __len__(self) -> int:
        """Number of predictions."""
        return len(self.configurations)

    def intervals(self) -> tuple[Interval, ...]:
        """The same as one `Interval` per prediction."""
        rows = zip(self.mean_s, self.low_s, self.high_s, strict=True)
        return tuple(Interval(float(mean), float(low), float(high)) for mean, low, high in rows)

    def terms(self) -> tuple[Mapping[str, float], ...]:
        """The parts of each prediction in seconds: compute_s, comm_s, exposed_comm_s, hidden_comm_s."""
        rows = zip(self.compute_s, self.comm_s, self.exposed_comm_s, strict=True)
        return tuple(
            {
                "compute_s": float(compute),
                "comm_s": float(comm),
                "exposed_comm_s": float(exposed),
                "hidden_comm_s": max(float(comm - exposed), 0.0),
            }
            for compute, comm, exposed in rows
        )


@dataclass(frozen=True)
class StepTimeModel:
    """A fitted model. `notes` are sentences about what the data cannot tell; `basis` says what it rests on."""

    form: Form
    basis: Basis
    notes: tuple[str, ...]
    observations: StepTimeObservations | None
    posteriors: Mapping[str, Posterior] = field(repr=False)
    baselines: Mapping[str, BaselineFit] = field(repr=False)
    unmeasured: Mapping[str, Posterior] = field(repr=False)
    fallback: Posterior | None = field(repr=False)
    interval_scale: float = 1.0

    def predict(self, configurations: Points | Sequence[Configuration], *, level: float = 0.9) -> StepTimePredictions:
        """Predicted step times of n configurations with intervals that should hold `level` of measurements."""
        points = configurations if isinstance(configurations, Points) else Points.of(configurations)
        rows = len(points)
        log_mean, log_sd, dof = np.zeros(rows), np.zeros(rows), np.full(rows, 6.0)
        log_compute, log_comm = np.zeros(rows), np.zeros(rows)
        types = np.array(points.instance_type, dtype=object)
        for name in sorted(set(points.instance_type)):
            at = np.flatnonzero(types == name)
            here = points.take(at)
            if self.form is not Form.PHYSICAL:
                baseline = self.baselines.get(name)
                if baseline is None:
                    raise ObservationError(
                        f"instance type {name!r} has no measurement; profile it or use Form.PHYSICAL."
                    )
                mean, sd, compute, comm = baseline.predict(here)
                log_mean[at], log_sd[at], dof[at] = np.log(mean), sd, baseline.dof
                log_compute[at], log_comm[at] = np.log(compute), np.log(comm)
                continue
            posterior = self.posterior_of(name)
            log_mean[at], variance = posterior.predict(here)
            log_sd[at] = np.sqrt(variance + posterior.noise_variance) * self.interval_scale
            dof[at] = posterior.dof
            terms = log_terms(posterior.leading.theta, here, posterior.reference_batch_size)
            correction = log_mean[at] - terms.step
            log_compute[at] = terms.compute + np.log(here.grad_accum_steps) + correction
            log_comm[at] = terms.communication + correction
        mean_s = np.exp(log_mean)
        low, high = np.empty(rows), np.empty(rows)
        for value in np.unique(dof):
            at = np.flatnonzero(dof == value)
            low[at], high[at] = log_interval(mean_s[at], log_sd[at], float(value), level)
        compute_s = np.minimum(np.exp(log_compute), mean_s)
        return StepTimePredictions(
            configurations=points,
            mean_s=mean_s,
            low_s=low,
            high_s=high,
            log_sd=log_sd,
            extrapolated=self._extrapolated(points),
            measured=self._measured(points),
            compute_s=compute_s,
            comm_s=np.exp(log_comm),
            exposed_comm_s=mean_s - compute_s,
        )

    def posterior_of(self, instance_type: str) -> Posterior:
        """The posterior behind the predictions for an instance type; what planning reads its uncertainty from."""
        found = self._posterior(instance_type)
        if found is None:
            raise ObservationError(f"instance type {instance_type!r} has no measurement and no prior; profile it.")
        return found

    def _posterior(self, instance_type: str) -> Posterior | None:
        return self.posteriors.get(instance_type) or self.unmeasured.get(instance_type) or self.fallback

    def posterior(self, instance_type: str) -> StepTimePrior:
        """What was learnt about one instance type, as a prior for later jobs; ObservationError if nothing was."""
        found = self.posteriors.get(instance_type)
        if found is None:
            raise ObservationError(f"instance type {instance_type!r} has no measurement to learn from; profile it.")
        mean, sd = found.moments()
        return StepTimePrior(
            mean,
            sd,
            found.prior.scales,
            Basis.TRANSFER,
            absolute=True,
            reference_batch_size=found.reference_batch_size,
        )

    def parameters(self, instance_type: str) -> Mapping[str, float]:
        """The fitted parameters by symbol, decoded into the units that `PARAMETERS` states."""
        found = self._posterior(instance_type)
        if found is None:
            return {}
        return {p.symbol: p.decode(float(value)) for p, value in zip(PARAMETERS, found.leading.theta, strict=True)}

    def _extrapolated(self, points: Points) -> npt.NDArray[np.bool_]:
        """Outside the box of what was measured on that instance type, or across nodes when nothing was."""
        outside = np.ones(len(points), dtype=np.bool_)
        if self.observations is None:
            return outside
        seen = self.observations.points
        types, seen_types = np.array(points.instance_type, dtype=object), np.array(seen.instance_type, dtype=object)
        for name in set(seen.instance_type):
            at, known = np.flatnonzero(types == name), np.flatnonzero(seen_types == name)
            beyond = np.zeros(at.size, dtype=np.bool_)
            for column in ("num_nodes", "world_size", "local_batch_size"):
                value, measured = getattr(points, column)[at], getattr(seen, column)[known]
                beyond |= (value > measured.max() * _RANGE_TOLERANCE) | (value < measured.min() / _RANGE_TOLERANCE)
            outside[at] = beyond
        return outside

    def _measured(self, points: Points) -> npt.NDArray[np.bool_]:
        if self.observations is None:
            return np.zeros(len(points), dtype=np.bool_)
        seen = set(_rows(self.observations.points))
        return np.array([row in seen for row in _rows(points)], dtype=np.bool_)


def fit_step_time(
    observations: StepTimeObservations | None,
    *,
    form: Form = Form.PHYSICAL,
    collective: Collective = Collective.RING,
    prior: StepTimePrior | Priors | None = None,
    candidates: Points | Sequence[Configuration] | None = None,
    interval_scale: float = 1.0,
    hypotheses: Sequence[Hypothesis] = HYPOTHESES,
) -> StepTimeModel:
    """Fit the step time of every instance type that was measured.

    `candidates` only sets b_ref (the largest batch in question), which makes the generic prior mean the same before and
    after the largest batch is profiled. A type that was measured less, or not at all, starts from the one that was
    measured most, moved by what the hardware of the two differs in. `hypotheses` are the beliefs about how far a job
    strays from the form. Raises ObservationError when there is neither a measurement nor a prior with a scale.
    """
    priors = Priors.of(prior)
    empty = observations is None or len(observations) == 0
    if empty or observations is None:
        known = [p for p in (*priors.believed.values(), priors.anywhere) if p is not None]
        if not known or not all(p.absolute for p in known) or form is not Form.PHYSICAL:
            raise ObservationError("no step time was measured; profile one configuration or give hardware figures.")
        return unmeasured_model(priors, candidates, interval_scale=interval_scale)
    merged, notes = merge_repeats(observations)
    notes = (*notes, *statements(merged.observations))
    types = np.array(merged.observations.points.instance_type, dtype=object)
    names, counts = np.unique(types, return_counts=True)
    by_count = [str(names[i]) for i in np.lexsort((names, -counts))]
    if form is not Form.PHYSICAL:
        baselines = {
            name: fit_baseline(merged.observations.take(types == name), servers=form is Form.PARAMETER_SERVER)
            for name in by_count
        }
        return StepTimeModel(form, Basis.PROFILED, notes, observations, {}, baselines, {}, None, interval_scale)
    largest = _largest_batch(observations, candidates)
    posteriors: dict[str, Posterior] = {}
    for name in by_count:
        start = priors.of_type(name) or generic_prior(collective)
        if posteriors:
            start = _carried(posteriors[by_count[0]], by_count[0], name, priors, collective)
        targets = merged.targets(types == name, start.scales)
        posteriors[name] = fit_posterior(targets, start, start.reference_batch_size or largest, hypotheses)
    first = by_count[0]
    unmeasured = {
        name: _from_prior(_carried(posteriors[first], first, name, priors, collective), largest)
        for name in sorted({*priors.believed, *priors.hardware} - set(posteriors))
    }
    fallback = _from_prior(_carried(posteriors[first], first, None, priors, collective), largest)
    return StepTimeModel(
        form, Basis.PROFILED, notes, observations, posteriors, {}, unmeasured, fallback, interval_scale
    )


def unmeasured_model(
    prior: StepTimePrior | Priors,
    candidates: Points | Sequence[Configuration] | None,
    *,
    interval_scale: float = 1.0,
) -> StepTimeModel:
    """The model of no data. With a prior that knows no scale its times mean nothing; planning reads its covariance."""
    priors, largest = Priors.of(prior), _largest_batch(None, candidates)
    unmeasured = {name: _from_prior(believed, largest) for name, believed in sorted(priors.believed.items())}
    fallback = None if priors.anywhere is None else _from_prior(priors.anywhere, largest)
    given = [*priors.believed.values()] or [p for p in (priors.anywhere,) if p is not None]
    basis = Basis.TRANSFER if given and all(p.basis is Basis.TRANSFER for p in given) else Basis.PRIOR
    note = "Nothing was measured: every figure comes from hardware data or from other jobs."
    return StepTimeModel(Form.PHYSICAL, basis, (note,), None, {}, {}, unmeasured, fallback, interval_scale)


def _from_prior(prior: StepTimePrior, largest: float) -> Posterior:
    return prior_posterior(prior, prior.reference_batch_size or largest)


def _carried(
    measured: Posterior, measured_type: str, wanted: str | None, priors: Priors, collective: Collective
) -> StepTimePrior:
    """The prior of another type: this job's own runs on the measured one, unless earlier jobs know the scale better."""
    mean, sd = measured.moments()
    learnt = StepTimePrior(
        mean, sd, measured.prior.scales, absolute=True, reference_batch_size=measured.reference_batch_size
    )
    hardware = priors.hardware.get(measured_type), None if wanted is None else priors.hardware.get(wanted)
    carried = prior_from_other_type(learnt, *hardware, collective=collective)
    own = None if wanted is None else priors.believed.get(wanted)
    return own if own is not None and own.absolute and own.sd[0] < carried.sd[0] else carried


def _largest_batch(
    observations: StepTimeObservations | None, candidates: Points | Sequence[Configuration] | None
) -> float:
    sizes = [1.0]
    if observations is not None:
        sizes.append(float(observations.points.local_batch_size.max()))
    if candidates is not None and len(candidates):
        points = candidates if isinstance(candidates, Points) else Points.of(candidates)
        sizes.append(float(points.local_batch_size.max()))
    return max(sizes)


def _rows(points: Points) -> list[tuple[str, float, float, float, float]]:
    columns = (points.num_nodes, points.world_size, points.local_batch_size, points.grad_accum_steps)
    return list(zip(points.instance_type, *(values.tolist() for values in columns), strict=True))
