"""Stores fabric probes by project and instance type, and returns them with the cost line fitted to their readings."""

from __future__ import annotations

from datetime import datetime

import tula_wire as wire
from tula_service.analysis.explanation import to_wire_estimate
from tula_service.analysis.hardware import build_probe, fit_cost, select_probes
from tula_service.perfmodel.fabric import AllReduceCost
from tula_service.store import Store, Transaction
from tula_service.store.jobs import JobRecord
from tula_service.usecases.access import Principal
from tula_service.usecases.job_data import find_cluster, stored_probes

_MOST_LISTED = 200
_PROBE_S = 1.0


def add(store: Store, principal: Principal, probe: wire.FabricProbe) -> wire.Fabric:
    """Store a probe; the plans and recommendations of the project's open jobs are recomputed at the next request."""
    with store.transaction() as tx:
        at = tx.fabrics.add(principal.home_project_id, probe.instance_type, probe.model_dump(mode="json"))
    return _view(probe, at)


def add_of_run(store: Store, run_id: str, measured: wire.AllReduces) -> None:
    """Store a run's link measurements as a probe of its cluster, unless a stored probe has at least as many ranks.

    This rule limits how often an agent can make its job's plan stale by sending probes. Measurements are ignored if the
    number of ranks differs from the run's number of ranks.
    """
    with store.transaction() as tx:
        run = tx.runs.get(run_id)
        job = tx.jobs.get(run.job_id)
        cluster = find_cluster(job, run.configuration)
        probe = None if cluster is None else build_probe(measured, run.configuration, cluster)
        if probe is not None and not is_probed(tx, job, run.configuration):
            tx.fabrics.add(job.project_id, probe.instance_type, probe.model_dump(mode="json"), job_id=job.id)


def to_launch(tx: Transaction, job: JobRecord, run: wire.Run) -> wire.Run:
    """Return the run for its launcher, with an instruction to probe links unless the cluster `is_probed`."""
    if run.instruction is None or run.configuration.world_size < 2 or is_probed(tx, job, run.configuration):
        return run
    return run.model_copy(update={"instruction": run.instruction.model_copy(update={"probe_s": _PROBE_S})})


def is_probed(tx: Transaction, job: JobRecord, configuration: wire.Configuration) -> bool:
    """Return True if the cluster already has a probe of at least as many ranks, or is no longer in the specification.

    Only the probe with the most ranks is used (`fit_fabric`), so a probe with fewer ranks would change nothing.
    """
    cluster = find_cluster(job, configuration)
    if cluster is None:
        return True
    probes = select_probes(stored_probes(tx, job), cluster)
    return any(probe.num_nodes * probe.ranks_per_node >= configuration.world_size for probe in probes)


def list_fabrics(store: Store, principal: Principal) -> wire.FabricList:
    """Return the newest fabric probes that the caller may see."""
    with store.reading() as tx:
        stored = tx.fabrics.list(principal.project_id, limit=_MOST_LISTED)
    return wire.FabricList(
        fabrics=[_view(wire.read(wire.FabricProbe, probe), at, job_id) for probe, at, job_id in stored]
    )


def _view(probe: wire.FabricProbe, created_at: datetime, job_id: str | None = None) -> wire.Fabric:
    return wire.Fabric(
        probe=probe,
        job_id=job_id,
        all_ranks=_cost(fit_cost(probe.all_ranks)),
        in_node=None if probe.in_node is None else _cost(fit_cost(probe.in_node)),
        created_at=created_at,
    )


def _cost(cost: AllReduceCost) -> wire.AllReduceCost:
    return wire.AllReduceCost(
        latency_s=to_wire_estimate(cost.latency_s), seconds_per_byte=to_wire_estimate(cost.seconds_per_byte)
    )
