"""A profiling run ends early once its step time is known precisely enough, and not before."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tula_wire.precision import relative_error


@given(st.floats(1e-4, 10), st.integers(8, 200))
def test_equal_times_are_known_exactly_and_seven_are_never_enough(step_s: float, count: int) -> None:
    assert relative_error([step_s] * count) == 0
    assert relative_error([step_s] * 7) == math.inf


def test_the_error_shrinks_with_the_root_of_the_count() -> None:
    times = [0.1, 0.11, 0.09, 0.105, 0.095] * 8
    few, many = relative_error(times[:10]), relative_error(times[:40])
    assert many == pytest.approx(few / 2, rel=0.1)
    assert relative_error([*times, 0.3]) == pytest.approx(many, rel=0.2), "one slow step moves no mean by 10 %"


@pytest.mark.parametrize("every", [2, 4, 8])
def test_slow_steps_that_recur_are_never_enough(every: int) -> None:
    """The median alone would end the run after eight steps, as if there were no slow ones."""
    times = [0.162 if step % every == 0 else 0.012 for step in range(200)]
    assert all(relative_error(times[:count]) > 0.1 for count in range(8, 201))


def test_noise_of_a_percent_is_precise_enough_and_of_thirty_is_not() -> None:
    rng = random.Random(0)
    assert relative_error([0.2 * math.exp(rng.gauss(0.0, 0.01)) for _ in range(30)]) < 0.02
    assert relative_error([0.2 * math.exp(rng.gauss(0.0, 0.3)) for _ in range(30)]) > 0.02
