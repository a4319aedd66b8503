"""Tests the memory formula: from one batch it errs on the safe side; from two batches it is the line through both."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tula_wire.memory import bytes_per_sample, largest_local_batch_size, static_bytes, usable_bytes

CAPACITY, STATIC = 80e9, 3.5e9
slopes, batches = st.integers(10**5, 10**8), st.integers(1, 64)


def true_largest(slope: int, fixed: float = 0.0) -> int:
    return int((usable_bytes(CAPACITY) - STATIC - fixed) // slope)


@given(slopes, batches)
def test_one_batch_is_enough_where_everything_grows(slope: int, batch: int) -> None:
    largest = largest_local_batch_size(CAPACITY, STATIC, {batch: float(batch * slope)})
    assert largest == pytest.approx(true_largest(slope), abs=1)


@given(slopes, batches, st.integers(1, 64), st.floats(0, 1e9))
def test_two_batches_determine_what_is_fixed(slope: int, batch: int, more: int, fixed: float) -> None:
    grows = {b: fixed + b * slope for b in (batch, batch + more)}
    assert bytes_per_sample(grows) == pytest.approx(slope)
    assert largest_local_batch_size(CAPACITY, STATIC, grows) == pytest.approx(true_largest(slope, fixed), abs=2)


@given(slopes, batches, st.floats(0, 1e9))
def test_one_batch_errs_on_the_small_side(slope: int, batch: int, fixed: float) -> None:
    largest = largest_local_batch_size(CAPACITY, STATIC, {batch: fixed + batch * slope})
    assert largest is not None
    assert batch <= largest <= true_largest(slope, fixed) + 1


def test_a_batch_that_ran_fits_whatever_the_sum_says() -> None:
    assert largest_local_batch_size(1e9, STATIC, {16: 16e8}) == 16


def test_no_answer_without_a_reading_or_where_nothing_grows() -> None:
    assert largest_local_batch_size(CAPACITY, STATIC, {}) is None
    assert largest_local_batch_size(CAPACITY, STATIC, {8: 0.0}) is None


def test_unknown_parts_count_as_nothing() -> None:
    assert static_bytes(1.0, None, 2.0) == 3.0
    assert static_bytes(1.0, 1.0, 1.0, context_bytes=2.0, fixed_bytes=3.0) == 8.0
