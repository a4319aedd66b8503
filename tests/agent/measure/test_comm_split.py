"""Tests how the times of all ranks divide a step into compute, communication and skew, and identify the straggler."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.agent.conftest import Launch
from tests.agent.sink import Sink
from tula_agent.measure.ddp import CUDA_TRAIN_INTERVAL, CommSplit, sample_interval
from tula_agent.readings import CommTiming, StepTiming
from tula_agent.ship.request_builder import split_over_ranks

seconds = st.floats(0.001, 1.0)


@given(compute=st.lists(seconds, min_size=2, max_size=8), communication=seconds)
def test_the_least_exposed_time_over_ranks_is_the_communication(compute: list[float], communication: float) -> None:
    """Ranks compute for different times and then all-reduce; the wait of a faster rank is skew, not communication."""
    slowest = max(compute)
    step = slowest + communication
    timings = {rank: CommTiming(0, step, 0.0, step - own, step - own) for rank, own in enumerate(compute)}
    split = split_over_ranks(timings)
    assert math.isclose(split.exposed_comm_time_s, communication, rel_tol=1e-6)
    assert math.isclose(split.skew_s, slowest - min(compute), rel_tol=1e-6, abs_tol=1e-9)
    if split.skew_s > 0.05 * step:
        assert split.straggler_rank == compute.index(slowest)
    assert min(compute) <= split.compute_time_s + 1e-9
    assert split.compute_time_s <= slowest + 1e-9


def test_ranks_that_arrive_at_the_same_time_have_no_straggler() -> None:
    split = split_over_ranks({0: CommTiming(3, 1.0, 0.1, 0.3, 0.2), 1: CommTiming(3, 1.0, 0.1, 0.3, 0.201)})
    assert split.straggler_rank is None
    assert split.compute_time_s == 1.0 - 0.1 - (0.2 + 0.201) / 2


class Timed(torch.nn.parallel.DistributedDataParallel):
    """A DDP model that reports its iteration count and 3 ms of communication per iteration, of which 1 ms is hidden."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.iteration = 0

    def _get_ddp_logging_data(self) -> dict[str, int]:
        times = {"backward_comm_time": 3_000_000, "backward_compute_comm_overlap_time": 1_000_000}
        return {"iteration": self.iteration, **times}

    def _set_ddp_runtime_logging_sample_rate(self, steps: int) -> None:
        del steps


@pytest.mark.parametrize("every_micro_step", [False, True])
def test_every_reduction_of_a_step_counts_that_of_each_micro_step_and_each_model(every_micro_step: bool) -> None:
    """Without `no_sync`, one model is all-reduced twice per step and the other once; times are read once or twice."""
    models = [Timed(), Timed()]
    split = CommSplit(list(models), profiling=True)
    found = []
    for step in range(6):
        for micro_step in range(2):
            models[0].iteration += 1
            models[1].iteration += micro_step
            ended = StepTiming(step, 1.0, 0.0, 2, 8, False) if micro_step else None
            if micro_step or every_micro_step:
                found.append(split.at_boundary(step, ended))
    last = [timing for timing in found if timing is not None][-1]
    assert math.isclose(last.comm_time_s, 3 * 0.003)
    assert math.isclose(last.exposed_comm_time_s, 3 * 0.002)


@dataclass
class Ddp:
    device_type: str


def test_reading_ddps_clock_adds_no_waits_for_a_device_in_training() -> None:
    """DDP reads its timers every 100 steps by default; a reading waits for a CUDA device but costs nothing on a CPU."""
    assert sample_interval([Ddp("cuda")], profiling=False) == CUDA_TRAIN_INTERVAL == 100
    assert sample_interval([Ddp("cpu"), Ddp("cuda")], profiling=True) > 1
    assert sample_interval([Ddp("cpu")], profiling=True) == 1


def test_a_slow_rank_is_named_as_straggler_and_its_delay_counts_as_skew(sink: Sink, launch: Launch) -> None:
    plan = {"TULA_WARMUP_STEPS": "2", "TULA_MEASURE_STEPS": "20"}
    launch("train.py", "--late", "1", ranks=2, **plan)
    rows = [row for row in sink.rows("step", "straggler_rank", "skew_s", "exposed_comm_time_s") if None not in row]
    assert len(rows) >= 8
    assert median(straggler for _, straggler, _, _ in rows) == 1
    assert median(skew for _, _, skew, _ in rows) > 0.01
    assert median(exposed for _, _, _, exposed in rows) < median(skew for _, _, skew, _ in rows)
    assert {b["timing_method"] for b in sink.samples if b["rank"] == 0 and "skew_s" in b} == {"ddp_logger"}
