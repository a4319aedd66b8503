"""A knee is found where a curve bends, and only there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tula_service.perfmodel.knee import find_knee
from tula_service.perfmodel.points import ObservationError


def test_a_saturating_curve_has_a_knee_where_it_bends_whatever_the_range():
    for largest in (4096, 16384):
        batches = np.geomspace(32, largest, 40)
        found = find_knee(batches, 1.0 + 100.0 / batches)
        assert found.global_batch_size is not None
        assert 32 < found.global_batch_size < 600


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), fall=st.floats(0.1, 0.9))
@example(seed=1950, fall=0.5)  # noise that happens to fall by six of its standard deviations
def test_a_straight_or_flat_noisy_curve_has_no_knee(seed, fall):
    batches = np.geomspace(32, 4096, 12)
    straight = 1.0 - fall * np.linspace(0, 1, 12)
    assert find_knee(batches, straight).global_batch_size is None
    noise = np.random.default_rng(seed).normal(0, 0.01, 12)
    assert find_knee(batches, 1.0 + noise).global_batch_size is None


def test_too_few_points_are_said_to_be_too_few_and_infinity_is_refused():
    assert "no knee" in find_knee([32, 64], [1.0, 0.9]).reason
    with pytest.raises(ObservationError, match="value"):
        find_knee([32, 64, 128, 256, 512], [1.0, 0.9, float("inf"), 0.8, 0.7])
