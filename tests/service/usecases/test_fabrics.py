"""Tests that probes are stored by project, limited in number, make open plans stale, and predict communication."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

import tula_wire as wire
from tests.service.usecases.cluster import Cluster, spec
from tests.support.configurations import make_configuration
from tula_service.analysis.answer import Answer, analyse
from tula_service.analysis.transfer import export_posteriors
from tula_service.perfmodel.fabric import Buckets
from tula_service.usecases import fabrics, runs
from tula_service.usecases.access import Principal, create_project
from tula_service.usecases.job_data import load_job_data


def probe(alpha: float = 1e-4, beta: float = 1e-9, **changes: Any) -> wire.FabricProbe:
    """Return a probe of two nodes with two ranks each; a reduction of s bytes takes exactly alpha + beta s seconds."""
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
    assert (after.data_version, after.plan_state) == (before.data_version + 1, "stale")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_nodes": 1, "ranks_per_node": 1}, "at least two ranks"),
        ({"ranks_per_node": 1, "in_node": probe().all_ranks}, "several nodes with several ranks each"),
        ({"all_ranks": [{"size_bytes": 2**30, "time_s": 1e-9}] * 3}, "than any link needs"),
    ],
)
def test_a_probe_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        probe(**changes)


def ring_s(alpha: float, beta: float, nodes: int, ranks: int, size_bytes: float) -> float:
    """Return how many seconds a step's collectives take in a ring of all ranks, as implied by a probe of two nodes."""
    world, probed = nodes * ranks, 2 * ranks
    hops, buckets = (world - 1) / (probed - 1), np.ceil(size_bytes / (25 * 2**20))
    return float(buckets * alpha * hops + beta * size_bytes * hops * probed / world)


PARAMETERS = 25_000_000
ALPHA, BETA = 2e-3, 4e-9


def simulated(c: wire.Configuration) -> float:
    """Return the step time of a job in seconds, with slow communication that is partly hidden."""
    compute = 0.05 + 0.001 * c.local_batch_size
    comm = ring_s(ALPHA, BETA, c.num_nodes, c.ranks_per_node, 4.0 * PARAMETERS) if c.num_nodes > 1 else 0.0
    return float((compute**1.3 + comm**1.3) ** (1 / 1.3))


def network(alpha: float = ALPHA, beta: float = BETA, **changes: Any) -> wire.FabricProbe:
    """Return a probe of two nodes of the simulated cluster."""
    nodes = {"instance_type": "a", "accelerator": "V100", "network_gbps": 25, "ranks_per_node": 1}
    return probe(alpha, beta, **nodes | changes)


def measure(cluster: Cluster, job_id: str, configuration: wire.Configuration) -> None:
    """Execute a profiling run that the plan did not ask for."""
    wanted = wire.RunCreate(kind="profile", configuration=configuration, holder="launcher")
    cluster.execute(runs.create(cluster.store, cluster.principal, job_id, wanted))


def one_node_job(cluster: Cluster, **on: Any) -> str:
    """Create a job that has profiled one node with two batches; return its id."""
    nodes = {"instance_type": "a", "max_nodes": 8, "accelerator": "V100", "network_gbps": 25} | on
    model = {"name": "net", "parameters": PARAMETERS}
    job_id = cluster.register(spec(cluster=nodes, model=model)).job.id
    for batch in (64, 256):
        measure(cluster, job_id, make_configuration(1, 1, batch, 1, "a"))
    return job_id


def answer_of(cluster: Cluster, job_id: str) -> Answer:
    with cluster.store.reading() as tx:
        found = analyse(load_job_data(tx, tx.jobs.get(job_id)))
    assert isinstance(found, Answer)
    return found


def test_a_probe_moves_a_job_on_one_node_towards_its_truth_and_narrows_the_intervals(cluster: Cluster) -> None:
    cluster.step_time = simulated
    job_id = one_node_job(cluster)
    before = answer_of(cluster, job_id)
    fabrics.add(cluster.store, cluster.principal, network())
    after = answer_of(cluster, job_id)
    assert (before.model.basis, after.model.basis) == ("profiled", "probed")
    for nodes in (2, 4, 8):
        at = make_configuration(nodes, 1, 64, 1, "a")
        truth, old, new = simulated(at), before.estimate([at])[0].step_time_s, after.estimate([at])[0].step_time_s
        assert abs(np.log(new.mean / truth)) < 0.5 * abs(np.log(old.mean / truth))
        assert new.high / new.low < 0.8 * old.high / old.low
        assert new.low <= truth <= new.high
    one = make_configuration(1, 1, 64, 1, "a")
    assert after.estimate([one])[0].step_time_s.mean == pytest.approx(
        before.estimate([one])[0].step_time_s.mean, rel=0.01
    )


@pytest.mark.parametrize("other", [{"network_gbps": 100}, {"accelerator": "T4"}, {"instance_type": "b"}])
def test_a_job_on_another_fabric_keeps_every_prediction(cluster: Cluster, other: dict[str, Any]) -> None:
    cluster.step_time = simulated
    job_id = one_node_job(cluster)
    before = answer_of(cluster, job_id)
    fabrics.add(cluster.store, cluster.principal, network(**other))
    after = answer_of(cluster, job_id)
    assert after.model.basis == "profiled"
    assert [each.step_time_s for each in after.estimates] == [each.step_time_s for each in before.estimates]


def test_a_run_on_several_nodes_outweighs_a_probe_that_was_wrong(cluster: Cluster) -> None:
    cluster.step_time = simulated
    fabrics.add(cluster.store, cluster.principal, network(ALPHA / 5, BETA / 5))
    job_id = one_node_job(cluster)
    at = make_configuration(8, 1, 64, 1, "a")
    misled = answer_of(cluster, job_id).estimate([at])[0].step_time_s.mean
    for batch in (64, 256):
        measure(cluster, job_id, make_configuration(4, 1, batch, 1, "a"))
    measured = answer_of(cluster, job_id)
    assert measured.model.basis == "profiled"
    truth = simulated(at)
    assert abs(np.log(measured.estimate([at])[0].step_time_s.mean / truth)) < 0.3 * abs(np.log(misled / truth))


def test_after_a_probe_one_launch_on_one_node_recommends_over_all_clusters(cluster: Cluster) -> None:
    cluster.step_time = simulated
    fabrics.add(cluster.store, cluster.principal, network())
    nodes = {"instance_type": "a", "max_nodes": 8, "accelerator": "V100", "network_gbps": 25}
    job_id = cluster.register(spec(cluster=nodes, model={"name": "net", "parameters": PARAMETERS})).job.id
    planned = [run.configuration for run in cluster.job(job_id).plan]
    assert [c.num_nodes for c in planned] == [1, 1, 1]
    cluster.work(job_id, most=3)
    found = cluster.recommendation(job_id)
    assert found.basis == "probed"
    assert {each.configuration.num_nodes for each in found.candidates} == {1, 2, 4, 8}
    inside = [
        each.step_time_s.low <= simulated(each.configuration) <= each.step_time_s.high for each in found.candidates
    ]
    assert np.mean(inside) >= 0.9
    waiting = [run.configuration for run in cluster.job(job_id).plan if run.state == "pending"]
    assert found.chosen is not None
    assert found.chosen.configuration in waiting
    assert {c.num_nodes for c in waiting} == {found.chosen.configuration.num_nodes}


def test_a_job_does_not_teach_the_probe_that_it_used(cluster: Cluster) -> None:
    """Otherwise two jobs on one node after one probe would count as two measurements of the network."""
    cluster.step_time = simulated
    job_id = one_node_job(cluster)
    before = export_posteriors(answer_of(cluster, job_id).model)["a"]
    fabrics.add(cluster.store, cluster.principal, network())
    after = export_posteriors(answer_of(cluster, job_id).model)["a"]
    assert after["sd"][6] == pytest.approx(before["sd"][6], rel=0.05)
    collective_s = [taught["mean"][6] + taught["mean"][0] for taught in (after, before)]
    assert collective_s[0] == pytest.approx(collective_s[1], abs=0.3)


def links(nodes: int, ranks: int, **changes: Any) -> dict[str, Any]:
    """Return the readings that the ranks of a run report."""
    return probe(num_nodes=nodes, ranks_per_node=ranks, **changes).model_dump(include=set(wire.AllReduces.model_fields))


def test_the_first_run_on_so_many_ranks_probes_their_links_and_the_next_need_not(cluster: Cluster) -> None:
    nodes = {"instance_type": "a", "max_nodes": 4, "accelerator": "V100", "network_gbps": 25}
    job_id = cluster.register(spec(cluster=nodes)).job.id

    def asked(num_nodes: int) -> wire.Run:
        wanted = wire.RunCreate(
            kind="profile", configuration=make_configuration(num_nodes, 1, 64, 1, "a"), holder="launcher"
        )
        return runs.create(cluster.store, cluster.principal, job_id, wanted)

    def probe_s(run: wire.Run) -> float:
        assert run.instruction is not None
        return run.instruction.probe_s

    assert probe_s(asked(1)) == 0.0
    run = asked(2)
    assert probe_s(run) == 1.0
    # On one machine, as a trial of two nodes: the figures are those of the run's configuration.
    cluster.send(run, [0.1, 0.1], all_reduces=links(1, 2))
    cluster.send(run, [0.1], all_reduces=links(4, 1))  # not its ranks
    cluster.send(run, [0.1], all_reduces=links(2, 1, alpha=1.0))  # one is known
    (stored,) = fabrics.list_fabrics(cluster.store, cluster.principal).fabrics
    assert stored.probe == network(num_nodes=2, alpha=1e-4, beta=1e-9)
    assert [probe_s(asked(each)) for each in (2, 4)] == [0.0, 1.0]
    cluster.send(asked(4), [0.1], all_reduces=links(4, 1))
    assert probe_s(asked(3)) == 0.0  # the probe of most ranks counts


def test_what_a_run_measured_counts_for_another_job_once_a_third_agrees(cluster: Cluster) -> None:
    """Otherwise the agents of one job could change the predictions for other jobs."""
    nodes = {"instance_type": "a", "max_nodes": 8, "accelerator": "V100", "network_gbps": 25}
    first, second, third = (cluster.register(spec(cluster=nodes, epochs=n)).job.id for n in (1, 2, 3))

    def known(job_id: str) -> list[wire.FabricProbe]:
        with cluster.store.reading() as tx:
            return list(load_job_data(tx, tx.jobs.get(job_id)).probes)

    def version(job_id: str) -> int:
        with cluster.store.reading() as tx:
            return tx.jobs.get(job_id).data_version

    def send(job_id: str, alpha: float) -> None:
        wanted = wire.RunCreate(kind="profile", configuration=make_configuration(2, 1, 64, 1, "a"), holder="launcher")
        run = runs.create(cluster.store, cluster.principal, job_id, wanted)
        cluster.send(run, [0.1], all_reduces=links(2, 1, alpha=alpha, beta=1e-9))

    before = version(third)
    send(first, 50.0)
    assert (len(known(first)), known(second), known(third)) == (1, [], [])
    send(second, 1e-3)
    assert known(third) == [], "they differ"
    assert version(third) == before
    fourth = cluster.register(spec(cluster=nodes, epochs=4)).job.id
    send(fourth, 1.2e-3)
    assert len(known(third)) == 2, "not the first one"
    assert {listed.job_id for listed in fabrics.list_fabrics(cluster.store, cluster.principal).fabrics} == {
        first, second, fourth,
    }  # fmt: skip


def test_a_launcher_that_claims_is_asked_for_a_probe(cluster: Cluster) -> None:
    job_id = cluster.register(spec(cluster={"instance_type": "a", "max_nodes": 4, "ranks_per_node": 2})).job.id
    claimed = runs.claim(cluster.store, cluster.principal, job_id, wire.ClaimRequest(holder="launcher")).run
    assert claimed is not None
    assert claimed.instruction is not None
    assert claimed.instruction.probe_s == 1.0
    c = claimed.configuration
    cluster.send(claimed, [0.1], all_reduces=links(c.num_nodes, 2, in_node=None))
    (stored,) = fabrics.list_fabrics(cluster.store, cluster.principal).fabrics
    assert (stored.probe.num_nodes, stored.probe.ranks_per_node) == (c.num_nodes, 2)


def test_the_largest_model_has_a_bounded_number_of_buckets() -> None:
    """Without a bound, 2**50 parameters in buckets of 25 MiB took gigabytes and half a minute for each registration."""
    largest, ordinary = Buckets.of(4.0 * 2**50), Buckets.of(4.0 * 2**40)
    assert (largest.size_bytes.size, ordinary.size_bytes.size) == (100_000, 100_000)
    assert largest.size_bytes.sum() == pytest.approx(4.0 * 2**50)
    assert Buckets.of(4.0 * 2**30).size_bytes.size == 164
