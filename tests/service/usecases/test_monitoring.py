"""Tests that live monitoring soon detects a change of speed, raises no false alarm, and announces limits at risk."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

import tula_wire as wire
from tests.service.usecases.cluster import Cluster, overlapping, spec


@pytest.fixture
def trained(profiled: tuple[Cluster, str]) -> tuple[Cluster, str, wire.Run]:
    """Start training with the recommended configuration of a profiled job; return cluster, job and run."""
    cluster, job_id = profiled
    chosen = cluster.recommendation(job_id).chosen
    assert chosen is not None
    return cluster, job_id, cluster.train(job_id, chosen.configuration)


def feed(cluster: Cluster, run: wire.Run, steps: int, *, batch: int = 10) -> None:
    """Continue training, and send samples in batches as an agent does."""
    for _ in range(steps // batch):
        cluster.send(run, cluster.times(run.configuration, batch))


def test_steady_training_never_drifts(trained: tuple[Cluster, str, wire.Run]) -> None:
    cluster, job_id, run = trained
    for _ in range(20):
        cluster.send(run, cluster.times(run.configuration, 100))
    assert cluster.events(job_id, "drift") == []
    assert cluster.events(job_id, "advice") == []


def test_rows_that_are_resent_are_not_observed_again(trained: tuple[Cluster, str, wire.Run]) -> None:
    """Three slow steps do not count as a drift, however often they arrive; the detector needs 15."""
    cluster, job_id, run = trained
    feed(cluster, run, 100)
    slow = 10.0 * cluster.times(run.configuration, 3)
    first = cluster.sequence
    cluster.send(run, slow)
    for _ in range(4):
        cluster.sequence = first
        sent = cluster.send(run, [*slow, *cluster.times(run.configuration, 1)])
        assert sent.duplicates >= 3
    assert cluster.events(job_id, "drift") == []


def test_links_at_a_quarter_are_noticed_within_50_steps(trained: tuple[Cluster, str, wire.Run]) -> None:
    cluster, job_id, run = trained
    feed(cluster, run, 100)
    before = cluster.sequence
    cluster.step_time = partial(overlapping, bandwidth=0.25)
    feed(cluster, run, 50)
    (drift,) = cluster.events(job_id, "drift")
    assert drift["step"] - before < 50
    assert drift["alarm"] == "slower"
    assert drift["step_time_s"] > drift["expected_high_s"]
    assert drift["sentence"].startswith("Training has become slower than predicted: ")
    assert "tula predict" in drift["sentence"]
    assert cluster.job(job_id).state == "training"


def test_a_change_of_speed_leaves_earlier_measurements_as_they_were(trained: tuple[Cluster, str, wire.Run]) -> None:
    """Predictions remain those of the profiled speed, with a warning; the run with both speeds enters no fit."""
    cluster, job_id, run = trained
    before = cluster.recommendation(job_id)
    feed(cluster, run, 50)
    cluster.step_time = partial(overlapping, bandwidth=0.25)
    feed(cluster, run, 50)
    after = cluster.recommendation(job_id)
    assert after.model.num_runs == before.model.num_runs
    assert [c.step_time_s for c in after.candidates] == [c.step_time_s for c in before.candidates]
    assert any("slower" in warning for warning in after.model.warnings)


def test_a_training_that_is_slow_from_its_start_is_measured_as_it_is(trained: tuple[Cluster, str, wire.Run]) -> None:
    cluster, job_id, run = trained
    before = cluster.recommendation(job_id)
    cluster.step_time = partial(overlapping, bandwidth=0.25)
    feed(cluster, run, 50)
    assert cluster.recommendation(job_id).model.num_runs == before.model.num_runs + 1


def test_recovery_is_announced(trained: tuple[Cluster, str, wire.Run]) -> None:
    cluster, job_id, run = trained
    feed(cluster, run, 50)
    cluster.step_time = partial(overlapping, bandwidth=0.25)
    feed(cluster, run, 50)
    cluster.step_time = overlapping
    feed(cluster, run, 50)
    assert [event["alarm"] for event in cluster.events(job_id, "drift")] == ["slower", "recovered"]
    assert not any("slower" in warning for warning in cluster.recommendation(job_id).model.warnings)


@pytest.mark.parametrize(
    ("limits", "kind", "limit"),
    [({"deadline_s": 300.0, "budget_usd": 1e6}, "deadline", 300.0), ({"budget_usd": 0.2}, "budget", 0.2)],
)
def test_a_limit_that_will_not_hold_is_announced_once(
    cluster: Cluster, limits: dict[str, float], kind: str, limit: float
) -> None:
    job_id = cluster.register(spec(limits=limits, profiling={"max_runs": 2})).job.id
    cluster.work(job_id)
    run = cluster.train(job_id, wire.Configuration(num_nodes=1, ranks_per_node=2, local_batch_size=32))
    feed(cluster, run, 300)
    (advice,) = cluster.events(job_id, "advice")
    assert advice["kind"] == kind
    assert advice["projected"] > advice["limit"] == limit
    assert f"exceeds the {kind} of" in advice["sentence"]


def test_a_training_that_never_ran_at_the_predicted_speed_says_so(
    trained: tuple[Cluster, str, wire.Run],
) -> None:
    cluster, job_id, run = trained
    cluster.step_time = partial(overlapping, bandwidth=0.25)
    feed(cluster, run, 30)
    (drift,) = cluster.events(job_id, "drift")
    assert drift["sentence"].startswith("Training has always been")


@pytest.mark.parametrize("continued", [False, True])
def test_a_half_recovery_says_what_the_speed_became_and_how_it_compares(
    trained: tuple[Cluster, str, wire.Run], continued: bool
) -> None:
    cluster, job_id, run = trained
    feed(cluster, run, 50)
    cluster.step_time = partial(overlapping, bandwidth=0.2)
    feed(cluster, run, 50)
    if continued:
        run = cluster.train(job_id, run.configuration, continues=run.id)
    cluster.step_time = partial(overlapping, bandwidth=0.5)
    feed(cluster, run, 50)
    first, second = cluster.events(job_id, "drift")
    assert first["sentence"].startswith("Training has become slower than predicted: ")
    assert second["step_time_s"] > second["expected_high_s"]
    start = "Training has always been slower" if continued else "Training has become faster, but is still slower"
    assert second["sentence"].startswith(f"{start} than predicted: ")


@pytest.mark.parametrize("local_batch_size", [None, 128])
def test_a_training_that_was_restarted_recovers_to_what_was_profiled(
    trained: tuple[Cluster, str, wire.Run], local_batch_size: int | None
) -> None:
    """This holds for the same or another configuration, since the slow first run enters no prediction."""
    cluster, job_id, first = trained
    feed(cluster, first, 50)
    cluster.step_time = partial(overlapping, bandwidth=0.25)
    feed(cluster, first, 50)
    chosen = first.configuration
    if local_batch_size is not None:
        chosen = replace(chosen, local_batch_size=local_batch_size)
    second = cluster.train(job_id, chosen, continues=first.id)
    feed(cluster, second, 50)
    alarms = ["slower", "slower"]
    assert [event["alarm"] for event in cluster.events(job_id, "drift")] == alarms, "once for each run"
    cluster.step_time = overlapping
    feed(cluster, second, 60)
    assert [event["alarm"] for event in cluster.events(job_id, "drift")] == [*alarms, "recovered"]
    assert not any("slower" in warning for warning in cluster.recommendation(job_id).model.warnings)
    cluster.step_time = partial(overlapping, bandwidth=0.25)
    feed(cluster, second, 60)
    assert [event["alarm"] for event in cluster.events(job_id, "drift")] == [*alarms, "recovered", "slower"]
