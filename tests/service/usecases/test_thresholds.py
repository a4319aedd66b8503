"""Thresholds of gradient scaling: versioned, tuned from what training reports, taken back when it hurts."""

from __future__ import annotations

import numpy as np
import pytest

import tula_wire as wire
from tests.service.usecases.cluster import Cluster
from tula_service.usecases import thresholds
from tula_service.usecases.access import ANONYMOUS


@pytest.fixture
def training(cluster: Cluster) -> tuple[Cluster, str, wire.Run]:
    """A job in training at a global batch of 1024."""
    job_id = cluster.register().job.id
    configuration = wire.Configuration(num_nodes=4, ranks_per_node=2, local_batch_size=128)
    return cluster, job_id, cluster.train(job_id, configuration)


def current(cluster: Cluster, job_id: str, policy: str | None = None) -> wire.ScalingThresholds:
    """The thresholds that an agent gets."""
    body = thresholds.current(cluster.store, ANONYMOUS, job_id, policy=policy).body
    assert body is not None
    return wire.read(wire.ScalingThresholds, body)


def rough(steps: int, level: float, seed: int = 0) -> list[float]:
    """Gradient variability with its 90th percentile near `level`."""
    values = np.random.default_rng(seed).uniform(0.0, level / 0.9, steps)
    return [float(value) for value in values]


def test_before_any_telemetry_the_defaults_stand(training: tuple[Cluster, str, wire.Run]) -> None:
    cluster, job_id, _ = training
    found = current(cluster, job_id)
    assert (found.version, found.policy, found.delta, found.small_batch_size) == (1, "gain", 0.5, None)


def test_an_unchanged_tag_costs_no_body_and_a_change_gets_a_new_one(training: tuple[Cluster, str, wire.Run]) -> None:
    cluster, job_id, run = training
    first = thresholds.current(cluster.store, ANONYMOUS, job_id)
    again = thresholds.current(cluster.store, ANONYMOUS, job_id, etag=f'W/{first.etag}, "other"')
    assert (again.body, again.etag) == (None, first.etag)
    cluster.report(run, gradient_noise_scale=[300.0] * 200)
    changed = thresholds.current(cluster.store, ANONYMOUS, job_id, etag=first.etag)
    assert changed.etag != first.etag
    assert changed.body is not None


def test_delta_follows_the_observed_variability_of_the_gated_policies_only(
    training: tuple[Cluster, str, wire.Run],
) -> None:
    cluster, job_id, run = training
    cluster.report(run, gradient_variability=rough(400, 0.15))
    tuned = current(cluster, job_id, "ags")
    assert tuned.version == 2
    assert tuned.delta == pytest.approx(0.15, rel=0.15)
    assert "vary by less than" in tuned.reason
    assert current(cluster, job_id, "gain").delta == 0.5
    assert current(cluster, job_id, "gain").small_batch_size is None


def test_polling_between_looks_changes_nothing(training: tuple[Cluster, str, wire.Run]) -> None:
    cluster, job_id, run = training
    cluster.report(run, gradient_variability=rough(200, 0.15))
    version = current(cluster, job_id).version
    cluster.report(run, first_step=200, gradient_variability=rough(thresholds.TUNE_EVERY_STEPS - 1, 3.0))
    assert current(cluster, job_id).version == version


def test_noise_scale_and_critical_batch_come_with_their_error(training: tuple[Cluster, str, wire.Run]) -> None:
    cluster, job_id, run = training
    noise = np.random.default_rng(0).lognormal(np.log(500.0), 0.3, 400)
    cluster.report(run, gradient_noise_scale=noise.tolist())
    found = current(cluster, job_id)
    assert found.gradient_noise_scale == pytest.approx(500.0, rel=0.1)
    assert found.gradient_noise_scale_error is not None
    assert 0 < found.gradient_noise_scale_error < 100
    assert found.critical_batch_size == found.gradient_noise_scale
    assert [event["version"] for event in cluster.events(job_id, "scaling")] == [2]


def test_a_setting_that_hurts_validation_accuracy_is_taken_back_for_good(
    training: tuple[Cluster, str, wire.Run],
) -> None:
    cluster, job_id, run = training
    accuracy = np.full(200, np.nan)
    accuracy[[20, 60, 100, 140, 180]] = [0.70, 0.72, 0.74, 0.75, 0.76]
    cluster.report(run, gradient_variability=rough(200, 0.5), validation_accuracy=accuracy.tolist())
    before = current(cluster, job_id, "ags")
    cluster.report(run, first_step=200, gradient_variability=rough(200, 0.1, 1))
    harmful = current(cluster, job_id, "ags")
    assert harmful.version > before.version
    fallen = np.full(200, np.nan)
    fallen[[50, 100, 150]] = [0.60, 0.58, 0.59]
    cluster.report(run, first_step=400, gradient_variability=rough(200, 0.1, 2), validation_accuracy=fallen.tolist())
    after = current(cluster, job_id, "ags")
    assert after.version > harmful.version
    assert (after.delta, after.small_batch_size) == (before.delta, before.small_batch_size)
    assert "taken back" in after.reason
    assert "accuracy fell" in after.reason
    cluster.report(run, first_step=600, gradient_variability=rough(300, 0.1, 3))
    assert current(cluster, job_id, "ags").delta == before.delta
