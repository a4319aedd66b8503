"""The largest batch is predicted from what smaller ones used, and never promises less than what has run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tula_agent.config import read_config
from tula_agent.guard import Guard
from tula_agent.measure.headroom import ALLOCATOR_SLACK, Headroom
from tula_agent.measure.memory import Memory
from tula_agent.measure.memory_reports import MemoryReports
from tula_agent.ship.reporter import Reporter

STATIC, CONTEXT, CAPACITY = 3 * 10**9, 5 * 10**8, 80 * 10**9


def seen(batch: int, slope: int, fixed: int = 0, capacity: int = CAPACITY) -> Memory:
    """What a device would report whose memory is linear in the batch; a tenth of the slope is the batch itself."""
    grows = fixed + batch * slope
    batch_bytes = batch * slope // 10
    return Memory(
        method="cuda_allocator",
        peak_bytes=STATIC + grows,
        parameter_bytes=STATIC // 3,
        gradient_bytes=STATIC // 3,
        optimizer_bytes=STATIC // 3,
        activation_bytes=grows - batch_bytes,
        batch_bytes=batch_bytes,
        context_bytes=CONTEXT,
        capacity_bytes=capacity,
    )


def true_largest(slope: int, fixed: int = 0) -> int:
    return int((CAPACITY * (1 - ALLOCATOR_SLACK) - STATIC - CONTEXT - fixed) // slope)


slopes, batches = st.integers(10**5, 10**8), st.integers(1, 64)


@given(slopes, batches)
def test_one_batch_is_enough_where_everything_grows(slope: int, batch: int) -> None:
    headroom = Headroom()
    headroom.observe(seen(batch, slope), batch)
    assert headroom.largest_local_batch_size() == pytest.approx(true_largest(slope), abs=1)


@given(slopes, batches, st.integers(1, 64), st.integers(0, 10**9))
def test_two_batches_tell_what_is_fixed(slope: int, batch: int, more: int, fixed: int) -> None:
    headroom = Headroom()
    headroom.observe(seen(batch, slope, fixed), batch)
    headroom.observe(seen(batch + more, slope, fixed), batch + more)
    assert headroom.largest_local_batch_size() == pytest.approx(true_largest(slope, fixed), abs=2)


@given(slopes, batches, st.integers(0, 10**9))
def test_one_batch_errs_on_the_small_side_unless_the_fixed_part_is_known(slope: int, batch: int, fixed: int) -> None:
    guess, told = Headroom(), Headroom()
    guess.observe(seen(batch, slope, fixed), batch)
    told.observe(seen(batch, slope, fixed), batch, fixed_bytes=fixed)
    largest = guess.largest_local_batch_size()
    assert largest is not None
    assert batch <= largest <= true_largest(slope, fixed) + 1
    assert told.largest_local_batch_size() == pytest.approx(true_largest(slope, fixed), abs=1)


def test_a_batch_that_ran_fits_whatever_the_sum_says() -> None:
    headroom = Headroom()
    headroom.observe(seen(16, 10**8, capacity=10**9), 16)
    assert headroom.largest_local_batch_size() == 16


def test_nothing_is_said_while_a_part_is_unknown() -> None:
    headroom = Headroom()
    headroom.observe(Memory(method="peak_rss", peak_bytes=10**9), 8)
    assert headroom.largest_local_batch_size() is None
    headroom.observe(seen(8, 0), 8)  # nothing grows: no bound to tell
    assert headroom.largest_local_batch_size() is None


def test_a_prediction_from_a_real_step_goes_into_the_telemetry(tmp_path: Path) -> None:
    environ = {"TULA_URL": "http://127.0.0.1:1", "TULA_RUN_ID": "r", "TULA_SPOOL_DIR": str(tmp_path)}
    config = read_config(environ)
    assert config is not None
    reporter = Reporter(config, Guard(), "boot", lambda: 1)
    reports = MemoryReports(Guard(), reporter, ranks_per_node=1)
    model = nn.Sequential(nn.Linear(8, 1024), nn.Tanh(), nn.Linear(1024, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reports.probe.before_training([model])
    inputs = torch.randn(20_000, 8)
    reports.saw_batch(20_000, inputs, None)
    model(inputs).sum().backward()
    reports.probe.at_optimizer([model])
    optimizer.step()
    reports.read(5, [model], [optimizer])
    [value] = [(step, value) for step, name, value in reporter.rows.take_values()]
    assert value == (5, float(reports.headroom.largest_local_batch_size() or 0))
    assert value[1] >= 20_000
    assert reporter.memory is not None
