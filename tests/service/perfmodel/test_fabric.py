"""The line through a probe: alpha and beta are found again, and scaled to other rings."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tula_service.perfmodel.fabric import AllReduceCost, fit_all_reduce
from tula_service.perfmodel.points import ObservationError

SIZES = [1024.0 * 4**power for power in range(10)]


def measured(alpha: float, beta: float, *, noise: float = 0.0, seed: int = 0) -> list[float]:
    random = np.random.default_rng(seed)
    return [(alpha + beta * size) * float(np.exp(noise * random.standard_normal())) for size in SIZES]


def fitted(times: list[float], sd: float = 0.02) -> AllReduceCost:
    return fit_all_reduce(SIZES, times, [sd] * len(times))


@given(st.floats(-14.0, -4.0), st.floats(-26.0, -16.0))
def test_alpha_and_beta_are_found_again(log_alpha: float, log_beta: float) -> None:
    alpha, beta = np.exp([log_alpha, log_beta])
    cost = fitted(measured(alpha, beta))
    for found, true in ((cost.latency_s, alpha), (cost.seconds_per_byte, beta)):
        assert found.low <= true <= found.high
        if SIZES[0] * beta < alpha < SIZES[-1] * beta:
            assert found.mean == pytest.approx(true, rel=0.05)


def test_intervals_hold_the_truth_in_nine_of_ten_noisy_probes() -> None:
    held = 0
    for seed in range(200):
        cost = fitted(measured(5e-5, 2e-9, noise=0.1, seed=seed), sd=0.1)
        held += cost.latency_s.low <= 5e-5 <= cost.latency_s.high
        held += cost.seconds_per_byte.low <= 2e-9 <= cost.seconds_per_byte.high
    assert 0.85 <= held / 400 <= 0.98


def test_one_stalled_size_moves_the_line_little_and_widens_it() -> None:
    times = measured(5e-5, 2e-9)
    calm = fitted(times)
    times[5] *= 10.0
    stalled = fitted(times)
    assert stalled.seconds_per_byte.mean == pytest.approx(2e-9, rel=0.15)
    assert stalled.seconds_per_byte.high / stalled.seconds_per_byte.low > (
        1.2 * calm.seconds_per_byte.high / calm.seconds_per_byte.low
    )


def test_sizes_that_show_no_latency_leave_it_wide() -> None:
    cost = fit_all_reduce(SIZES[-3:], [1e-9 * size for size in SIZES[-3:]], [0.01] * 3)
    assert cost.latency_s.high / cost.latency_s.low > 100.0


def test_a_ring_takes_as_many_hops_as_it_has_other_ranks() -> None:
    """2 (N - 1) hops of a latency and s / N bytes each."""
    hop_s, byte_s = 1e-4, 1e-9
    cost = fitted([2 * (hop_s + size / 2 * byte_s) for size in SIZES])
    for ranks in (2, 3, 8, 64):
        seconds, log_sd = cost.ring(2, ranks, 4.0, 1e8)
        assert seconds == pytest.approx(2 * (ranks - 1) * (4 * hop_s + 1e8 / ranks * byte_s), rel=0.02)
        assert 0.0 < log_sd < 0.2


def test_a_time_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ObservationError, match="time_s"):
        fit_all_reduce([1024.0, 4096.0, 16384.0], [0.1, 0.0, 0.1], [0.0] * 3)
