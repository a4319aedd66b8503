"""A profiling run ends early once its step time is known precisely enough, and not before."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tula_wire.precision import relative_error


@given(st.floats(0.126, 10), st.integers(8, 200))
def test_equal_times_are_known_exactly_and_seven_are_never_enough(step_s: float, count: int) -> None:
    assert relative_error([step_s] * count) == pytest.approx(0.0, abs=1e-9)
    assert relative_error([step_s] * 7) == math.inf


@pytest.mark.parametrize(("start_up_s", "least"), [(0.0, 20), (10.0, 20), (60.0, 120)])
def test_a_second_of_steps_and_a_tenth_of_the_start_up_is_always_measured(start_up_s: float, least: int) -> None:
    assert relative_error([0.05] * (least - 1), start_up_s) == math.inf
    assert relative_error([0.05] * (least + 1), start_up_s) < 1e-9


@pytest.mark.parametrize("count", [8, 9, 16, 60])
def test_the_interval_is_student_s_of_the_mean(count: int) -> None:
    times = np.random.default_rng(count).normal(1.0, 0.1, count)
    half = stats.t.ppf(0.975, count - 1) * stats.sem(times) / times.mean()
    assert relative_error(times.tolist()) == pytest.approx(half, rel=0.01)


def test_the_error_shrinks_with_the_root_of_the_count() -> None:
    times = [0.1, 0.11, 0.09, 0.105, 0.095] * 16
    few, many = relative_error(times[:20]), relative_error(times[:80])
    assert many == pytest.approx(few / 2, rel=0.1)
    assert relative_error([*times, 0.3]) > 1.5 * many, "one slow step leaves the mean less sure"


@pytest.mark.parametrize("every", [2, 4, 8])
def test_slow_steps_that_recur_are_never_enough(every: int) -> None:
    """The median would end the run after eight steps, as if there were no slow ones."""
    times = [0.162 if step % every == 0 else 0.012 for step in range(200)]
    assert all(relative_error(times[:count]) > 0.1 for count in range(8, 201))
    assert relative_error([10 * time_s for time_s in times[:8]]) > 0.1


def test_noise_of_a_percent_is_precise_enough_and_of_thirty_is_not() -> None:
    rng = random.Random(0)
    assert relative_error([0.2 * math.exp(rng.gauss(0.0, 0.01)) for _ in range(30)]) < 0.02
    assert relative_error([0.2 * math.exp(rng.gauss(0.0, 0.3)) for _ in range(30)]) > 0.02
