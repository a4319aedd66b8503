"""Tests that the line through a probe's readings recovers alpha and beta, and that these are scaled to other rings."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.configurations import make_configuration
from tula_service.perfmodel.fabric import AllReduceCost, Buckets, Fabric, fit_all_reduce, with_fabric
from tula_service.perfmodel.points import ObservationError, Points
from tula_service.perfmodel.priors import generic_prior
from tula_service.perfmodel.step_time_form import log_terms

SIZES = [1024.0 * 4**power for power in range(10)]


def measured(alpha: float, beta: float, *, noise: float = 0.0, seed: int = 0) -> list[float]:
    random = np.random.default_rng(seed)
    return [(alpha + beta * size) * float(np.exp(noise * random.standard_normal())) for size in SIZES]


def fitted(times: list[float], sd: float = 0.02) -> AllReduceCost:
    return fit_all_reduce(SIZES, times, [sd] * len(times))


@settings(deadline=None)  # the first example imports scipy
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
    """A ring takes 2 (N - 1) hops, each with a latency and s / N bytes."""
    hop_s, byte_s = 1e-4, 1e-9
    cost = fitted([2 * (hop_s + size / 2 * byte_s) for size in SIZES])
    for ranks in (2, 3, 8, 64):
        seconds, log_sd = cost.ring(2, ranks, 4.0, 1e8)
        assert seconds == pytest.approx(2 * (ranks - 1) * (4 * hop_s + 1e8 / ranks * byte_s), rel=0.02)
        assert 0.0 < log_sd < 0.2


def test_a_time_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ObservationError, match="time_s"):
        fit_all_reduce([1024.0, 4096.0, 16384.0], [0.1, 0.0, 0.1], [0.0] * 3)


def test_the_prior_holds_what_was_probed_over_nodes_and_within_one() -> None:
    """With two nodes of four ranks and 100 MB of gradients, the collectives take as long as the probe measured."""
    across, inside = fitted(measured(4e-4, 4e-9)), fitted(measured(5e-5, 2e-10))
    fabric = Fabric(2, 4, across, inside)
    prior = with_fabric(generic_prior(), fabric, buckets=Buckets.of(1e8), max_nodes=8, ranks_per_node=4)
    wanted = [make_configuration(nodes, 4, 32) for nodes in (1, 2, 8)]
    found = np.exp(log_terms(prior.mean, Points.of(wanted), 32.0).communication)
    expected = [inside.ring(4, 4, 4, 1e8)[0], *(across.ring(8, ranks, 4, 1e8)[0] for ranks in (8, 32))]
    assert found == pytest.approx(expected, rel=0.05)
    assert prior.in_seconds == (4, 6)


def test_readings_count_on_as_many_ranks_as_were_probed() -> None:
    """The line adds the times for latency and bandwidth, but they may overlap: here, 5 ms and 5 ms take 5 ms."""
    sizes = [2.0**power for power in range(10, 24, 2)]
    seconds = [max(5e-3, size * 7.5e-8) for size in sizes]
    cost = fit_all_reduce(sizes, seconds, [0.01] * len(sizes))
    fabric = Fabric(8, 1, cost)
    assert fabric.whole(8, 1, 2.0**16)[0] == pytest.approx(5e-3)
    assert fabric.whole(8, 1, 2.0**18, messages=4)[0] == pytest.approx(20e-3)
    assert fabric.whole(4, 1, 2.0**16)[0] == pytest.approx(np.exp(cost.mean) @ [3 / 7, 6 / 7 * 2.0**16])
    assert fabric.whole(8, 1, 2.0**30)[0] == pytest.approx(2.0**30 * 7.5e-8, rel=0.1)


@pytest.mark.parametrize("size_bytes", [3.0 * 2**14, 2.0**19, 2.0**21 + 1.0])
def test_a_size_between_two_readings_of_a_straight_line_lies_on_it(size_bytes: float) -> None:
    """Interpolation between the logarithms of two readings would be up to 6 % above the line."""
    seconds, _ = fitted(measured(5e-3, 2e-8)).ring(8, 8, 1.0, size_bytes)
    assert seconds == pytest.approx(5e-3 + 2e-8 * size_bytes, rel=0.01)


def test_a_prior_that_knows_its_collectives_better_keeps_them() -> None:
    prior = generic_prior()
    sure = type(prior)(prior.mean, np.minimum(prior.sd, 0.1), in_seconds=(4, 6))
    fabric = Fabric(2, 1, fitted(measured(1e-3, 1e-8)))
    kept = with_fabric(sure, fabric, buckets=Buckets.of(1e8), max_nodes=8, ranks_per_node=1)
    assert kept.mean.tolist() == sure.mean.tolist()
    assert kept.sd.tolist() == sure.sd.tolist()


def timed(total_mib: float, cap_mib: float, lateness: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes and ready times of DDP's buckets in a step of 1 s; the gaps grow if `lateness` exceeds 1."""
    number = max(1, round(total_mib / cap_mib))
    done = np.arange(1, number + 1) / number
    return np.full(number, total_mib / number * 2**20), 1 / 3 + 2 / 3 * done**lateness


def test_the_prior_follows_simulated_steps() -> None:
    """The cases have 1 MiB to 1.3 GiB of gradients, 2 to 16 nodes, and links of 0.2 to 100 Gbit/s.

    Buckets become ready at equal or growing intervals. Compute takes one third to three times as long as the
    collectives of four nodes, and batches are half to four times as large as the timed batch.
    """
    missed = []
    cases = product([(1.0, 0.25), (5.0, 1.0), (100.0, 25.0), (1300.0, 25.0)], [1.0, 2.5], [0.2, 1.0, 10.0, 100.0])
    for ((total, cap), lateness, gbps), ratio in product(cases, [0.3, 1.0, 3.0]):
        sizes, ready = timed(total, cap, lateness)
        fabric = Fabric(2, 1, AllReduceCost(np.log([5e-5, 8e-9 / gbps]), np.eye(2) * 0.0025))
        compute_s = fabric.whole(4, 1, float(sizes.sum()), sizes.size)[0] / ratio
        buckets = Buckets(sizes, ready * compute_s)
        prior = with_fabric(generic_prior(), fabric, buckets=buckets, max_nodes=16, ranks_per_node=1)
        points = Points.of([make_configuration(nodes, 1, 32) for nodes in range(2, 17)])
        communication = log_terms(prior.mean, points, 32.0).communication
        g = 1.0 + np.exp(prior.mean[9])
        reduced = [np.array([fabric.whole(n, 1, size)[0] for size in sizes]) for n in range(2, 17)]
        for pace in (0.5, 1.0, 2.0, 4.0):
            simulated = np.log([buckets.end_s(each, pace) for each in reduced])
            step = np.logaddexp(g * np.log(pace * compute_s), g * communication) / g
            missed.append(np.abs(step - simulated))
    assert np.median(missed) < 0.023
    assert np.quantile(missed, 0.9) < 0.075
    assert np.max(missed) < 0.14


def test_buckets_wait_for_their_gradients_and_for_each_other() -> None:
    buckets = Buckets(np.array([1.0, 1.0, 1.0]), np.array([1.0, 2.0, 3.0]))
    assert buckets.end_s(np.array([0.5, 0.5, 0.5])) == pytest.approx(3.5)
    assert buckets.end_s(np.array([5.0, 1.0, 1.0])) == pytest.approx(8.0)
    assert buckets.end_s(np.array([0.5, 0.5, 0.5]), pace=2.0) == pytest.approx(6.5)


def test_timed_buckets_say_how_much_is_hidden() -> None:
    fabric = Fabric(2, 1, fitted(measured(1e-4, 1e-8)))
    sizes, early, late = np.full(8, 1e6), np.linspace(0.01, 0.08, 8), np.full(8, 0.08)
    hidden, exposed = (
        with_fabric(generic_prior(), fabric, buckets=Buckets(sizes, ready), max_nodes=8, ranks_per_node=1)
        for ready in (early, late)
    )
    assert hidden.mean[9] > exposed.mean[9] + 1.0
    assert hidden.sd[9] < generic_prior().sd[9]
