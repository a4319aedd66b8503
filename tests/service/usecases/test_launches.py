"""Tests shared launches: the runs of one cluster are leased together, measured by one launch, and counted as one."""

from __future__ import annotations

import tula_wire as wire
from tests.service.usecases.cluster import Cluster, spec
from tests.support.clock import ManualClock
from tula_service.store import Store
from tula_service.usecases import jobs, runs
from tula_service.usecases.access import ANONYMOUS


def shared(**more: object) -> wire.JobSpec:
    return spec(profiling=more)


def claim(cluster: Cluster, job_id: str) -> list[wire.Run]:
    """Return the runs of the next launch, smallest batch first."""
    request = wire.ClaimRequest(holder="launcher", lease_s=60, whole_launch=True)
    claimed = runs.claim(cluster.store, ANONYMOUS, job_id, request)
    return [] if claimed.run is None else [*claimed.smaller, claimed.run]


def work(cluster: Cluster, job_id: str) -> list[list[wire.Run]]:
    """Execute launches until the plan is done; return the runs of each launch."""
    launches = []
    while leased := claim(cluster, job_id):
        launches.append(leased)
        for run in leased:
            if cluster.execute(run).state == "out_of_memory":
                break
        for run in leased:
            if runs.get(cluster.store, ANONYMOUS, run.id).state == "claimed":
                cluster.patch(run.id, "pending")
        assert len(launches) < 20
    return launches


def test_a_plan_of_shared_launches_finds_the_choice_in_few_launches(cluster: Cluster) -> None:
    job_id = cluster.register(shared()).job.id
    launches = work(cluster, job_id)
    for leased in launches:
        assert len({run.configuration.num_nodes for run in leased}) == 1
        batches = [run.configuration.local_batch_size for run in leased]
        assert batches == sorted(set(batches))
    assert [launches[0][0].configuration.num_nodes, launches[1][0].configuration.num_nodes] == [8, 1]
    assert 2 <= len(launches) <= 4
    job = cluster.job(job_id)
    assert job.state == "ready"
    assert {run.state for run in job.plan} == {"succeeded"}
    chosen = cluster.recommendation(job_id).chosen
    assert chosen is not None
    assert chosen.profiled


def test_the_budget_of_launches_is_kept_and_the_plan_says_what_is_left(cluster: Cluster) -> None:
    job_id = cluster.register(shared(max_runs=1)).job.id
    assert cluster.job(job_id).plan_reason == "3 profiling runs are still to be measured in 1 launch."
    assert len(work(cluster, job_id)) == 1
    assert cluster.job(job_id).plan_reason == "The budget of 1 launch (profiling.max_runs) is spent."


def test_out_of_memory_in_a_launch_bounds_the_batch_and_tries_no_larger_one(cluster: Cluster) -> None:
    cluster.capacity_bytes = 1e9 + 100 * 30e6  # between batches of 64 and 128
    job_id = cluster.register(shared()).job.id
    launches = work(cluster, job_id)
    assert [run.configuration.local_batch_size for run in launches[1]] == [32, 64]
    ended = {(run.configuration.local_batch_size, run.state) for run in cluster.job(job_id).plan}
    assert (128, "out_of_memory") in ended
    assert {state for batch, state in ended if batch > 128} == {"cancelled"}


def test_a_heartbeat_keeps_the_whole_launch_and_without_one_all_of_it_returns_to_the_plan(
    sqlite_store: Store, clock: ManualClock
) -> None:
    cluster = Cluster(sqlite_store)
    job_id = cluster.register(shared()).job.id
    leased = claim(cluster, job_id)
    for _ in range(4):
        clock.advance(40)
        cluster.patch(leased[-1].id, "running")
    again = claim(cluster, job_id)
    assert not {run.id for run in again} & {run.id for run in leased}
    clock.advance(100)
    assert {run.id for run in claim(cluster, job_id)} == {run.id for run in leased}


def test_a_launcher_that_asks_for_no_whole_launch_gets_one_run_at_a_time(cluster: Cluster) -> None:
    job_id = cluster.register(shared()).job.id
    assert len(cluster.work(job_id, most=6)) == 6
    assert {run.configuration.num_nodes for run in cluster.job(job_id).plan} >= {1, 8}
    assert "succeeded" in {run.state for run in cluster.job(job_id).plan}


def test_shared_launches_can_be_turned_off_and_the_plan_continues_with_single_runs(cluster: Cluster) -> None:
    job_id = cluster.register(shared()).job.id
    *smaller, largest = claim(cluster, job_id)
    for run in smaller:
        cluster.patch(run.id, "pending")
    cluster.execute(largest)
    changed = jobs.change(cluster.store, ANONYMOUS, job_id, wire.JobPatch(share_launches=False))
    assert not changed.spec.profiling.share_launches
    assert sum(run.state == "pending" for run in changed.plan) == 3  # of a design of four single runs
    assert len(cluster.work(job_id)) <= 7
    assert cluster.job(job_id).state == "ready"
