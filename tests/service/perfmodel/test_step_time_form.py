"""The slopes of the step-time form equal finite differences of it, on one rank, one node and many."""

from __future__ import annotations

import numpy as np
import pytest

from tula_service.perfmodel.points import Points
from tula_service.perfmodel.step_time_form import NUM_PARAMETERS, log_terms

_NODES = np.array([1.0, 1.0, 2.0, 4.0, 3.0, 1.0])
_POINTS = Points(
    num_nodes=_NODES,
    world_size=_NODES * [1.0, 4.0, 1.0, 8.0, 2.5, 1.0],
    local_batch_size=[8, 16, 32, 64, 4, 8],
    grad_accum_steps=[1, 2, 1, 4, 1, 3],
)
_STEP = 1e-6


@pytest.mark.parametrize("seed", range(10))
def test_slopes_are_those_of_the_form(seed: int) -> None:
    theta = np.random.default_rng(seed).normal(size=NUM_PARAMETERS)
    terms = log_terms(theta, _POINTS, 32.0)
    for entry, moved in enumerate(_STEP * np.eye(NUM_PARAMETERS)):
        above, below = log_terms(theta + moved, _POINTS, 32.0), log_terms(theta - moved, _POINTS, 32.0)
        assert np.allclose(terms.step_slopes[:, entry], (above.step - below.step) / (2 * _STEP), atol=1e-6)
        assert np.allclose(terms.compute_slopes[:, entry], (above.compute - below.compute) / (2 * _STEP), atol=1e-6)


def test_one_rank_communicates_nothing() -> None:
    theta = np.zeros(NUM_PARAMETERS)
    terms = log_terms(theta, _POINTS, 32.0)

    assert terms.communication[0] == -60.0
    assert not terms.step_slopes[0, 4:9].any()
