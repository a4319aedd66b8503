"""Tests that low, mean and high remain in order when intervals are scaled, added or multiplied."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tula_service.perfmodel.intervals import Interval


@given(st.floats(0.1, 10), st.floats(1.0, 3.0), st.floats(0, 100))
def test_intervals_keep_their_order_under_scaling_and_sums(mean, width, factor):
    interval = Interval(mean, mean / width, mean * width)
    for derived in (interval.scaled(factor), interval.plus(interval), interval.times(interval)):
        assert derived.low <= derived.mean * (1 + 1e-12)
        assert derived.mean <= derived.high * (1 + 1e-12)
    assert interval.expected >= interval.mean
