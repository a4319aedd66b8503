"""Thresholds of gradient scaling: versioned, tuned from what training reports, rolled back when it hurts."""

from __future__ import annotations

import numpy as np
import pytest

import tula_wire as wire
from tests.service.usecases.cluster import Cluster
from tula_service.errors import InvalidInput
from tula_service.usecases import scaling
from tula_service.usecases.access import ANONYMOUS


@pytest.fixture
def training(cluster: Cluster) -> tuple[Cluster, str, wire.Run]:
    """A job in training at a global batch of 1024."""
    job_id = cluster.register().job.id
    configuration = wire.Configuration(num_nodes=4, ranks_per_node=2, local_batch_size=128)
    return cluster, job_id, cluster.train(job_id, configuration)


def current(cluster: Cluster, job_id: str, policy: str | None = None) -> wire.ScalingThresholds:
    """The thresholds that an agent gets."""
    return scaling.current(cluster.store, ANONYMOUS, job_id, policy=policy)


def rough(steps: int, level: float, seed: int = 0) -> list[float]:
    """Gradient variability with its 90th percentile near `level`."""
    values = np.random.default_rng(seed).uniform(0.0, level / 0.9, steps)
    return [float(value) for value in values]


def test_before_any_telemetry_the_script_decides(training: tuple[Cluster, str, wire.Run]) -> None:
    cluster, job_id, _ = training
    found = current(cluster, job_id)
    assert (found.version, found.policy) == (1, "gain")
    said = found.model_dump(exclude={"version", "policy", "reason"})
    assert set(said.values()) == {None}  # so that an agent keeps what its script was given


def test_delta_follows_the_observed_variability_of_the_gated_policies_only(
    training: tuple[Cluster, str, wire.Run],
) -> None:
    cluster, job_id, run = training
    cluster.report(run, gradient_variability=rough(400, 0.15))
    tuned = current(cluster, job_id, "ags")
    assert tuned.version == 2
    assert tuned.delta == pytest.approx(0.15, rel=0.15)
    assert "the 90th percentile of recent gradient variability" in tuned.reason
    assert current(cluster, job_id, "gain").delta is None


def test_polling_between_looks_changes_nothing(training: tuple[Cluster, str, wire.Run]) -> None:
    cluster, job_id, run = training
    cluster.report(run, gradient_variability=rough(200, 0.15))
    version = current(cluster, job_id).version
    cluster.report(run, first_step=200, gradient_variability=rough(scaling.TUNE_EVERY_STEPS - 1, 3.0))
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


def test_a_setting_that_hurts_validation_accuracy_is_rolled_back_for_good(
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
    cluster.report(
        run,
        first_step=400,
        gradient_variability=rough(200, 0.1, 2),
        validation_accuracy=fallen.tolist(),
        thresholds_version=[float(harmful.version), *[np.nan] * 199],
    )
    after = current(cluster, job_id, "ags")
    assert after.version > harmful.version
    assert after.delta == before.delta
    assert "rolled back" in after.reason
    assert "accuracy fell" in after.reason
    cluster.report(run, first_step=600, gradient_variability=rough(300, 0.1, 3))
    assert current(cluster, job_id, "ags") == after  # and said once


def test_accuracy_counts_for_the_settings_that_the_ranks_had_taken_up(training: tuple[Cluster, str, wire.Run]) -> None:
    cluster, job_id, run = training
    good = np.full(200, np.nan)
    good[[20, 60, 100, 140, 180]] = [0.70, 0.72, 0.74, 0.75, 0.76]
    cluster.report(run, gradient_variability=rough(200, 0.1), validation_accuracy=good.tolist())
    harmful = current(cluster, job_id, "ags").version
    late = np.full(200, np.nan)
    late[[20, 120, 160]] = [0.77, 0.60, 0.58]  # the first of them still under the script's own settings
    taken_up = [np.nan] * 50 + [float(harmful)] + [np.nan] * 149
    cluster.report(
        run,
        first_step=200,
        gradient_variability=rough(200, 0.1, 1),
        validation_accuracy=late.tolist(),
        thresholds_version=taken_up,
    )
    after = current(cluster, job_id, "ags")
    assert "accuracy fell from 0.77 at step 220" in after.reason


def test_tuning_starts_from_the_numbers_in_force_at_the_agent(training: tuple[Cluster, str, wire.Run]) -> None:
    cluster, job_id, run = training
    cluster.report(run, gradient_variability=rough(400, 0.4), delta=[0.4, *[np.nan] * 399])
    assert current(cluster, job_id, "ags").version == 1  # 0.4 is what the variability asks for
    cluster.report(run, first_step=400, gradient_variability=rough(800, 0.1))
    tuned = current(cluster, job_id, "ags")
    assert tuned.delta == pytest.approx(0.1, rel=0.15)


def test_nonsense_that_an_agent_reports_of_its_settings_costs_nothing(
    training: tuple[Cluster, str, wire.Run],
) -> None:
    """A version that never was, and thresholds that cannot be: looked at before an agent is answered, so never long."""
    cluster, job_id, run = training
    accuracy = [0.7 + 0.0001 * step for step in range(400)]
    nonsense = {"thresholds_version": [1e300] * 400, "delta": [-1.0] * 400, "small_batch_size": [0.25] * 400}
    cluster.report(run, gradient_variability=rough(400, 0.15), validation_accuracy=accuracy, **nonsense)
    assert current(cluster, job_id, "ags").delta == pytest.approx(0.15, rel=0.15)
    cluster.report(run, first_step=400, validation_accuracy=accuracy, **nonsense)
    assert "rolled back" not in current(cluster, job_id, "ags").reason


def change(cluster: Cluster, job_id: str, of: str | None = None, **body: object) -> wire.ScalingThresholds:
    """What a user sets, for the policy `of`."""
    patch = wire.ScalingPatch.model_validate(body)
    return scaling.change(cluster.store, ANONYMOUS, job_id, patch, policy=of)


def test_a_users_policy_goes_before_the_scripts_until_it_is_given_back(training: tuple[Cluster, str, wire.Run]) -> None:
    cluster, job_id, _ = training
    chosen = change(cluster, job_id, policy="ags", granularity="tensor", s_max=3.0)
    assert (chosen.version, chosen.policy, chosen.granularity, chosen.s_max) == (2, "ags", "tensor", 3.0)
    assert current(cluster, job_id, "gain") == chosen
    assert "policy = ags" in chosen.reason
    freed = change(cluster, job_id, policy=None)
    assert freed.version == 3
    assert current(cluster, job_id, "gain").policy == "gain"
    assert current(cluster, job_id, "gain").s_max is None  # it was set for ags
    assert current(cluster, job_id, "ags").s_max == 3.0
    assert [event["version"] for event in cluster.events(job_id, "scaling")] == [2, 3]


def test_setting_what_is_set_already_makes_no_version(training: tuple[Cluster, str, wire.Run]) -> None:
    cluster, job_id, _ = training
    assert change(cluster, job_id, "static", static_scale=1.5).version == 2
    assert change(cluster, job_id, "static", static_scale=1.5).version == 2
    assert change(cluster, job_id, "static", static_scale=None).version == 3
    assert current(cluster, job_id, "static").static_scale is None


def test_the_policy_static_without_a_factor_is_refused(training: tuple[Cluster, str, wire.Run]) -> None:
    """Agents would refuse it."""
    cluster, job_id, _ = training
    with pytest.raises(InvalidInput, match="give static_scale") as refused:
        change(cluster, job_id, policy="static")
    assert refused.value.field == "static_scale"
    assert change(cluster, job_id, policy="static", static_scale=1.5).static_scale == 1.5
    with pytest.raises(InvalidInput, match="give static_scale"):
        change(cluster, job_id, static_scale=None)
    change(cluster, job_id, policy="measure", static_scale=None)
    assert change(cluster, job_id, "static", static_scale=None).static_scale is None


def test_a_delta_of_a_policy_that_has_none_is_refused(training: tuple[Cluster, str, wire.Run]) -> None:
    cluster, job_id, _ = training
    for of, body in ((None, {}), ("none", {}), (None, {"policy": "measure"})):
        with pytest.raises(InvalidInput, match="delta means nothing under the policy") as refused:
            change(cluster, job_id, of, delta=0.3, **body)
        assert refused.value.field == "delta"
    assert change(cluster, job_id, delta=None).version == 1
    assert change(cluster, job_id, "ags", delta=0.3).delta == 0.3


def test_tuning_leaves_alone_what_a_user_set(training: tuple[Cluster, str, wire.Run]) -> None:
    cluster, job_id, run = training
    change(cluster, job_id, "ags", delta=0.7)
    cluster.report(run, gradient_variability=rough(400, 0.15))
    tuned = current(cluster, job_id, "ags")
    assert tuned.delta == 0.7
    assert current(cluster, job_id, "static").delta == pytest.approx(0.15, rel=0.15)
    change(cluster, job_id, "ags", delta=None)
    cluster.report(run, first_step=400, gradient_variability=rough(400, 0.15))
    assert current(cluster, job_id, "ags").delta == pytest.approx(0.15, rel=0.15)


def test_numbers_that_the_script_passed_are_never_tuned(training: tuple[Cluster, str, wire.Run]) -> None:
    cluster, job_id, run = training
    cluster.report(run, gradient_variability=rough(400, 0.15), scripted_delta=[0.9, *[np.nan] * 399])
    assert current(cluster, job_id, "ags").delta is None


def test_bounds_that_cross_are_refused_by_name(training: tuple[Cluster, str, wire.Run]) -> None:
    cluster, job_id, _ = training
    change(cluster, job_id, "ags", s_min=0.5)
    with pytest.raises(InvalidInput, match=r"s_min = 0\.5") as refused:
        change(cluster, job_id, "ags", s_max=0.1)
    assert refused.value.field == "s_max"
    with pytest.raises(InvalidInput, match=r"s_max = 2 would be below s_min = 3:"):
        change(cluster, job_id, "ags", s_min=3.0, s_max=2.0)
    assert current(cluster, job_id, "ags").s_max is None
    assert change(cluster, job_id, "ags", s_min=None).s_min is None
    assert change(cluster, job_id, "ags", s_max=0.1).s_max == 0.1
