"""Fits the form `overlap` and its residual process by maximum a posteriori estimation, averaging over hypotheses.

The hypotheses differ in the scales of the residual process. The caller must merge repeated measurements of a
configuration before the fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from scipy.linalg import cholesky
from scipy.linalg.lapack import dtrtri

from tula_service.perfmodel.points import FloatArray, Points, StepTimeObservations
from tula_service.perfmodel.priors import StepTimePrior, generic_prior
from tula_service.perfmodel.step_time_form import (
    AT,
    COLLECTIVES,
    LogStepTimes,
    ResidualScales,
    Terms,
    hypotheses,
    log_terms,
    residual_covariance,
    residual_variance,
    same_points,
    to_seconds,
)

_TOLERANCE = 1e-5  # of the squared misfit and of theta; it shifts predictions by far less than their intervals
_OUTLIER_SDS = 3.0
_POINTS_FOR_A_CASE = 10  # with fewer points, replays get worse, because an outlier and a misfit look alike
_PRIOR_DOF = 6.0
_IN_SECONDS = to_seconds(COLLECTIVES)
_SHARED_RESIDUAL = 0.5  # of a job's residual at a point: the part that another variant of the job is expected to have
_COMPUTE_NOISE = 0.07  # standard deviation of log compute time and of log optimizer time around the timed values


@dataclass(frozen=True)
class Targets:
    """The targets of a fit: logarithms of step time, compute time and the once-per-step part; NaN means unknown.

    `noise_variance` is the run-to-run variance of a row divided by its number of runs, plus the squared relative error
    within the runs.
    """

    points: Points
    log_step: FloatArray
    noise_variance: FloatArray
    log_compute: FloatArray
    log_once: FloatArray


@dataclass(frozen=True)
class Member:
    """The fit under one hypothesis: the mean and covariance of theta, and the residuals at the measured points."""

    theta: FloatArray
    covariance: FloatArray
    scales: ResidualScales
    own_variance: FloatArray
    weights: FloatArray
    whitener: FloatArray
    whitened_slopes: FloatArray
    variance_factor: float
    log_evidence: float

    def predict(
        self, points: Points, measured: Points, reference: float, slow_from: float = math.inf
    ) -> tuple[FloatArray, FloatArray]:
        """Return the mean and the variance of the noise-free log step time, each of shape (n,)."""
        terms = log_terms(self.theta, points, reference, slow_from)
        same = same_points(points, measured)
        cross = residual_covariance(points, measured, self.scales) + same * self.own_variance
        own = np.where(same.any(axis=1), same @ self.own_variance, self.scales.own**2)
        explained = self.whitener @ cross.T
        slopes = terms.step_slopes - explained.T @ self.whitened_slopes  # minus the part that the data determine
        variance = residual_variance(self.scales) + own - np.sum(explained**2, axis=0)
        variance = variance + np.einsum("ij,jk,ik->i", slopes, self.covariance, slopes)
        return terms.step + cross @ self.weights, np.maximum(variance, 1e-10) * self.variance_factor


@dataclass(frozen=True)
class Posterior:
    """A mixture of members, each weighted by how well it explains the measurements.

    `prior` is the prior of the fit; if the prior did not include a compute scale c, c comes from the data. `start` is
    the posterior of the nearest measured variant of the same instance type; half of that variant's residual is expected
    to apply to the new variant as well.
    """

    prior: StepTimePrior
    reference_batch_size: float
    points: Points
    members: tuple[Member, ...]
    member_weights: FloatArray
    dof: float
    start: Posterior | None = None

    @property
    def leading(self) -> Member:
        """Return the member with the largest weight, whose parameters are used where only one member can be used."""
        return self.members[int(np.argmax(self.member_weights))]

    def predict(self, points: Points) -> tuple[FloatArray, FloatArray]:
        """Return the mean and the variance of the noise-free log step time, each of shape (n,)."""
        shared = self.points, self.reference_batch_size, self.prior.slow_from
        moments = [member.predict(points, *shared) for member in self.members]
        means, variances = np.array([mean for mean, _ in moments]), np.array([variance for _, variance in moments])
        mean = self.member_weights @ means
        variance = np.asarray(self.member_weights @ (variances + (means - mean) ** 2), dtype=np.float64)
        return mean + _shared_residual(self.start, points), variance

    def residual(self, points: Points) -> FloatArray:
        """Return the expected deviation of log step time from the form, shape (n,).

        The independent residual of each measured point is not included.
        """
        of_members = [
            residual_covariance(points, self.points, member.scales) @ member.weights for member in self.members
        ]
        return _shared_residual(self.start, points) + self.member_weights @ of_members

    def predict_step(self, points: Points) -> LogStepTimes:
        """Return the predicted measurement of one run at each of n points.

        The compute and communication terms come from the leading member, and are scaled by the ratio of the mean step
        time to the leading member's step time.
        """
        mean, variance = self.predict(points)
        factor = float(self.member_weights @ [member.variance_factor for member in self.members])
        noise_variance = self.prior.scales.noise**2 * min(factor, 4.0)  # of a run around its configuration's mean
        terms = log_terms(self.leading.theta, points, self.reference_batch_size, self.prior.slow_from)
        correction = mean - terms.step
        return LogStepTimes(
            mean=mean,
            sd=np.sqrt(variance + noise_variance),
            known_sd=np.sqrt(variance),
            dof=self.dof,
            compute=terms.compute + correction,
            communication=terms.communication + correction,
        )

    def as_prior(self) -> StepTimePrior:
        """Return a prior for the job's other variants: the mean and covariance of theta over all members."""
        return self._moments([member.covariance * member.variance_factor for member in self.members])

    def without_prior(self) -> StepTimePrior:
        """Return the posterior from this job's measurements and the generic prior, as a prior for later jobs.

        The prior of the fit is divided out. Otherwise, a job that used only one GPU would pass on what other jobs
        measured about communication, and later jobs would count these measurements twice. The job's misfit scales
        the standard deviations only of the parameters that the job measured.
        """
        own, generic, in_seconds = self._moments([m.covariance for m in self.members]), generic_prior(), _IN_SECONDS
        factor = float(self.member_weights @ [member.variance_factor for member in self.members])
        now, before, usual = (prior.sd**-2.0 for prior in (own, self.prior, generic))
        measured = now > before
        started = in_seconds @ [own.mean[AT.compute], *generic.mean[AT.floor :]]
        weighted = measured * (now * (in_seconds @ own.mean) - before * (in_seconds @ self.prior.mean)) / factor
        precision = measured * (now - before) / factor + usual
        taught = (weighted + usual * started) / precision
        return replace(own, mean=np.linalg.solve(in_seconds, taught), sd=precision**-0.5, covariance=None)

    def _moments(self, covariances: Sequence[FloatArray]) -> StepTimePrior:
        """Return a prior with the mean and covariance of theta over all members, given the covariance of each.

        The standard deviations of the collectives refer to times in seconds, which are known more accurately than
        their ratios to c.
        """
        thetas = np.array([member.theta for member in self.members])
        mean = self.member_weights @ thetas
        apart = thetas - mean
        of_theta = np.tensordot(self.member_weights, covariances, axes=1) + (self.member_weights * apart.T) @ apart
        covariance = _IN_SECONDS @ of_theta @ _IN_SECONDS.T
        return StepTimePrior(
            mean,
            np.sqrt(np.diag(covariance)),
            self.prior.scales,
            "transfer",
            absolute=True,
            reference_batch_size=self.reference_batch_size,
            in_seconds=COLLECTIVES,
            covariance=covariance,
        )


def _shared_residual(start: Posterior | None, points: Points) -> FloatArray:
    """Return the residual, shape (n,), that a variant shares with the variant from which its fit starts."""
    return np.zeros(len(points)) if start is None else _SHARED_RESIDUAL * start.residual(points)


def build_targets(observations: StepTimeObservations, repeats: FloatArray, scales: ResidualScales) -> Targets:
    """Return the targets of the fit, shape (n,); a mean of `repeats` runs has 1 / `repeats` of a run's variance."""
    compute = np.where(
        np.isfinite(observations.compute_time_s),
        observations.compute_time_s,
        observations.step_time_s - observations.exposed_comm_time_s,
    )
    usable = (compute > 0.0) & (compute <= observations.step_time_s * 1.02)
    # If an optimizer waits for other ranks, its reported time is longer than its compute time.
    once, most = observations.optimizer_time_s, np.where(usable, compute, observations.step_time_s)
    return Targets(
        points=observations.points,
        log_step=np.log(observations.step_time_s),
        noise_variance=scales.noise**2 / repeats + np.nan_to_num(observations.relative_sd) ** 2,
        log_compute=np.log(np.where(usable, compute, np.nan)),
        log_once=np.log(np.where((once > 0.0) & (once < most), once, np.nan)),
    )


def prior_posterior(prior: StepTimePrior, reference_batch_size: float, start: Posterior | None = None) -> Posterior:
    """Return the posterior without any measurements, which is equal to the prior."""
    none = np.zeros(0)
    member = Member(
        theta=prior.mean,
        covariance=np.asarray(np.linalg.inv(prior.precision), dtype=np.float64),
        scales=prior.scales,
        own_variance=none,
        weights=none,
        whitener=np.zeros((0, 0)),
        whitened_slopes=np.zeros((0, prior.mean.size)),
        variance_factor=1.0,
        log_evidence=0.0,
    )
    return Posterior(prior, reference_batch_size, Points.of([]), (member,), np.ones(1), _PRIOR_DOF, start)


def fit_posterior(
    targets: Targets,
    prior: StepTimePrior,
    reference_batch_size: float,
    start: Posterior | None = None,
) -> Posterior:
    """Return the Laplace approximations under all hypotheses, weighted by their evidence; the fit is deterministic."""
    centre, points = prior.mean.copy(), targets.points
    targets = replace(targets, log_step=targets.log_step - _shared_residual(start, points))
    beliefs, shares = zip(*hypotheses(prior.scales), strict=True)
    covariances = [residual_covariance(points, points, scales) for scales in beliefs]
    if not prior.absolute:
        without_scale = log_terms(centre, points, reference_batch_size, prior.slow_from).step
        shift = float(np.mean(targets.log_step - without_scale))
        centre[AT.compute] += shift
        centre[list(prior.in_seconds)] -= shift
    prior = replace(prior, mean=centre)
    members: list[Member] = []
    for scales, shared in zip(beliefs, covariances, strict=True):
        begin = members[0].theta if members else centre
        members.append(_fit_member(begin, prior, scales, shared, targets, reference_batch_size))
    log_weights = np.array([m.log_evidence + math.log(share) for m, share in zip(members, shares, strict=True)])
    weights = np.exp(log_weights - log_weights.max())
    return Posterior(
        prior=prior,
        reference_batch_size=reference_batch_size,
        points=points,
        members=tuple(members),
        member_weights=weights / weights.sum(),
        dof=_PRIOR_DOF + targets.log_step.size,
        start=start,
    )


def _fit_member(
    theta: FloatArray,
    prior: StepTimePrior,
    scales: ResidualScales,
    shared: FloatArray,
    targets: Targets,
    reference: float,
) -> Member:
    """Return the Laplace approximation around the maximum a posteriori estimate; the search starts at `theta`.

    `shared` is the covariance of the residuals under `scales`, shape (n, n), without the independent part of each
    point. A point is an outlier if it is more than three standard deviations away from its prediction based on all
    other points; outliers do not influence the predictions of other points. At most one point in ten is treated as an
    outlier, starting with the worst.
    """
    measured = targets.log_step.size
    own = np.full(measured, scales.own**2)
    for cases_left in reversed(range(measured // _POINTS_FOR_A_CASE + 1)):
        lower = cholesky(shared + np.diag(own + targets.noise_variance), lower=True)
        # solve_triangular would be slower on busy cores: OpenBLAS divides even six rows among threads and waits for
        # every thread.
        whitener = np.asarray(dtrtri(lower, lower=1)[0])
        theta, missed, whitened = _levenberg_marquardt(theta, prior, targets, whitener, reference)
        weights = -whitener.T @ missed[:measured]
        # The leave-one-out error of a point is weights / precision (Sundararajan 2001).
        point_precision = np.sum(whitener**2, axis=0)
        surprise = np.abs(weights) / np.sqrt(point_precision)
        worst = int(np.argmax(surprise))
        if surprise[worst] <= _OUTLIER_SDS or not cases_left:
            break
        own[worst] += surprise[worst] ** 2 / point_precision[worst]
    squares, precision = float(missed @ missed), whitened.T @ whitened
    # Laplace's log evidence up to a constant, with the overall scale integrated out, which results in Student's t with
    # 6 degrees of freedom.
    volume = float(np.linalg.slogdet(precision * np.outer(prior.sd, prior.sd))[1])
    misfit = (_PRIOR_DOF + measured) * math.log1p(squares / _PRIOR_DOF)
    return Member(
        theta=theta,
        covariance=np.asarray(np.linalg.inv(precision), dtype=np.float64),
        scales=scales,
        own_variance=own,
        weights=weights,
        whitener=whitener,
        whitened_slopes=whitened[:measured],
        variance_factor=(_PRIOR_DOF + squares) / (_PRIOR_DOF + measured),
        log_evidence=-0.5 * (misfit + volume) - float(np.log(np.diag(lower)).sum()),
    )


def _levenberg_marquardt(
    theta: FloatArray,
    prior: StepTimePrior,
    targets: Targets,
    whitener: FloatArray,
    reference: float,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return theta at the posterior's maximum, and the whitened residuals and their derivatives at this theta.

    The residuals are in the following order: log step times, log compute times, logs of the once-per-step part, prior.
    """
    from scipy.optimize import leastsq  # imported here because it slows the start of the service

    has_compute, root = np.isfinite(targets.log_compute), cholesky(prior.precision)
    timed = np.isfinite(targets.log_once)
    of_once = np.zeros((int(timed.sum()), theta.size))
    of_once[:, [AT.compute, AT.once]] = 1.0 / _COMPUTE_NOISE

    @lru_cache(maxsize=1)  # MINPACK requests the slopes at the point for which it has just requested the residuals
    def terms_at(at: tuple[float, ...]) -> Terms:
        return log_terms(np.array(at), targets.points, reference, prior.slow_from)

    def residuals(at: FloatArray) -> FloatArray:
        terms = terms_at(tuple(at.tolist()))
        compute = (terms.compute - targets.log_compute)[has_compute] / _COMPUTE_NOISE
        once = (terms.once - targets.log_once)[timed] / _COMPUTE_NOISE
        return np.concatenate([whitener @ (terms.step - targets.log_step), compute, once, root @ (at - prior.mean)])

    def slopes(at: FloatArray) -> FloatArray:
        terms = terms_at(tuple(at.tolist()))
        compute = terms.compute_slopes[has_compute] / _COMPUTE_NOISE
        return np.concatenate([whitener @ terms.step_slopes, compute, of_once, root])

    solution = leastsq(residuals, theta, Dfun=slopes, full_output=True, ftol=_TOLERANCE, xtol=_TOLERANCE)
    return solution[0], solution[2]["fvec"], slopes(solution[0])
