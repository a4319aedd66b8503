"""Tests that the verdict names the cause of the largest part of a step, and claims no saving above that part."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tula_wire import HostFacts, MemoryBreakdown, Verdict
from tula_wire.precision import FEWEST_STEPS
from tula_wire.verdict import MOST_MORE_WORKERS, Steps, diagnose, sentence


def steps_of(
    count: int = 40,
    *,
    data: float = 0.02,
    comm: float | None = 0.02,
    skew: float | None = 0.0,
    slowest: int | None = None,
    noise: float = 0.05,
) -> Steps:
    """Return steps of about a second with these shares of waits."""
    rng = random.Random(1)
    times = [1.0 + noise * (rng.random() - 0.5) for _ in range(count)]
    column = {name: None if share is None else share for name, share in (("comm", comm), ("skew", skew))}
    return Steps(
        step_time_s=times,
        input_time_s=[data + noise * (rng.random() - 0.5) * data for _ in times],
        exposed_comm_time_s=[column["comm"]] * count,
        skew_s=[column["skew"]] * count,
        straggler_rank=[slowest] * count,
    )


def test_a_training_that_computes_nearly_all_the_time_is_compute_bound() -> None:
    verdict = diagnose(steps_of())
    assert (verdict.diagnosis, verdict.saves, verdict.steps) == ("compute_bound", None, 40)
    assert "96 % of a step" in verdict.evidence


def test_waits_that_are_each_small_make_no_diagnosis() -> None:
    verdict = diagnose(steps_of(data=0.08, comm=0.07, skew=0.06))
    assert verdict.diagnosis == "healthy"
    assert "The longest wait, for data" in verdict.evidence


def test_waiting_for_data_names_the_workers_that_end_the_wait_and_what_they_save() -> None:
    verdict = diagnose(steps_of(data=0.4), HostFacts(loader_workers=4, cores=16))
    assert verdict.diagnosis == "input_bound"
    assert "num_workers=4" in verdict.evidence
    assert "3 more workers (num_workers=7)" in verdict.next_step
    assert verdict.saves is not None
    assert not verdict.at_most
    assert verdict.saves.low < verdict.saves.value < verdict.saves.high
    assert verdict.saves.value == pytest.approx(0.4, abs=0.01)
    assert "It saves 40 % [" in sentence(verdict)


def test_a_loader_without_workers_gets_as_many_as_hide_its_time() -> None:
    verdict = diagnose(steps_of(data=0.7), HostFacts(loader_workers=0, cores=16))
    assert "give the DataLoader 3 workers (num_workers=3)" in verdict.next_step


def test_workers_are_bounded_by_the_cores_and_so_is_what_they_save() -> None:
    verdict = diagnose(steps_of(data=0.8), HostFacts(loader_workers=0, cores=2))
    assert "2 workers (num_workers=2)" in verdict.next_step
    assert verdict.saves is not None
    assert verdict.saves.value == pytest.approx(0.6, abs=0.01), "loading still takes 0.4 of what a step took"


@pytest.mark.parametrize(("cores", "workers"), [(None, 4 + MOST_MORE_WORKERS), (64, 64)])
def test_no_more_workers_are_recommended_than_can_be_of_use(cores: int | None, workers: int) -> None:
    verdict = diagnose(steps_of(data=0.999, noise=0.0), HostFacts(loader_workers=4, cores=cores))
    assert f"(num_workers={workers})" in verdict.next_step


@pytest.mark.parametrize("workers", [0, 4, 20])
def test_what_workers_save_of_a_few_long_stalls_is_a_bound(workers: int) -> None:
    stalls = [step % 20 == 19 for step in range(40)]
    steps = replace(
        steps_of(40, comm=0.0),
        step_time_s=[5.0 if stall else 0.1 for stall in stalls],
        input_time_s=[4.9 if stall else 0.0 for stall in stalls],
    )
    verdict = diagnose(steps, HostFacts(loader_workers=workers, cores=64))
    assert (verdict.diagnosis, verdict.at_most) == ("input_bound", True)
    assert "It saves up to" in sentence(verdict)


def test_workers_that_deliver_their_batches_together_are_an_expectation() -> None:
    steps = replace(
        steps_of(40, comm=0.0),
        step_time_s=[0.5 if step % 4 == 0 else 0.1 for step in range(40)],
        input_time_s=[0.4 if step % 4 == 0 else 0.0 for step in range(40)],
    )
    verdict = diagnose(steps, HostFacts(loader_workers=4, cores=64))
    assert (verdict.diagnosis, verdict.at_most) == ("input_bound", False)


@pytest.mark.parametrize("host", [None, HostFacts(), HostFacts(loader_workers=2, cores=2)])
def test_where_no_worker_can_be_added_the_wait_is_a_bound(host: HostFacts | None) -> None:
    verdict = diagnose(steps_of(data=0.4), host)
    assert (verdict.diagnosis, verdict.at_most) == ("input_bound", True)
    assert "It saves up to 40 % of a step." in sentence(verdict)


def test_exposed_communication_is_halved_for_an_example_by_accumulation() -> None:
    verdict = diagnose(steps_of(comm=0.3))
    assert verdict.diagnosis == "communication_bound"
    assert verdict.saves is not None
    assert verdict.saves.value == pytest.approx(0.15, abs=0.01)


def test_the_rank_that_the_others_wait_for_is_named_with_its_factor() -> None:
    verdict = diagnose(steps_of(skew=0.29, slowest=3))
    assert (verdict.diagnosis, verdict.straggler_rank, verdict.at_most) == ("straggler", 3, True)
    assert "rank 3 takes 1.4 times as long" in verdict.evidence


def test_ranks_that_take_turns_at_being_slow_are_no_one_s_fault() -> None:
    steps = replace(steps_of(skew=0.29), straggler_rank=[0, 1, 2, 3] * 10)
    verdict = diagnose(steps)
    assert (verdict.diagnosis, verdict.straggler_rank) == ("straggler", None)
    assert "slowest rank is not always the same" in verdict.evidence


def test_small_operations_that_take_the_compute_time_to_start_are_launch_bound() -> None:
    verdict = diagnose(steps_of(), HostFacts(operations=1000, launch_time_s=8e-4))
    assert (verdict.diagnosis, verdict.at_most) == ("launch_bound", True)
    assert "torch.compile" in verdict.next_step
    assert diagnose(steps_of(), HostFacts(operations=1000, launch_time_s=2e-4)).diagnosis == "compute_bound"


def test_one_short_step_of_few_makes_no_launches_the_bottleneck() -> None:
    """The tenth percentile of three compute times was once extrapolated to a negative time, which launches exceed."""
    rest = [None] * 37  # DDP times communication in only a few steps
    split = replace(steps_of(data=0.0), exposed_comm_time_s=[0.01, 0.01, 0.01, *rest], skew_s=[0.3, 0.0, 0.0, *rest])
    steps = replace(split, step_time_s=[0.6, *split.step_time_s[1:]])
    assert diagnose(steps, HostFacts(operations=5, launch_time_s=0.00002)).diagnosis != "launch_bound"


def test_a_busy_host_that_slows_all_but_a_few_steps_hides_no_launches() -> None:
    times = [1.0 if step % 7 == 0 else 2.5 for step in range(42)]
    verdict = diagnose(replace(steps_of(42), step_time_s=times), HostFacts(operations=1000, launch_time_s=8e-4))
    assert verdict.diagnosis == "launch_bound"


def test_memory_is_the_diagnosis_only_where_nothing_is_waited_for() -> None:
    full = MemoryBreakdown("cuda_allocator", 76 * 2**30, reserved_bytes=78 * 2**30, capacity_bytes=80 * 2**30)
    assert diagnose(steps_of(), memory=full).diagnosis == "compute_bound", "a device that is full is used well"
    full = replace(full, alloc_retries=7)
    verdict = diagnose(steps_of(), memory=full)
    assert (verdict.diagnosis, verdict.at_most) == ("memory_bound", True)
    assert "full 7 times" in verdict.evidence
    assert "expandable_segments" not in verdict.next_step, "Tula sets it for the commands that it starts"
    assert diagnose(steps_of(data=0.4), memory=full).diagnosis == "input_bound"


def test_too_few_steps_and_unmeasured_communication_give_no_diagnosis() -> None:
    assert diagnose(steps_of(FEWEST_STEPS - 1, data=0.5)).diagnosis == "unknown"
    assert diagnose(steps_of(FEWEST_STEPS, data=0.5)).diagnosis == "input_bound"
    assert diagnose(steps_of(comm=None, skew=None)).diagnosis == "unknown"
    assert diagnose(steps_of(comm=None, skew=None, data=0.5)).diagnosis == "input_bound", "a wait is a wait"


def test_the_interval_of_a_wait_that_comes_in_bursts_is_wide() -> None:
    steady = steps_of(data=0.3, noise=0.0)
    bursts = replace(steady, input_time_s=[0.6 if step % 20 < 10 else 0.0 for step in range(40)])
    host = HostFacts(loader_workers=0)
    even, uneven = diagnose(steady, host).saves, diagnose(bursts, host).saves
    assert even is not None
    assert uneven is not None
    assert even.high - even.low < 0.01
    assert uneven.high - uneven.low > 0.1


shares = st.floats(0.0, 1.0, allow_nan=False)


@given(
    st.lists(
        st.tuples(st.floats(1e-6, 1e3), shares, st.none() | shares, shares, st.none() | st.integers(0, 8)), max_size=60
    ),
    st.builds(
        HostFacts,
        loader_workers=st.none() | st.integers(0, 64),
        cores=st.none() | st.integers(1, 256),
        operations=st.none() | st.integers(1, 10**6),
        launch_time_s=st.none() | st.floats(1e-7, 1e-2),
    ),
)
def test_any_measurement_gets_a_verdict_whose_saving_is_a_share(rows: list[tuple[float, ...]], host: HostFacts) -> None:
    """With an inaccurate clock, the parts of a step may even take longer than the step."""
    steps = Steps(
        step_time_s=[row[0] for row in rows],
        input_time_s=[row[0] * row[1] for row in rows],
        exposed_comm_time_s=[None if row[2] is None else row[0] * row[2] for row in rows],
        skew_s=[None if row[2] is None else row[0] * row[3] for row in rows],
        straggler_rank=[None if row[4] is None else int(row[4]) for row in rows],
    )
    verdict = diagnose(steps, host)
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict
    assert sentence(verdict).endswith(".")
    if verdict.saves is not None:
        assert 0.0 <= verdict.saves.low <= verdict.saves.value <= verdict.saves.high <= 1.0
