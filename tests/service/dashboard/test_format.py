"""Numbers on pages read as people write them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tula_service.dashboard import format


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0.0, "0 ms"),
        (0.138, "138 ms"),
        (4.2e-5, "42 µs"),
        (59.4, "59.4 s"),
        (60, "1 min"),
        (3599.4, "59 min 59 s"),
        (3661, "1 h 1 min"),
        (90_000, "1 d 1 h"),
        (math.inf, "–"),
    ],
)
def test_durations_have_two_units_at_most(seconds: float | None, text: str) -> None:
    assert format.duration(seconds) == text


@pytest.mark.parametrize(
    ("usd", "text"), [(None, "–"), (0.0, "$0.00"), (0.004, "$0.004"), (12.345, "$12.35"), (12345.6, "$12,346")]
)
def test_money_keeps_what_matters(usd: float | None, text: str) -> None:
    assert format.money(usd) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(None, "–"), (0.583, "58 % less"), (0.002, "the same"), (-0.12, "12 % more"), (-1.27, "2.27 × as long")],
)
def test_a_negative_saving_is_worded_as_more_time(share: float | None, text: str) -> None:
    assert format.saving(share) == text


@pytest.mark.parametrize(
    ("value", "other", "text"), [(10, 10, "same"), (9, 10, "−10.0 %"), (34.1, 10, "3.41 ×"), (1, 0, "–")]
)
def test_values_far_apart_are_compared_by_a_factor(value: float, other: float, text: str) -> None:
    assert format.against(value, other) == text


@given(st.floats(min_value=1e-6, max_value=1e9))
def test_no_duration_says_sixty_of_a_lower_unit(seconds: float) -> None:
    text = format.duration(seconds).split()
    assert not (len(text) == 4 and (text[2], text[3]) in {("60", "s"), ("60", "min"), ("24", "h")})


def test_an_error_is_coloured_by_its_size_and_a_difference_by_its_sign() -> None:
    names = ["", "good", "good", "fair", "fair", "bad", "bad"]
    assert [format.tone(error) for error in (None, 0.0, -0.04, 0.05, -0.149, 0.15, -2.0)] == names
    assert [format.tone_against(value, 10) for value in (9, 10, 11)] == ["good", "", "bad"]
