"""Tests that pages word differences as people would."""

from __future__ import annotations

from importlib import resources
from typing import get_args

import pytest

from tula_service.dashboard import format
from tula_service.dashboard.charts.candidates import _BASIS
from tula_wire.enums import Basis


@pytest.mark.parametrize(
    ("share", "text"),
    [(None, "-"), (0.583, "58 % less"), (0.002, "the same"), (-0.12, "12 % more"), (-1.27, "2.27 × as long")],
)
def test_a_negative_saving_is_worded_as_more_time(share: float | None, text: str) -> None:
    assert format.saving(share) == text


@pytest.mark.parametrize(
    ("value", "other", "text"), [(10, 10, "same"), (9, 10, "−10.0 %"), (34.1, 10, "3.41 ×"), (1, 0, "-")]
)
def test_values_far_apart_are_compared_by_a_factor(value: float, other: float, text: str) -> None:
    assert format.against(value, other) == text


def test_an_error_is_coloured_by_its_size_and_a_difference_by_its_sign() -> None:
    names = ["", "good", "good", "fair", "fair", "bad", "bad"]
    assert [format.tone(error) for error in (None, 0.0, -0.04, 0.05, -0.149, 0.15, -2.0)] == names
    assert [format.tone_against(value, 10) for value in (9, 10, 11)] == ["good", "", "bad"]


def test_every_basis_is_explained_on_the_jobs_page_and_in_its_charts() -> None:
    page = (resources.files("tula_service.dashboard") / "templates" / "job.html").read_text(encoding="utf-8")
    for basis in get_args(Basis):
        assert f"'{basis}': '" in page
        assert basis in _BASIS
