"""Tests that the residual process agrees with scikit-learn's Gaussian process, which serves as the oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Kernel, Matern

from tula_service.perfmodel.map_fit import Member, Targets, fit_posterior
from tula_service.perfmodel.points import Points
from tula_service.perfmodel.priors import generic_prior
from tula_service.perfmodel.step_time_form import ResidualScales, log_terms

SEEN = Points(
    num_nodes=[1, 1, 2, 4, 8, 8], world_size=[4, 4, 8, 16, 32, 32], local_batch_size=[32, 256, 64, 256, 32, 128]
)
ASKED = Points(num_nodes=[1, 2, 4, 8, 6], world_size=[4, 8, 16, 32, 24], local_batch_size=[64, 256, 32, 256, 96])


def doublings(points: Points) -> np.ndarray:
    return np.log2(np.column_stack([points.local_batch_size, points.world_size, points.num_nodes]))


def kernel_of(scales: ResidualScales) -> Kernel:
    """Return a kernel of exponentials over log2 of batch, ranks and nodes; a length of 1e12 disables a dimension."""
    never = 1e12

    def along(dimension: int, length: float) -> Kernel:
        lengths = [never, never, never]
        lengths[dimension] = length
        return Matern(length_scale=lengths, length_scale_bounds="fixed", nu=0.5)

    def sized(scale: float) -> Kernel:
        return ConstantKernel(scale**2, "fixed")

    batch = along(0, scales.batch_doublings)
    cluster = along(1, scales.cluster_doublings) * along(2, 2.0 * scales.cluster_doublings)
    return sized(scales.batch) * batch + sized(scales.cluster) * cluster + sized(scales.both) * batch * cluster


@pytest.fixture(scope="module")
def members() -> tuple[Member, ...]:
    # A prior this narrow fixes the physical form, so that only the residual can explain the differences.
    prior = generic_prior()
    prior = replace(prior, sd=np.full(prior.sd.size, 1e-7), scales=replace(prior.scales, own=1e-9), absolute=True)
    wiggle = 0.03 * np.array([1.0, -0.5, 0.3, -1.0, 0.8, -0.2])
    targets = Targets(
        points=SEEN,
        log_step=log_terms(prior.mean, SEEN, 256.0).step + wiggle,
        noise_variance=np.full(len(SEEN), prior.scales.noise**2),
        log_compute=np.full(len(SEEN), np.nan),
        log_once=np.full(len(SEEN), np.nan),
    )
    return fit_posterior(targets, prior, 256.0).members


def test_the_residual_is_the_gaussian_process_of_scikit_learn(members: tuple[Member, ...]) -> None:
    assert members
    wiggle = 0.03 * np.array([1.0, -0.5, 0.3, -1.0, 0.8, -0.2])
    for member in members:
        oracle = GaussianProcessRegressor(kernel_of(member.scales), alpha=member.scales.noise**2, optimizer=None)
        oracle.fit(doublings(SEEN), wiggle)
        mean, sd = oracle.predict(doublings(ASKED), return_std=True)
        ours, variance = member.predict(ASKED, SEEN, 256.0)
        assert np.allclose(ours - log_terms(member.theta, ASKED, 256.0).step, mean, atol=1e-6)
        assert np.allclose(variance / member.variance_factor, sd**2, rtol=1e-4)
