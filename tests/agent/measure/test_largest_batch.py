"""Tests that the largest batch is predicted from the memory of smaller batches and is never below one that ran."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tula_agent.measure.memory import MemoryMonitor
from tula_wire.memory import ALLOCATOR_SLACK

STATIC, CONTEXT, CAPACITY = 3 * 10**9, 5 * 10**8, 80 * 10**9


def seen(batch: int, slope: int, fixed: int = 0, capacity: int = CAPACITY) -> dict[str, int]:
    """Return the readings of a device whose memory use is linear in the batch; a tenth of the slope is input data."""
    grows = fixed + batch * slope
    batch_bytes = batch * slope // 10
    return {
        "peak_bytes": STATIC + grows,
        "parameter_bytes": STATIC // 3,
        "gradient_bytes": STATIC // 3,
        "optimizer_bytes": STATIC // 3,
        "activation_bytes": grows - batch_bytes,
        "batch_bytes": batch_bytes,
        "context_bytes": CONTEXT,
        "capacity_bytes": capacity,
    }


def true_largest(slope: int, fixed: int = 0) -> int:
    return int((CAPACITY * (1 - ALLOCATOR_SLACK) - STATIC - CONTEXT - fixed) // slope)


slopes, batches = st.integers(10**5, 10**8), st.integers(1, 64)


@given(slopes, batches)
def test_one_batch_is_enough_where_everything_grows(slope: int, batch: int) -> None:
    monitor = MemoryMonitor(1)
    monitor.observe(seen(batch, slope), batch)
    assert monitor.largest_local_batch_size() == pytest.approx(true_largest(slope), abs=1)


@given(slopes, batches, st.integers(1, 64), st.integers(0, 10**9))
def test_two_batches_reveal_the_fixed_part(slope: int, batch: int, more: int, fixed: int) -> None:
    monitor = MemoryMonitor(1)
    monitor.observe(seen(batch, slope, fixed), batch)
    monitor.observe(seen(batch + more, slope, fixed), batch + more)
    assert monitor.largest_local_batch_size() == pytest.approx(true_largest(slope, fixed), abs=2)


@given(slopes, batches, st.integers(0, 10**9))
def test_one_batch_errs_on_the_small_side_unless_the_fixed_part_is_known(slope: int, batch: int, fixed: int) -> None:
    guess, informed = MemoryMonitor(1), MemoryMonitor(1)
    guess.observe(seen(batch, slope, fixed), batch)
    informed.observe(seen(batch, slope, fixed), batch, fixed_bytes=fixed)
    largest = guess.largest_local_batch_size()
    assert largest is not None
    assert batch <= largest <= true_largest(slope, fixed) + 1
    assert informed.largest_local_batch_size() == pytest.approx(true_largest(slope, fixed), abs=1)


def test_an_allocator_whose_segments_grow_takes_no_more_than_is_allocated() -> None:
    fixed, growing = MemoryMonitor(1), MemoryMonitor(1)
    fixed.observe(seen(4, 10**8) | {"reserved_bytes": 1, "growing_segments": False}, 4)
    growing.observe(seen(4, 10**8) | {"reserved_bytes": 1, "growing_segments": True}, 4)
    largest, less = growing.largest_local_batch_size(), fixed.largest_local_batch_size()
    assert largest == pytest.approx(true_largest(10**8), abs=1)
    assert less is not None
    assert less < largest


def test_a_batch_that_ran_fits_even_beyond_the_predicted_capacity() -> None:
    monitor = MemoryMonitor(1)
    monitor.observe(seen(16, 10**8, capacity=10**9), 16)
    assert monitor.largest_local_batch_size() == 16


def test_no_prediction_while_a_memory_component_is_unknown() -> None:
    monitor = MemoryMonitor(1)
    monitor.observe({"peak_bytes": 10**9}, 8)
    assert monitor.largest_local_batch_size() is None
    monitor.observe(seen(8, 0), 8)  # nothing grows: no bound
    assert monitor.largest_local_batch_size() is None


def test_a_real_step_predicts_at_least_the_batch_that_ran() -> None:
    monitor = MemoryMonitor(ranks_per_node=1)
    model = nn.Sequential(nn.Linear(8, 1024), nn.Tanh(), nn.Linear(1024, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    monitor.before_training([model])
    inputs = torch.randn(20_000, 8)
    monitor.saw_batch(20_000, inputs, None)
    model(inputs).sum().backward()
    monitor.at_optimizer([model])
    optimizer.step()
    memory = monitor.read([model], [optimizer])
    assert "activation_bytes" in memory
    largest = monitor.largest_local_batch_size()
    assert largest is not None
    assert largest >= 20_000
