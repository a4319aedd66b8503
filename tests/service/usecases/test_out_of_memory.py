"""Tests that an out-of-memory error bounds the batch unless a larger batch fitted.

If no batch is left, the service names the error as the reason.
"""

from __future__ import annotations

import pytest

import tula_wire as wire
from tests.service.usecases.cluster import Cluster, spec
from tula_service.store import Store
from tula_service.usecases import runs
from tula_service.usecases.access import ANONYMOUS

GIB = 2**30


def own(cluster: Cluster, job_id: str, nodes: int, batch: int, *, kind: str = "profile") -> wire.Run:
    """Create a claimed run outside the plan."""
    configuration = wire.Configuration(num_nodes=nodes, ranks_per_node=2, local_batch_size=batch)
    request = wire.RunCreate.model_validate({"kind": kind, "configuration": configuration, "holder": "launcher"})
    return runs.create(cluster.store, ANONYMOUS, job_id, request)


def ran_out(cluster: Cluster, run: wire.Run) -> None:
    """Report that the run has ended with an out-of-memory error."""
    cluster.patch(run.id, "running")
    cluster.patch(run.id, "out_of_memory")


@pytest.mark.parametrize("kind", ["profile", "train"])
def test_an_out_of_memory_below_a_batch_that_fitted_takes_out_only_itself_and_names_both_runs(
    cluster: Cluster, kind: str
) -> None:
    wanted = spec(search="full", cluster={"max_nodes": 2, "ranks_per_node": 2}, batch={"max_local_batch_size": 64})
    job_id = cluster.register(wanted).job.id
    fitted = cluster.execute(own(cluster, job_id, 2, 64))
    failed = own(cluster, job_id, 1, 32, kind=kind)
    ran_out(cluster, failed)
    answer = cluster.recommendation(job_id)
    assert answer.chosen is not None
    assert {c.configuration for c in answer.candidates if c.excluded_by} == {failed.configuration}
    (said,) = [warning for warning in answer.model.warnings if "ran out of memory" in warning]
    assert f"{failed.id} (1 node, local batch 32)" in said
    assert f"{fitted.id} (2 nodes, local batch 64)" in said
    assert "other process" in said
    cluster.work(job_id)
    assert failed.configuration not in cluster.ran, "what failed is not tried again by itself"
    assert cluster.job(job_id).state == "ready"
    assert [run.configuration for run in cluster.register(wanted).runs] == [failed.configuration]


def test_a_batch_that_ran_out_of_memory_itself_is_no_witness_against_a_smaller_one(cluster: Cluster) -> None:
    job_id = cluster.register().job.id
    cluster.execute(own(cluster, job_id, 4, 256))
    cluster.execute(own(cluster, job_id, 1, 64))
    ran_out(cluster, own(cluster, job_id, 2, 256))
    ran_out(cluster, own(cluster, job_id, 2, 128))
    answer = cluster.recommendation(job_id)
    assert answer.max_local_batch_size["default"] < 128
    assert answer.chosen is not None
    assert answer.chosen.configuration.local_batch_size <= 64


def test_where_every_batch_ran_out_of_memory_the_sentence_names_memory_and_the_run(sqlite_store: Store) -> None:
    cluster = Cluster(sqlite_store, capacity_bytes=1e9)
    job_id = cluster.register().job.id
    cluster.work(job_id)
    smallest = min(
        (run for run in cluster.job(job_id).plan if run.state == "out_of_memory"),
        key=lambda run: run.configuration.local_batch_size,
    )
    for said in (cluster.recommendation(job_id).why, cluster.job(job_id).plan_reason):
        assert "emory: no candidate is left" in said
        assert smallest.id in said
        assert "lower min_local_batch_size" in said


def test_where_known_bytes_leave_nothing_the_sentence_says_how_much_is_missing(cluster: Cluster) -> None:
    model = {"name": "net", "parameters": 10**9, "optimizer": "adam", "activation_bytes_per_sample": 10**9}
    wanted = spec(model=model, cluster={"max_nodes": 8, "memory_bytes_per_rank": 16 * GIB})
    answer = cluster.register(wanted).recommendation
    assert answer.chosen is None
    assert "Memory" in answer.why
    assert "16 GiB" in answer.why
    assert "local batch of 32" in answer.why


def test_a_model_that_fits_into_memory_is_not_warned_of(cluster: Cluster) -> None:
    model = {"name": "net", "parameters": 10**9, "optimizer": "adam"}
    created = cluster.register(spec(model=model, cluster={"max_nodes": 2, "memory_bytes_per_rank": 80 * 10**9}))
    assert not any("optimizer state need" in warning for warning in created.recommendation.model.warnings)
