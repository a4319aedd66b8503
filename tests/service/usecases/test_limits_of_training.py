"""Tests that the remaining steps of training are counted from its checkpoint, not from the start of its process."""

from __future__ import annotations

import pytest

import tula_wire as wire
from tests.service.usecases.cluster import Cluster, spec
from tests.support.clock import ManualClock
from tula_service.analysis.alarm import usd_per_s
from tula_service.errors import InvalidInput
from tula_wire.bounds import MAX_DURATION_S

SMALL = wire.Configuration(num_nodes=1, ranks_per_node=2, local_batch_size=32)
LARGE = wire.Configuration(num_nodes=1, ranks_per_node=2, local_batch_size=128)


def registered(cluster: Cluster, **limits: float | str) -> str:
    """Register a job of 10 epochs over 100,000 examples with these limits; profile one configuration; return its id."""
    job_id = cluster.register(spec(limits=limits, profiling={"share_launches": False, "max_runs": 1})).job.id
    cluster.work(job_id)
    return job_id


def send(cluster: Cluster, run: wire.Run, first_step: int, *, steps: int = 10, epochs_before: float = 0.0) -> None:
    """Send one-second steps from `first_step` on, as a process that began after `epochs_before` epochs."""
    numbers = list(range(first_step, first_step + steps))
    cluster.send(run, [1.0] * steps, step=numbers, epochs_before=epochs_before)


@pytest.mark.parametrize("epochs_before", [0.0, 2.5, 9.75])
def test_a_resumed_training_has_left_what_its_checkpoint_did_not_cover(cluster: Cluster, epochs_before: float) -> None:
    job_id = registered(cluster, deadline_s=60.0)
    run = cluster.train(job_id, SMALL)
    send(cluster, run, 50, epochs_before=epochs_before)
    advice = cluster.events(job_id, "advice")[-1]
    left = (10 - epochs_before) * 100_000 / 64 - 60
    assert advice["steps_left"] == pytest.approx(left)
    assert advice["projected"] == pytest.approx(left * 1.0, rel=0.01)  # the clock stands still
    assert f"with {left:,.0f} steps left" in advice["sentence"]


def test_earlier_progress_counts_in_examples_on_another_batch(cluster: Cluster) -> None:
    job_id = registered(cluster, deadline_s=60.0)
    first = cluster.train(job_id, SMALL)
    send(cluster, first, 0)
    second = cluster.train(job_id, LARGE, continues=first.id)
    send(cluster, second, 50, epochs_before=4.0)
    advice = cluster.events(job_id, "advice")[-1]
    assert advice["steps_left"] == pytest.approx((10 - 4) * 100_000 / 256 - 60)


def test_nothing_is_left_of_a_training_beyond_its_epochs(cluster: Cluster) -> None:
    job_id = registered(cluster, deadline_s=60.0)
    run = cluster.train(job_id, SMALL)
    send(cluster, run, 50, epochs_before=12.0)
    assert cluster.events(job_id, "advice") == []


def test_time_and_money_of_earlier_runs_count_toward_the_limits(cluster: Cluster, clock: ManualClock) -> None:
    job_id = registered(cluster, deadline_s=1000.0, budget_usd=0.1)
    first = cluster.train(job_id, wire.Configuration(num_nodes=2, ranks_per_node=2, local_batch_size=32))
    clock.advance(300.0)
    cluster.patch(first.id, "out_of_memory")
    clock.advance(5000.0)  # waiting for a machine is no training time
    second = cluster.train(job_id, SMALL, continues=first.id)
    clock.advance(100.0)
    third = cluster.train(job_id, SMALL, continues=second.id)  # the second was killed before it said anything
    send(cluster, third, 50, epochs_before=9.9)
    left = 0.1 * 100_000 / 64 - 60
    (advice,) = cluster.events(job_id, "advice")  # 300 s and a hundred steps of a second hold the deadline
    assert advice["kind"] == "budget"
    assert advice["projected"] == pytest.approx((300 * 2 + left * 1.0) * 3.0 / 3600)
    assert "including 5 min of earlier starts" in advice["sentence"]


def test_a_training_that_may_not_exceed_its_limits_gets_the_time_that_they_leave(
    cluster: Cluster, clock: ManualClock
) -> None:
    warned = cluster.train(registered(cluster, deadline_s=1000.0), SMALL)
    assert warned.time_limit_s is None
    rich = cluster.train(registered(cluster, budget_usd=1e12, on_breach="stop"), SMALL)
    assert wire.Run.model_validate(rich.model_dump()).time_limit_s == MAX_DURATION_S
    job_id = registered(cluster, deadline_s=1000.0, budget_usd=0.5, on_breach="stop")
    first = cluster.train(job_id, SMALL)
    assert first.time_limit_s == pytest.approx(0.5 / 3.0 * 3600)
    clock.advance(500.0)
    cluster.patch(first.id, "cancelled")
    second = cluster.train(job_id, SMALL, continues=first.id)
    assert second.time_limit_s == pytest.approx((0.5 - 500 * 3.0 / 3600) / 3.0 * 3600)
    clock.advance(100.0)
    stopped = cluster.patch(second.id, "cancelled", end_cause="time_limit", message="Stopped after 9 steps.")
    assert stopped.end_cause == "time_limit"
    assert stopped.message is not None
    assert stopped.message.endswith("9 steps. The training has spent 10 min and $0.5, including earlier starts.")
    with pytest.raises(InvalidInput, match=r"spent 10 min and \$0.5.*raise limits.deadline_s") as refused:
        cluster.train(job_id, SMALL, continues=second.id)
    assert refused.value.field == "limits.on_breach"


def test_without_a_starting_epoch_a_resumed_training_gets_no_projection(cluster: Cluster, clock: ManualClock) -> None:
    job_id = registered(cluster, deadline_s=1000.0)
    first = cluster.train(job_id, SMALL)
    clock.advance(300.0)
    cluster.patch(first.id, "failed")
    second = cluster.train(job_id, SMALL, continues=first.id)
    cluster.send(second, [1.0] * 10, step=list(range(50, 60)))  # without epochs_before
    assert cluster.events(job_id, "advice") == []
    cluster.send(second, [1.0] * 4, step=list(range(110, 114)), epochs_before=0.0)  # too few for an alarm of speed
    assert [advice["kind"] for advice in cluster.events(job_id, "advice")] == ["deadline"]


def test_a_run_that_another_continues_has_ended(cluster: Cluster) -> None:
    job_id = registered(cluster)
    first = cluster.train(job_id, SMALL)
    cluster.train(job_id, SMALL, continues=first.id)
    with cluster.store.reading() as tx:
        ended = tx.runs.get(first.id)
    assert (ended.state, ended.message) == (
        "failed",
        "Another run continued this training before this run reported its end.",
    )
    assert cluster.job(job_id).state == "training"


@pytest.mark.parametrize("what", ["nothing", "a profiling run", "another job's"])
def test_only_a_training_run_of_the_same_job_is_continued(cluster: Cluster, what: str) -> None:
    job_id = registered(cluster)
    profiled = cluster.job(job_id).plan[0].id
    other = cluster.register(spec(name="other")).job.id
    elsewhere = cluster.train(other, SMALL).id
    named = {"nothing": "run-0", "a profiling run": profiled, "another job's": elsewhere}[what]
    with pytest.raises(InvalidInput, match="is not a training run of this job") as caught:
        cluster.train(job_id, SMALL, continues=named)
    assert caught.value.field == "continues"


def test_limits_are_projected_again_after_a_launcher_restarts_its_ranks(cluster: Cluster) -> None:
    job_id = registered(cluster, deadline_s=1500.0)
    run = cluster.train(job_id, SMALL)
    send(cluster, run, 500, epochs_before=9.0)  # 1 epoch less 510 steps: 1,052 s
    assert "deadline" not in [advice["kind"] for advice in cluster.events(job_id, "advice")]
    send(cluster, run, 0, epochs_before=8.5)  # further back, and counted from zero: 2,334 s
    assert [advice["kind"] for advice in cluster.events(job_id, "advice")].count("deadline") == 1


def test_a_second_costs_nodes_and_the_memory_they_use() -> None:
    priced = spec(cluster={"max_nodes": 4, "ranks_per_node": 2, "price": {"usd_per_gb_hour": 0.5}})
    where = wire.Configuration(num_nodes=4, ranks_per_node=2, local_batch_size=32)
    assert usd_per_s(priced, where, 10e9) == pytest.approx(4 * 2 * 10 * 0.5 / 3600)
    assert usd_per_s(priced, where, None) is None
    spot = {"usd_per_node_hour": 1.8, "interruptions_per_node_hour": 1.0}
    only_spot = spec(cluster={"max_nodes": 4, "ranks_per_node": 2, "price": {"spot": spot}})
    assert usd_per_s(only_spot, where, None) == pytest.approx(4 * 1.8 / 3600)
