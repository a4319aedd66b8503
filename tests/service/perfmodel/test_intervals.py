"""Intervals keep their order, and past predictions calibrate their width."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tula_service.perfmodel.intervals import Interval, calibrate_intervals


def ledger(rng: np.random.Generator, sd: float, pairs: int = 400) -> tuple[np.ndarray, ...]:
    predicted = rng.uniform(0.1, 1.0, pairs)
    return predicted, predicted / 1.1, predicted * 1.1, predicted * np.exp(rng.normal(0, sd, pairs))


def test_no_history_leaves_intervals_as_they_are():
    assert calibrate_intervals([], [], [], []) == 1.0


@pytest.mark.parametrize("sd", [0.03, 0.1, 0.15])
def test_calibrated_intervals_hold_as_often_as_they_say(sd):
    rng = np.random.default_rng(7)
    scale = calibrate_intervals(*ledger(rng, sd))
    predicted, _, _, measured = ledger(rng, sd, 2000)
    held = np.mean(np.abs(np.log(measured / predicted)) <= scale * np.log(1.1))
    assert 0.86 < held < 0.94


def test_a_single_surprise_widens_but_little():
    scale = calibrate_intervals([1.0], [0.9], [1.1], [2.0])
    assert 1.0 < scale < 1.5


@given(st.floats(0.1, 10), st.floats(1.0, 3.0), st.floats(0, 100))
def test_intervals_keep_their_order_under_scaling_and_sums(mean, width, factor):
    interval = Interval(mean, mean / width, mean * width)
    for derived in (interval.scaled(factor), interval.plus(interval), interval.times(interval)):
        assert derived.low <= derived.mean * (1 + 1e-12)
        assert derived.mean <= derived.high * (1 + 1e-12)
    assert interval.expected >= interval.mean
