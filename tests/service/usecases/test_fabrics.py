"""Probes are kept by project, bounded, and make open plans stale."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

import tula_wire as wire
from tests.service.usecases.cluster import Cluster
from tula_service.domain import PlanState
from tula_service.usecases import fabrics
from tula_service.usecases.access import Principal, create_project


def probe(alpha: float = 1e-4, beta: float = 1e-9, **changes: Any) -> wire.FabricProbe:
    """Two nodes of two ranks that reduce in exactly alpha + beta s."""
    readings = [{"size_bytes": size, "time_s": alpha + beta * size, "repeats": 10} for size in (2**10, 2**18, 2**26)]
    body = {"backend": "gloo", "num_nodes": 2, "ranks_per_node": 2, "all_ranks": readings}
    return wire.FabricProbe.model_validate(body | changes)


def test_a_probe_is_answered_with_its_line_and_listed_for_its_project_alone(cluster: Cluster) -> None:
    red = create_project(cluster.store, cluster.principal, "red").id
    user = Principal("user", "user", project_id=red)
    stored = fabrics.add(cluster.store, user, probe())
    assert stored.all_ranks.latency_s.value == pytest.approx(1e-4, rel=0.01)
    assert stored.all_ranks.seconds_per_byte.value == pytest.approx(1e-9, rel=0.01)
    assert fabrics.list_fabrics(cluster.store, user).fabrics == [stored]
    other = Principal("other", "user", project_id=create_project(cluster.store, cluster.principal, "blue").id)
    assert fabrics.list_fabrics(cluster.store, other).fabrics == []


def test_the_newest_fifty_of_an_instance_type_are_kept(cluster: Cluster) -> None:
    fabrics.add(cluster.store, cluster.principal, probe(instance_type="other"))
    for each in range(52):
        fabrics.add(cluster.store, cluster.principal, probe(alpha=1e-4 * (each + 1)))
    found = fabrics.list_fabrics(cluster.store, cluster.principal).fabrics
    assert [each.probe.instance_type for each in found] == ["default"] * 50 + ["other"]
    assert found[0].all_ranks.latency_s.value == pytest.approx(52e-4, rel=0.01)


def test_a_probe_makes_the_plans_of_open_jobs_stale(cluster: Cluster) -> None:
    job_id = cluster.register().job.id
    with cluster.store.reading() as tx:
        before = tx.jobs.get(job_id)
    fabrics.add(cluster.store, cluster.principal, probe())
    with cluster.store.reading() as tx:
        after = tx.jobs.get(job_id)
    assert (after.data_version, after.plan_state) == (before.data_version + 1, PlanState.STALE)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_nodes": 1, "ranks_per_node": 1}, "two ranks or more"),
        ({"ranks_per_node": 1, "in_node": probe().all_ranks}, "several nodes of several ranks"),
        ({"all_ranks": [{"size_bytes": 2**30, "time_s": 1e-9}] * 3}, "on any link"),
    ],
)
def test_a_probe_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        probe(**changes)
