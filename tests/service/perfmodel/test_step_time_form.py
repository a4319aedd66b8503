"""Tests that the slopes of the step-time form equal finite differences, for one rank, one node and several nodes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tula_service.perfmodel.points import Points
from tula_service.perfmodel.step_time_form import ABSENT, AT, NUM_PARAMETERS, log_terms

_NODES = np.array([1.0, 1.0, 2.0, 4.0, 3.0, 1.0])
_POINTS = Points(
    num_nodes=_NODES,
    world_size=_NODES * [1.0, 4.0, 1.0, 8.0, 2.5, 1.0],
    local_batch_size=[8, 16, 32, 64, 4, 8],
    grad_accum_steps=[1, 2, 1, 4, 1, 3],
)
_STEP = 1e-6


@pytest.mark.parametrize("slow_from", [math.inf, 16.0])
@pytest.mark.parametrize("seed", range(10))
def test_slopes_are_those_of_the_form(seed: int, slow_from: float) -> None:
    theta = np.random.default_rng(seed).normal(size=NUM_PARAMETERS)
    terms = log_terms(theta, _POINTS, 32.0, slow_from)
    for entry, moved in enumerate(_STEP * np.eye(NUM_PARAMETERS)):
        above, below = (log_terms(theta + sign * moved, _POINTS, 32.0, slow_from) for sign in (1.0, -1.0))
        assert np.allclose(terms.step_slopes[:, entry], (above.step - below.step) / (2 * _STEP), atol=1e-6)
        assert np.allclose(terms.compute_slopes[:, entry], (above.compute - below.compute) / (2 * _STEP), atol=1e-6)


def test_compute_takes_a_quarter_more_from_the_batch_whose_convolutions_are_too_large() -> None:
    theta = np.full(NUM_PARAMETERS, -0.5)
    theta[AT.once] = ABSENT
    usual, slow = (log_terms(theta, _POINTS, 32.0, slow_from) for slow_from in (math.inf, 32.0))
    more = np.exp(slow.compute - usual.compute)
    assert more == pytest.approx(np.where(_POINTS.local_batch_size >= 32.0, 1.28, 1.0))
    assert slow.communication == pytest.approx(usual.communication)


def test_one_rank_communicates_nothing() -> None:
    theta = np.zeros(NUM_PARAMETERS)
    terms = log_terms(theta, _POINTS, 32.0)

    assert terms.communication[0] == -60.0
    assert not terms.step_slopes[0, 4:9].any()
