"""What probes say of a job's links: the fabric of each of its instance types."""

from __future__ import annotations

from collections.abc import Sequence

import tula_wire as wire
from tula_service.perfmodel.fabric import AllReduceCost, Fabric, fit_all_reduce


def cost_of(readings: Sequence[wire.AllReduceReading]) -> AllReduceCost:
    """The line through the readings of one group of ranks."""
    return fit_all_reduce(
        [each.size_bytes for each in readings],
        [each.time_s for each in readings],
        [each.relative_sd / each.repeats**0.5 for each in readings],
    )


def fabric_of(probes: Sequence[wire.FabricProbe], cluster: wire.ClusterSpec) -> Fabric | None:
    """The probe with most ranks of those on nodes like these, the first of `probes` among equals; None without one."""
    mine = [probe for probe in probes if _same_fabric(probe, cluster)]
    if not mine:
        return None
    probe = max(mine, key=lambda each: each.num_nodes * each.ranks_per_node)
    in_node = None if probe.in_node is None else cost_of(probe.in_node)
    return Fabric(probe.num_nodes, probe.ranks_per_node, cost_of(probe.all_ranks), in_node)


def _same_fabric(probe: wire.FabricProbe, cluster: wire.ClusterSpec) -> bool:
    if any(getattr(probe, name) != getattr(cluster, name) for name in ("instance_type", "accelerator", "network_gbps")):
        return False
    named = cluster.accelerator is not None or cluster.instance_type != wire.DEFAULT_INSTANCE_TYPE
    return named or probe.ranks_per_node == cluster.ranks_per_node
