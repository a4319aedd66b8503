"""Noise scale and statistical efficiency: known truths are recovered, errors cover, monotonicity holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tula_service.perfmodel.noise_scale import (
    estimate_noise_scale,
    goodput,
    max_sensible_batch_size,
    noise_scale_from_norms,
    statistical_efficiency,
    time_to_quality_s,
)
from tula_service.perfmodel.points import ObservationError

SIZES = st.floats(1.0, 1e6)


def norms(rng: np.random.Generator, *, steps: int, b: int, large: int, dims: int = 200, noise: float = 1.0):
    """Squared norms of gradients of two sizes around a fixed true gradient with |G|^2 = 1 and tr(Sigma) = 200 noise."""
    true = np.full(dims, 1.0 / np.sqrt(dims))
    parts = true + rng.normal(0.0, np.sqrt(noise / b), (steps, large // b, dims))
    return (parts**2).sum(-1).mean(1), (parts.mean(1) ** 2).sum(-1)


def test_noise_scale_is_recovered_from_gradients_of_two_sizes():
    small, large = norms(np.random.default_rng(0), steps=400, b=32, large=256)
    found = noise_scale_from_norms(small, large, small_batch_size=32, large_batch_size=256)
    assert found is not None
    assert found.value == pytest.approx(200.0, rel=0.10)
    assert found.low < 200.0 < found.high


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    hits = 0
    for seed in range(60):
        small, large = norms(np.random.default_rng(seed), steps=100, b=32, large=256)
        found = noise_scale_from_norms(small, large, small_batch_size=32, large_batch_size=256)
        assert found is not None
        hits += found.low <= 200.0 <= found.high
    assert hits >= 44  # nine in ten are promised; binomial chance and few blocks allow for some less


def test_no_signal_gives_no_noise_scale_instead_of_a_huge_one():
    rng = np.random.default_rng(3)
    parts = rng.normal(0.0, 1.0, (200, 8, 50))
    small, large = (parts**2).sum(-1).mean(1), (parts.mean(1) ** 2).sum(-1)
    biased_down = large - 0.2 * small / 8
    assert noise_scale_from_norms(small, biased_down, small_batch_size=1, large_batch_size=8) is None


def test_a_telemetry_column_gives_the_later_half_with_an_error_that_shrinks_with_length():
    rng = np.random.default_rng(1)
    early, late = np.full(2000, 10.0), 300.0 * np.exp(rng.normal(0.0, 0.3, 2000))
    long = estimate_noise_scale(np.concatenate([early, late]))
    short = estimate_noise_scale(np.concatenate([early[:100], late[:100]]))
    assert long is not None
    assert short is not None
    assert long.value == pytest.approx(300.0, rel=0.05)
    assert long.error < short.error


@pytest.mark.parametrize("column", [[], [100.0] * 7, [np.nan] * 100, [np.inf] * 60 + [100.0] * 12])
def test_too_little_to_go_by_is_none(column):
    assert estimate_noise_scale(column) is None


@given(noise=SIZES, base=SIZES, a=SIZES, b=SIZES)
def test_efficiency_falls_with_batch_is_one_at_the_base_and_never_beats_perfect_scaling(noise, base, a, b):
    low, high = sorted((a, b))
    at_low, at_high, at_base = statistical_efficiency([low, high, base], noise, base_batch_size=base)
    assert at_high <= at_low
    assert at_base == pytest.approx(1.0)
    if low >= base:
        assert at_low * low >= base * (1 - 1e-9)  # more examples a step never make a step worth less


@given(noise=SIZES, base=SIZES, share=st.floats(0.05, 1.0))
def test_the_largest_sensible_batch_keeps_the_share_and_one_more_example_would_not(noise, base, share):
    best = max_sensible_batch_size(noise, base_batch_size=base, min_efficiency=share)
    at, beyond = statistical_efficiency([max(best, 1), best + 1.001], noise, base_batch_size=base)
    assert at >= share * (1 - 1e-9) or best <= base
    assert beyond < share * (1 + 1e-9)


def test_time_to_quality_orders_configurations_as_goodput_does():
    batch, step = np.array([64.0, 256.0, 1024.0, 4096.0]), np.array([0.10, 0.16, 0.40, 1.4])
    total = 50_000 / batch * step
    by_time = np.argsort(time_to_quality_s(total, batch, 500.0, base_batch_size=64))
    by_goodput = np.argsort(-goodput(batch, step, 500.0, base_batch_size=64))
    assert by_time.tolist() == by_goodput.tolist()
    assert by_time[0] != int(np.argmin(total))  # the fastest epoch is not the fastest way to quality here


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"noise_scale": np.nan, "base_batch_size": 1.0}, "noise_scale"),
        ({"noise_scale": 1.0, "base_batch_size": 0.0}, "base_batch_size"),
    ],
)
def test_senseless_sizes_are_refused_by_name(kwargs, named):
    with pytest.raises(ObservationError, match=named):
        statistical_efficiency([64.0], **kwargs)
    with pytest.raises(ObservationError, match="global_batch_size"):
        statistical_efficiency([np.inf], 1.0, base_batch_size=1.0)
