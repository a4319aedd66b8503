"""Tests that the gradient-scaling values that users set are stored by job and policy, with a version."""

from __future__ import annotations

import numpy as np
import pytest

import tula_wire as wire
from tests.service.usecases.cluster import Cluster, spec
from tula_service.errors import InvalidInput
from tula_service.usecases import scaling
from tula_service.usecases.access import ANONYMOUS
from tula_service.usecases.job_data import load_job_data


@pytest.fixture
def job_id(cluster: Cluster) -> str:
    return cluster.register().job.id


def current(cluster: Cluster, job_id: str, policy: wire.ScalingPolicy = "gain") -> wire.ScalingThresholds:
    """Return the values that an agent gets."""
    return scaling.current(cluster.store, ANONYMOUS, job_id, policy)


def change(
    cluster: Cluster, job_id: str, policy: wire.ScalingPolicy = "gain", **body: object
) -> wire.ScalingThresholds:
    return scaling.change(cluster.store, ANONYMOUS, job_id, wire.ScalingPatch.model_validate(body), policy)


def test_before_a_user_sets_any_number_the_script_decides(cluster: Cluster, job_id: str) -> None:
    numbers = current(cluster, job_id)
    assert (numbers.version, numbers.policy) == (1, "gain")
    assert set(numbers.model_dump(exclude={"version", "policy"}).values()) == {None}


def test_numbers_belong_to_one_policy_and_null_gives_them_back(cluster: Cluster, job_id: str) -> None:
    assert change(cluster, job_id, "static", static_scale=1.5).version == 2
    assert change(cluster, job_id, "static", static_scale=1.5).version == 2  # nothing changed
    assert change(cluster, job_id, "ags", delta=0.3, s_max=3.0).delta == 0.3
    assert (current(cluster, job_id).version, current(cluster, job_id).s_max) == (1, None)
    assert current(cluster, job_id, "ags").s_max == 3.0
    freed = change(cluster, job_id, "static", static_scale=None)
    assert (freed.version, freed.static_scale) == (3, None)
    assert current(cluster, job_id, "static") == freed
    assert [event["version"] for event in cluster.events(job_id, "scaling")] == [2, 2, 3]


def test_a_delta_of_a_policy_that_has_none_is_refused(cluster: Cluster, job_id: str) -> None:
    with pytest.raises(InvalidInput, match="delta is not used by the policy") as refused:
        change(cluster, job_id, delta=0.3)
    assert refused.value.field == "delta"
    assert change(cluster, job_id, delta=None).version == 1


def test_a_fixed_factor_that_no_batch_of_the_job_asks_for_is_refused(cluster: Cluster) -> None:
    nodes = {"instance_type": "a", "max_nodes": 4, "ranks_per_node": 1}
    job_id = cluster.register(
        spec(cluster=nodes, batch={"min_local_batch_size": 32, "max_local_batch_size": 64})
    ).job.id
    assert change(cluster, job_id, "static", static_scale=8.0).static_scale == 8.0
    with pytest.raises(
        InvalidInput, match=r"static_scale = 9 exceeds 8, the ratio of the job's largest batch"
    ) as refused:
        change(cluster, job_id, "static", static_scale=9.0)
    assert refused.value.field == "static_scale"
    assert change(cluster, job_id, "static", static_scale=16.0, small_batch_size=16).static_scale == 16.0
    with pytest.raises(InvalidInput, match="static_scale = 16 exceeds 8"):
        change(cluster, job_id, "static", small_batch_size=None)


def test_bounds_that_cross_are_refused_by_name(cluster: Cluster, job_id: str) -> None:
    change(cluster, job_id, "ags", s_min=0.5)
    with pytest.raises(InvalidInput, match=r"s_min = 0\.5") as refused:
        change(cluster, job_id, "ags", s_max=0.1)
    assert refused.value.field == "s_max"
    with pytest.raises(InvalidInput, match=r"s_max = 2 would be less than s_min = 3:"):
        change(cluster, job_id, "ags", s_min=3.0, s_max=2.0)
    assert current(cluster, job_id, "ags").s_max is None
    assert change(cluster, job_id, "ags", s_min=None, s_max=0.1).s_max == 0.1


def test_the_noise_scale_that_a_training_reported_says_what_a_batch_is_worth(cluster: Cluster) -> None:
    job_id = cluster.register().job.id
    run = cluster.train(job_id, wire.Configuration(num_nodes=4, ranks_per_node=2, local_batch_size=128))
    noise = np.random.default_rng(0).lognormal(np.log(500.0), 0.3, 400)
    cluster.send(run, cluster.times(run.configuration, 4))
    cluster.report(run, gradient_noise_scale=noise.tolist())
    with cluster.store.reading() as tx:
        data = load_job_data(tx, tx.jobs.get(job_id))
    assert data.trained_noise_scale == pytest.approx(500.0, rel=0.1)


def test_the_largest_batch_of_a_script_that_accumulates_by_itself_counts_its_micro_steps(cluster: Cluster) -> None:
    nodes = {"instance_type": "a", "max_nodes": 4, "ranks_per_node": 1}
    batch = {"min_local_batch_size": 32, "max_local_batch_size": 64, "grad_accum_steps": 4}
    job_id = cluster.register(spec(cluster=nodes, batch=batch)).job.id
    assert change(cluster, job_id, "static", static_scale=32.0).static_scale == 32.0
    with pytest.raises(InvalidInput, match="static_scale = 33 exceeds 32"):
        change(cluster, job_id, "static", static_scale=33.0)
