"""What is packed is unpacked, bit for bit, and smaller where it can be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tula_service.store import telemetry_codec
from tula_service.store.records import SampleColumns
from tula_service.store.summary import summarise, trimmed_mean
from tula_service.store.telemetry_codec import stride_of, unpack

shapes = st.tuples(st.integers(1, 5), st.integers(1, 50))


def pack(steps: np.ndarray, values: np.ndarray) -> bytes:
    """As a chunk is packed."""
    return telemetry_codec.pack(steps, values, stride_of(steps))


@given(values=arrays.arrays(np.float64, shapes), first=st.integers(0, 2**52), stride=st.integers(0, 100))
def test_any_chunk_comes_back_exactly(values: np.ndarray, first: int, stride: int) -> None:
    """NaN, infinities, denormals and signed zeros included."""
    steps = first + stride * np.arange(values.shape[1])
    again_steps, again = unpack(pack(steps, values), values.shape[1], values.shape[0])
    np.testing.assert_array_equal(again_steps, steps)
    np.testing.assert_array_equal(again, values)
    np.testing.assert_array_equal(np.signbit(again), np.signbit(values))


@given(steps=st.lists(st.integers(0, 2**53), min_size=1, max_size=40))
def test_any_order_of_steps_comes_back(steps: list[int]) -> None:
    """Steps need not be regular."""
    given_steps = np.array(steps, np.int64)
    again, _ = unpack(pack(given_steps, np.zeros((1, given_steps.size))), given_steps.size, 1)
    np.testing.assert_array_equal(again, given_steps)


def test_what_single_precision_holds_takes_half() -> None:
    """Values that came from float32 are stored as such."""
    noise = np.random.default_rng(0).normal(size=(4, 1000))
    steps = np.arange(1000)
    single = pack(steps, noise.astype(np.float32).astype(np.float64))
    assert len(single) < 0.6 * len(pack(steps, noise))


@given(values=arrays.arrays(np.float64, st.integers(2, 200), elements=st.floats(1e-6, 1e3)), wild=st.floats(1e4, 1e6))
def test_the_summary_lies_within_the_data_and_shrugs_off_one_wild_step(values: np.ndarray, wild: float) -> None:
    """One absurd step in more than ten moves nothing beyond the other steps' range."""
    mean, error = trimmed_mean(values)
    assert mean is not None
    assert error is not None
    assert values.min() * (1 - 1e-12) <= mean <= values.max() * (1 + 1e-12)
    assert error >= 0
    if values.size >= 10:
        disturbed, _ = trimmed_mean(np.append(values, wild))
        assert disturbed is not None
        assert disturbed <= values.max() * (1 + 1e-12)


def test_ranks_of_one_step_count_once() -> None:
    """Four ranks that waited for each other are no four measurements."""
    steps = np.arange(50)
    times = np.random.default_rng(1).lognormal(0, 0.1, 50)
    one = summarise(SampleColumns(steps, steps, times))
    four = summarise(SampleColumns(np.tile(steps, 4), np.tile(steps, 4), np.tile(times, 4)))
    assert four.num_steps == one.num_steps == 50
    assert four.relative_sd == pytest.approx(one.relative_sd)
    assert four.step_time_s == pytest.approx(one.step_time_s)


def test_a_straggler_is_named_when_it_is_mostly_the_same_rank() -> None:
    """More than half of the steps, or nobody."""
    steps = np.arange(10)
    often = SampleColumns(steps, steps, np.ones(10), straggler_rank=np.array([3] * 6 + [1] * 4))
    mixed = SampleColumns(steps, steps, np.ones(10), straggler_rank=np.array([3] * 5 + [1] * 5))
    assert summarise(often).straggler_rank == 3
    assert summarise(mixed).straggler_rank is None
