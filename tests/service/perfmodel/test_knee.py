"""A knee is where doubling the batch stops paying, whatever the range of batches is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tula_service.perfmodel.choice import find_knee
from tula_service.perfmodel.points import ObservationError

BATCHES = np.geomspace(32, 2**20, 16 * 8 + 1)


def doubling_saves(alpha: float, beta: float, batch: float) -> float:
    """The share of alpha / B + beta that a step from B to 2 B saves."""
    return 1.0 - (alpha / (2 * batch) + beta) / (alpha / batch + beta)


@settings(max_examples=50, deadline=None)
@given(ratio=st.floats(1e3, 1e4), smallest=st.integers(0, 30), largest=st.integers(100, 128))
def test_the_knee_follows_the_job_and_neither_end_of_the_range_moves_it(ratio, smallest, largest):
    batches = BATCHES[smallest : largest + 1]
    found = find_knee(batches, ratio / batches + 1.0).global_batch_size
    assert found is not None
    assert doubling_saves(ratio, 1.0, found) < 0.1 or found == batches[0]
    assert doubling_saves(ratio, 1.0, found * 2 ** (-0.5)) > 0.09
    assert found == find_knee(BATCHES, ratio / BATCHES + 1.0).global_batch_size or found == batches[0]


def test_a_curve_that_falls_steeply_to_its_end_has_no_knee():
    assert find_knee(BATCHES, 1.0 / BATCHES).global_batch_size is None
    assert "every doubling" in find_knee(BATCHES, BATCHES**-0.5).reason


def test_a_flat_curve_has_its_knee_at_the_smallest_batch():
    assert find_knee(BATCHES, np.ones(BATCHES.size)).global_batch_size == pytest.approx(32.0)


def test_a_rise_after_the_fall_moves_no_knee():
    batches = np.array([32.0, 64.0, 128.0, 256.0, 512.0])
    assert find_knee(batches, [8.0, 4.0, 2.0, 1.9, 3.0]).global_batch_size == 128.0


def test_a_short_range_has_no_knee_and_infinity_is_refused():
    assert "no knee" in find_knee([32, 64], [1.0, 0.9]).reason
    with pytest.raises(ObservationError, match="time_s"):
        find_knee([32, 64, 128, 256, 512], [1.0, 0.9, float("inf"), 0.8, 0.7])
