"""Tests that the trend of a series gives a typical value for each interval, whatever peaks the series has."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tula_service.analysis.series import TREND_POINTS, downsample, trend


def test_a_straggling_step_in_ten_does_not_move_it() -> None:
    values = np.where(np.arange(9000) % 10 == 0, 50.0, 1.0)
    found = trend(np.arange(9000), values)
    assert found is not None
    assert found[1].tolist() == [1.0] * TREND_POINTS


def test_fewer_points_smooth_more_and_none_not_at_all() -> None:
    values = np.arange(90.0)
    found = trend(np.arange(90), values, 15)
    assert found is not None
    assert found[1].tolist() == [2.5 + 6 * at for at in range(15)]
    assert trend(np.arange(90), values, 0) is None


def test_a_few_points_are_their_own_trend() -> None:
    assert trend(np.arange(3 * TREND_POINTS - 1), np.ones(3 * TREND_POINTS - 1)) is None


@given(st.integers(3 * TREND_POINTS, 5000), st.integers(0, 2**32 - 1), st.floats(0, 0.5))
def test_it_stays_within_the_series_and_its_steps_are_steps_that_were_reported(
    count: int, seed: int, holes: float
) -> None:
    chance = np.random.default_rng(seed)
    steps, values = np.cumsum(chance.integers(1, 5, count)), chance.normal(size=count)
    values[chance.random(count) < holes] = np.nan
    found = trend(steps, values)
    known = ~np.isnan(values)
    assert (found is None) == (int(known.sum()) < 3 * TREND_POINTS)
    if found is not None:
        assert np.isin(found[0], steps[known]).all()
        assert (np.diff(found[0]) > 0).all()
        assert np.nanmin(values) <= found[1].min() <= found[1].max() <= np.nanmax(values)


@given(st.integers(1, 3000), st.integers(2, 200))
def test_a_thinned_series_keeps_both_ends_and_both_extremes(count: int, most: int) -> None:
    values = np.sin(np.arange(count) * 1.7)
    steps, kept = downsample(np.arange(count), values, most)
    assert steps.size <= max(most, 2)
    assert (steps[0], steps[-1]) == (0, count - 1)
    if most >= 4:
        assert (kept.min(), kept.max()) == (values.min(), values.max())
