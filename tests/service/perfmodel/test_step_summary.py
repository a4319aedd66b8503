"""Tests that step times are summarised robustly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tula_service.domain import SampleColumns
from tula_service.perfmodel.step_summary import robust_mean, summarise


@given(values=arrays.arrays(np.float64, st.integers(2, 200), elements=st.floats(1e-6, 1e3)), wild=st.floats(1e4, 1e6))
def test_the_robust_mean_lies_within_the_data_and_ignores_one_wild_step(values: np.ndarray, wild: float) -> None:
    """One absurd step does not move the mean out of the range of the other steps."""
    mean, error = robust_mean(values)
    assert mean is not None
    assert error is not None
    assert values.min() * (1 - 1e-12) <= mean <= values.max() * (1 + 1e-12)
    assert error >= 0
    disturbed, _ = robust_mean(np.append(values, wild))
    assert disturbed is not None
    assert disturbed <= values.max() * (1 + 1e-12)


def test_ranks_of_one_step_count_once() -> None:
    """Four ranks that wait for each other are treated as one measurement."""
    steps = np.arange(50)
    times = np.random.default_rng(1).lognormal(0, 0.1, 50)
    one = summarise(SampleColumns(steps, times))
    four = summarise(SampleColumns(np.tile(steps, 4), np.tile(times, 4)))
    assert four["num_steps"] == one["num_steps"] == 50
    assert four["relative_sd"] == pytest.approx(one["relative_sd"])
    assert four["step_time_s"] == pytest.approx(one["step_time_s"])


def test_a_straggler_is_named_when_it_is_mostly_the_same_rank() -> None:
    """A rank is the straggler only if it is the slowest in more than half of the steps."""
    steps = np.arange(10)
    often = summarise(SampleColumns(steps, np.ones(10), straggler_rank=np.array([3] * 6 + [1] * 4)))
    mixed = summarise(SampleColumns(steps, np.ones(10), straggler_rank=np.array([3] * 5 + [1] * 5)))
    assert often["straggler_rank"] == 3
    assert mixed["straggler_rank"] is None


def test_one_slow_step_does_not_move_the_step_time() -> None:
    times = 0.2 * np.exp(np.random.default_rng(0).normal(0, 0.02, 60))
    times[20] = 3.0
    assert summarise(SampleColumns(np.arange(60), times))["step_time_s"] == pytest.approx(0.2, rel=0.01)


@pytest.mark.parametrize("every", [2, 4, 8])
def test_slow_steps_that_recur_count_in_full(every: int) -> None:
    """Thirty steps give a long run's mean to within 10 % and two standard errors if every n-th step waits for data."""
    rng = np.random.default_rng(every)
    fast, waits = 0.012 * np.exp(rng.normal(0, 0.05, 3000)), np.zeros(3000)
    waits[::every] = 0.15
    found = summarise(SampleColumns(np.arange(30), fast[:30] + waits[:30], input_time_s=waits[:30]))
    assert found["step_time_s"] is not None
    assert found["relative_sd"] is not None
    assert found["step_time_s"] == pytest.approx((fast + waits).mean(), rel=0.1)
    assert abs(found["step_time_s"] / (fast + waits).mean() - 1) < 2 * found["relative_sd"]
    assert found["input_time_s"] == pytest.approx(waits[:30].mean())


def test_few_steps_tell_less_of_a_step_time_than_their_spread_says() -> None:
    """The usual standard error is multiplied by 1.7 for four steps and by 1.07 for sixteen; for one step it is 30 %."""

    def error_of(count: int) -> float:
        times = np.tile([0.9, 1.1], count)[:count]
        error = summarise(SampleColumns(np.arange(count), times))["relative_sd"]
        assert error is not None
        return error / (times.std(ddof=1) / np.sqrt(count) / times.mean()) if count > 1 else error

    assert error_of(4) == pytest.approx(3**0.5)
    assert error_of(16) == pytest.approx((15 / 13) ** 0.5)
    assert error_of(2) == pytest.approx(3.0)
    assert error_of(1) == 0.3
