"""Tests that a profiling run ends early once its step time is known precisely enough, and not before."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tula_wire.precision import is_known, is_long_enough, relative_error, spread


@given(st.floats(0.126, 10), st.integers(8, 200))
def test_equal_times_are_known_exactly_and_seven_are_never_enough(step_s: float, count: int) -> None:
    assert relative_error([step_s] * count) == pytest.approx(0.0, abs=1e-9)
    assert relative_error([step_s] * 7) == math.inf


@pytest.mark.parametrize(("start_up_s", "least"), [(0.0, 20), (10.0, 20), (60.0, 120)])
def test_a_second_of_steps_and_a_tenth_of_the_start_up_is_always_measured(start_up_s: float, least: int) -> None:
    assert relative_error([0.05] * (least - 1), start_up_s) == math.inf
    assert relative_error([0.05] * (least + 1), start_up_s) < 1e-9


@pytest.mark.slow  # importing scipy takes longer than all other tests of this file
@pytest.mark.parametrize("count", [8, 9, 16, 60])
def test_the_interval_is_student_s_of_the_mean(count: int) -> None:
    from scipy import stats

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
    """If the median counted, the run would end after eight steps, as if there were no slow steps."""
    times = [0.162 if step % every == 0 else 0.012 for step in range(200)]
    assert all(relative_error(times[:count]) > 0.1 for count in range(8, 201))
    assert relative_error([10 * time_s for time_s in times[:8]]) > 0.1


def test_noise_of_a_percent_is_precise_enough_and_of_thirty_is_not() -> None:
    rng = random.Random(0)
    assert relative_error([0.2 * math.exp(rng.gauss(0.0, 0.01)) for _ in range(30)]) < 0.02
    assert relative_error([0.2 * math.exp(rng.gauss(0.0, 0.3)) for _ in range(30)]) > 0.02


def ends_after(times: list[float], measuring_steps: int, precision: float = 0.02) -> int:
    """Return the number of steps after which a run ends."""
    return next(n for n in range(1, len(times)) if is_long_enough(times[:n], n, measuring_steps, precision))


@pytest.mark.parametrize("cv", [0.0, 0.01, 0.1])
def test_a_run_whose_steps_are_nearly_alike_measures_what_it_was_asked_for(cv: float) -> None:
    times = np.random.default_rng(0).normal(1.0, cv, 200).tolist()
    assert ends_after(times, 30) == 30


@pytest.mark.slow
def test_a_run_whose_steps_are_slow_at_random_goes_on_until_their_mean_is_known() -> None:
    """Half of the steps take three times as long; in one of ten runs, the mean of thirty is wrong by over 13 %."""
    asked, off_then, off_at_end = 30, [], []
    for seed in range(40):
        times = np.where(np.random.default_rng(seed).random(8 * asked + 1) < 0.5, 0.3, 0.1)
        off_then.append(abs(times[:asked].mean() / 0.2 - 1.0))
        off_at_end.append(abs(times[: ends_after(times.tolist(), asked)].mean() / 0.2 - 1.0))
    assert np.quantile(off_then, 0.9) > 0.13
    assert np.quantile(off_at_end, 0.9) < 0.07


def test_slow_steps_at_regular_distances_need_fewer_steps_than_random_ones() -> None:
    regular = [0.3 if step % 4 == 0 else 0.1 for step in range(300)]
    shuffled = np.random.default_rng(1).permutation(regular).tolist()
    assert ends_after(regular, 30) == 60
    assert ends_after(shuffled, 30) == 240


def test_steps_that_stay_slow_for_a_while_need_more_than_independent_ones() -> None:
    blocks = ([1.0] * 15 + [1.4] * 15) * 9
    assert ends_after(blocks, 30) > ends_after(np.random.default_rng(0).permutation(blocks).tolist(), 30) == 30


def test_a_single_slow_step_adds_no_steps_and_nor_does_a_precision_of_zero_or_a_plan_of_few_steps() -> None:
    times = [0.1] * 29 + [5.0] + [0.1] * 200
    assert ends_after(times, 30) == 30
    random_steps = np.where(np.random.default_rng(0).random(200) < 0.5, 0.3, 0.1).tolist()
    assert ends_after(random_steps, 30, precision=0.0) == 30
    assert ends_after(random_steps, 5) == 5


def test_the_end_counts_steps_whose_time_is_not_comparable() -> None:
    assert is_long_enough([0.1] * 25, 30, 30, 0.02)
    assert not is_long_enough([0.1] * 29, 29, 30, 0.02)


def test_the_spread_of_independent_steps_is_that_of_a_step_and_regular_slow_steps_spread_less() -> None:
    normal = np.random.default_rng(0).normal(1.0, 0.2, 900)
    assert spread(normal.tolist()) == pytest.approx(0.2, rel=0.3)
    regular = [0.3 if step % 4 == 0 else 0.1 for step in range(100)]
    assert spread(regular) < 0.5 * np.std(regular) / np.mean(regular)
    assert spread(regular[:7]) == 0.0


def test_slow_steps_that_an_earlier_batch_showed_are_waited_for_where_they_are_missing_by_chance() -> None:
    alike = [0.2] * 240
    assert is_known(alike[:8], 0.02)
    assert not is_known(alike[:8], 0.02, usual_spread=0.5)
    assert is_known(alike[:8], 0.02, usual_spread=0.05), "steps that vary a little cost nothing"
    assert not is_known(alike, 0.0)
    assert not is_long_enough(alike[:30], 30, 30, 0.02, usual_spread=0.5)
    assert is_long_enough(alike[:240], 240, 30, 0.02, usual_spread=0.5)
