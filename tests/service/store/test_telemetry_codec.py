"""Tests that packed values are unpacked bit for bit, and need less space where possible."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tula_service.store.telemetry import pack, unpack

shapes = st.tuples(st.integers(1, 5), st.integers(1, 50))


@given(values=arrays.arrays(np.float64, shapes), first=st.integers(0, 2**52), stride=st.integers(0, 100))
def test_any_chunk_comes_back_exactly(values: np.ndarray, first: int, stride: int) -> None:
    """The values include NaN, infinities, denormals and signed zeros."""
    steps = first + stride * np.arange(values.shape[1])
    again_steps, again = unpack(pack(steps, values), values.shape[1], values.shape[0])
    np.testing.assert_array_equal(again_steps, steps)
    np.testing.assert_array_equal(again, values)
    np.testing.assert_array_equal(np.signbit(again), np.signbit(values))


@given(steps=st.lists(st.integers(0, 2**53), min_size=1, max_size=40))
def test_any_order_of_steps_comes_back(steps: list[int]) -> None:
    given_steps = np.array(steps, np.int64)
    again, _ = unpack(pack(given_steps, np.zeros((1, given_steps.size))), given_steps.size, 1)
    np.testing.assert_array_equal(again, given_steps)


def test_values_that_fit_single_precision_take_half() -> None:
    """Values that came from float32 are stored as float32."""
    noise = np.random.default_rng(0).normal(size=(4, 1000))
    steps = np.arange(1000)
    single = pack(steps, noise.astype(np.float32).astype(np.float64))
    assert len(single) < 0.6 * len(pack(steps, noise))
