"""Tests that noise scale and statistical efficiency recover known values, are monotonic and have valid intervals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tula_service.analysis.scaling import StatisticalEfficiency, estimate_noise_scale

SIZES = st.floats(1.0, 1e6)


def test_a_telemetry_column_gives_the_second_half_with_an_error_that_shrinks_with_length():
    rng = np.random.default_rng(1)
    early, late = np.full(2000, 10.0), 300.0 * np.exp(rng.normal(0.0, 0.3, 2000))
    long = estimate_noise_scale(np.concatenate([early, late]))
    short = estimate_noise_scale(np.concatenate([early[:100], late[:100]]))
    assert long is not None
    assert short is not None
    assert long.mean == pytest.approx(300.0, rel=0.05)
    assert long.high - long.low < short.high - short.low


@pytest.mark.parametrize("column", [[], [100.0] * 7, [np.nan] * 100, [np.inf] * 60 + [100.0] * 12])
def test_too_little_to_go_by_is_none(column):
    assert estimate_noise_scale(column) is None


@given(noise=SIZES, base=SIZES, a=SIZES, b=SIZES)
def test_efficiency_falls_with_batch_is_one_at_the_base_and_never_beats_perfect_scaling(noise, base, a, b):
    low, high = sorted((a, b))
    at_low, at_high, at_base = map(StatisticalEfficiency(noise, base).of, (low, high, base))
    assert at_high <= at_low
    assert at_base == pytest.approx(1.0)
    if low >= base:
        assert at_low * low >= base * (1 - 1e-9)  # a step with more examples never makes less progress


@given(noise=SIZES, base=SIZES)
def test_the_largest_sensible_batch_keeps_half_and_one_more_example_would_not(noise, base):
    efficiency = StatisticalEfficiency(noise, base)
    best = efficiency.max_sensible_batch_size
    at, beyond = efficiency.of(best), efficiency.of(best + 1.001)
    assert beyond < 0.5 * (1 + 1e-9) <= at * (1 + 1e-8)


@given(noise=SIZES, base=SIZES, a=SIZES, b=SIZES)
def test_the_learning_rate_grows_with_the_batch_and_never_faster_than_it(noise, base, a, b):
    low, high = base + min(a, b), base + max(a, b)
    efficiency = StatisticalEfficiency(noise, base)
    at_low, at_high = efficiency.learning_rate_factor(low), efficiency.learning_rate_factor(high)
    assert efficiency.learning_rate_factor(base) == pytest.approx(1.0)
    assert at_low >= 1.0 - 1e-9
    assert at_low <= at_high * (1 + 1e-9)
    assert at_high <= high / base * (1 + 1e-9)
