"""The split by alternating steps with and without synchronising."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.agent.conftest import Launch
from tests.agent.sink import Sink
from tula_agent.measure.no_sync import Lap, split_by_alternation


@given(
    compute=st.lists(st.floats(0.01, 1), min_size=2, max_size=5),
    communication=st.floats(0.001, 1),
    pairs=st.integers(2, 20),
)
def test_constant_times_are_told_apart_exactly(compute: list[float], communication: float, pairs: int) -> None:
    step = max(compute) + communication
    laps = {
        rank: [Lap(n, n % 2 == 0, step if n % 2 == 0 else own) for n in range(2 * pairs)]
        for rank, own in enumerate(compute)
    }
    split = split_by_alternation(laps)
    assert split is not None
    assert split.exposed_comm_time_s == pytest.approx(communication, rel=1e-6)
    assert split.skew_s == pytest.approx(max(compute) - min(compute), abs=1e-9)
    assert min(compute) <= split.compute_time_s <= max(compute)


def test_a_rank_that_was_not_heard_leaves_nothing_to_say() -> None:
    laps = {0: [Lap(n, n % 2 == 0, 1.0) for n in range(6)], 1: []}
    assert split_by_alternation(laps) is None


def test_a_profile_run_may_alternate_and_sends_only_synchronised_steps(sink: Sink, launch: Launch) -> None:
    launch("train.py", "--pause", "0.01", ranks=2, TULA_WARMUP_STEPS="2", TULA_MEASURE_STEPS="20", TULA_SPLIT="no_sync")
    rows = sink.rows("step", "step_time_s", "compute_time_s", "exposed_comm_time_s")
    assert {body["timing_method"] for body in sink.samples if not body["warmup"] and body["rank"] == 0} == {"no_sync"}
    assert len(rows) == 10
    assert {step % 2 for step, *_ in rows} == {rows[0][0] % 2}
    assert all(compute >= 0.01 for _, _, compute, _ in rows)
    assert not sink.invalid
