"""Tests that the cost of profiling is known before the first launch, and is updated after each launch."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

import tula_wire as wire
from tests.service.usecases.cluster import Cluster, spec
from tests.support.clock import ManualClock
from tula_service.analysis.plan import profiling_cost
from tula_service.domain import RunRecord
from tula_service.store import Store
from tula_service.usecases import runs
from tula_service.usecases.access import ANONYMOUS
from tula_wire.jobs import ProfilingCost

BEGAN = datetime(2026, 1, 1, tzinfo=timezone.utc)
INSTRUCTION = {"profiling_warmup_steps": 1, "measuring_steps": 5, "precision": 0.02}
RANKS = 2


def run(
    batch: int, state: str, began_s: float | None = None, took_s: float | None = None, *, nodes: int = 1, **more: object
) -> RunRecord:
    """Return a profiling run of 1 + 5 steps on nodes of two ranks, with the given start and duration."""
    started = None if began_s is None else BEGAN + timedelta(seconds=began_s)
    facts: dict[str, Any] = {field.name: None for field in fields(RunRecord)}
    facts |= {
        "id": f"run_{batch}_{nodes}",
        "state": state,
        "configuration": wire.Configuration(num_nodes=nodes, ranks_per_node=RANKS, local_batch_size=batch),
        "num_samples": 0,
        "instruction": INSTRUCTION,
        "started_at": started,
        "finished_at": None if started is None or took_s is None else started + timedelta(seconds=took_s),
    }
    return RunRecord(**facts | more)


def cost(plan: list[RunRecord], *, now_s: float = 0.0, share_launches: bool = True, **more: object) -> ProfilingCost:
    return profiling_cost(spec(profiling={"share_launches": share_launches}, **more), plan, BEGAN.timestamp() + now_s)


LAUNCH = [
    run(32, "succeeded", 11, 3, step_time_s=0.5, num_samples=6),
    run(64, "succeeded", 0, 20, step_time_s=1.0, num_samples=6),
]
"""A launch of 20 s: six steps of half a second and six of one, and 11 s around them."""


def test_before_the_first_launch_steps_are_as_predicted_and_its_start_up_is_assumed() -> None:
    waiting = [run(batch, "pending", nodes=2, predicted_step_time_s=batch / 16) for batch in (16, 32)]
    found = cost(waiting)
    assert (found.spent_gpu_seconds, found.spent_usd) == (0.0, 0.0)
    assert (found.launches_left, found.runs_left) == (1, 2)
    assert found.left_s == pytest.approx(30 + 6 * (1 + 2))
    assert found.left_gpu_seconds == pytest.approx(2 * RANKS * found.left_s)
    assert found.left_usd == pytest.approx(2 * 3.0 * found.left_s / 3600)
    assert cost(waiting, share_launches=False).left_s == pytest.approx(2 * 30 + 6 * (1 + 2))
    assert cost(waiting, cluster={"max_nodes": 8}).left_usd is None


def test_a_launch_discards_three_steps_at_most_of_each_batch_but_its_first() -> None:
    """As in the agent, 5 steps of the first batch and 3 of each further batch are discarded; 5 of each are measured."""
    instruction = INSTRUCTION | {"profiling_warmup_steps": 5}
    waiting = [run(b, "pending", predicted_step_time_s=1.0, instruction=instruction) for b in (64, 32, 16)]
    assert cost(waiting).left_s == pytest.approx(30 + 10 + 8 + 8)
    assert cost(waiting, share_launches=False).left_s == pytest.approx(3 * (30 + 10))
    ended = run(16, "succeeded", 1, 10, step_time_s=1.0, num_samples=10, instruction=instruction)
    under_way = run(32, "running", 0, predicted_step_time_s=1.0, instruction=instruction)
    assert cost([ended, under_way], now_s=11).left_s == pytest.approx(8)
    done = run(32, "succeeded", 0, 19, step_time_s=1.0, num_samples=8, instruction=instruction)
    waiting = [run(16, "pending", nodes=2, predicted_step_time_s=1.0, instruction=instruction)]
    assert cost([ended, done, *waiting]).left_s == pytest.approx(1 + 10)


def test_what_the_search_may_add_counts_as_the_dearest_launch_up_to_the_cap() -> None:
    waiting = [run(batch, "pending", nodes=2, predicted_step_time_s=batch / 32) for batch in (32, 64)]
    found = cost([*LAUNCH, *waiting])
    further = 8 - 2
    assert found.launches_at_most == 1 + further
    assert found.at_most_s == pytest.approx(found.left_s + further * 29), "as long as the launch that is left"
    assert found.left_usd is not None
    assert found.at_most_usd == pytest.approx((1 + further) * found.left_usd)
    found = cost([*LAUNCH, *waiting], options={"precision": ["fp32", "bf16"], "compile": ["off", "on"]}, epochs=2)
    assert found.launches_at_most == 1 + 8 - 2
    found = cost([*LAUNCH, *waiting], options={"precision": ["fp32", "bf16"]})
    assert found.launches_at_most == 1 + 6 - 2
    assert cost([*LAUNCH, *waiting], search="full").launches_at_most == 1
    assert cost(LAUNCH).launches_at_most == 0, "the plan is done"


def test_a_launch_to_come_starts_up_once_as_earlier_ones_did() -> None:
    waiting = [run(batch, "pending", nodes=2, predicted_step_time_s=batch / 32) for batch in (32, 64)]
    found = cost([*LAUNCH, *waiting])
    assert found.spent_gpu_seconds == pytest.approx(20 * RANKS)  # the two runs share the launch
    assert found.left_s == pytest.approx(11 + 6 * (1 + 2))
    early = [replace(each, num_samples=3) for each in LAUNCH]
    assert cost([*early, *waiting]).left_s == pytest.approx((20 - 4.5) + 6 * (1 + 2))


def test_rows_of_other_ranks_are_no_steps_of_a_launch() -> None:
    waiting = [run(32, "pending", nodes=2, predicted_step_time_s=1.0)]
    crowd = [replace(each, num_samples=6 + 63) for each in LAUNCH]
    assert cost([*crowd, *waiting]).left_s == cost([*LAUNCH, *waiting]).left_s == pytest.approx(11 + 6)


def test_a_launch_in_progress_has_less_left_and_what_ended_in_it_is_not_to_come() -> None:
    half = [
        run(32, "succeeded", 111, 3, step_time_s=0.5, num_samples=6, nodes=2),
        run(64, "running", 100, predicted_step_time_s=2.0, nodes=2),
    ]
    found = cost([*LAUNCH, *half], now_s=114)
    assert (found.launches_left, found.runs_left) == (1, 1)
    assert found.left_s == pytest.approx(6 * 2), "it has started up"
    assert found.spent_gpu_seconds == pytest.approx(20 * RANKS + 14 * 2 * RANKS)


def test_a_launch_that_died_ends_with_its_lease_and_is_to_come_again() -> None:
    """The run stays `running` until the next claim, which may be days later."""
    expires = BEGAN + timedelta(seconds=220)
    died = run(64, "running", 100, nodes=2, predicted_step_time_s=2.0, lease_expires_at=expires)
    alive = cost([*LAUNCH, died], now_s=219)
    assert (alive.spent_gpu_seconds, alive.left_s) == (pytest.approx(20 * RANKS + 119 * 2 * RANKS), 6 * 2)
    found = cost([*LAUNCH, died], now_s=50_000)
    assert found.spent_gpu_seconds == pytest.approx(20 * RANKS + 120 * 2 * RANKS)
    assert (found.launches_left, found.left_s) == (1, pytest.approx(11 + 6 * 2))


def test_launches_of_one_cluster_at_different_times_are_counted_without_the_pause_between_them() -> None:
    again = run(128, "failed", 1000, 7)
    assert cost([*LAUNCH, again]).spent_gpu_seconds == pytest.approx((20 + 7) * RANKS)
    assert cost([*LAUNCH, again], share_launches=False).spent_gpu_seconds == pytest.approx((3 + 20 + 7) * RANKS)


def test_a_registered_job_says_what_its_plan_costs_from_what_is_known_of_the_hardware(cluster: Cluster) -> None:
    job = cluster.register(spec()).job
    assert all(each.predicted_step_time_s for each in job.plan)
    found = job.profiling_cost
    assert found is not None
    assert (found.launches_left, found.runs_left) == (2, 6)
    assert 2 * 30 < found.left_s < 2 * 30 + 6 * 35
    assert found.left_usd is not None
    cluster.work(job.id)
    after = cluster.job(job.id).profiling_cost
    assert after is not None
    assert (after.launches_left, after.left_s, after.left_usd) == (0, 0.0, 0.0)


def test_a_launch_that_ended_without_a_measurement_tells_no_start_up() -> None:
    quick = [run(64, "cancelled", at, 3, num_samples=1, step_time_s=1e-3) for at in (0, 10, 20)]
    assert cost([*quick, run(64, "pending", nodes=2, predicted_step_time_s=1.0)]).left_s == pytest.approx(30 + 6)


def test_the_time_between_an_interrupted_launch_and_the_next_is_not_paid_for(
    sqlite_store: Store, clock: ManualClock
) -> None:
    cluster = Cluster(sqlite_store)
    job_id = cluster.register(spec()).job.id
    for back in ("reported", "expired"):
        claimed = runs.claim(sqlite_store, ANONYMOUS, job_id, wire.ClaimRequest(holder="launcher", lease_s=60)).run
        assert claimed is not None
        cluster.patch(claimed.id, "running")
        if back == "reported":
            cluster.patch(claimed.id, "pending")
        clock.advance(50_000)
    again = runs.claim(sqlite_store, ANONYMOUS, job_id, wire.ClaimRequest(holder="launcher")).run
    assert again is not None
    assert again.id == claimed.id
    cluster.execute(again)
    spent = cluster.job(job_id).profiling_cost
    assert spent is not None
    assert spent.spent_gpu_seconds < 100
