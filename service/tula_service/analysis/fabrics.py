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
    if not (mine := probes_of(probes, cluster)):
        return None
    probe = max(mine, key=lambda each: each.num_nodes * each.ranks_per_node)
    in_node = None if probe.in_node is None else cost_of(probe.in_node)
    return Fabric(probe.num_nodes, probe.ranks_per_node, cost_of(probe.all_ranks), in_node)


def probes_of(probes: Sequence[wire.FabricProbe], cluster: wire.ClusterSpec) -> list[wire.FabricProbe]:
    """Those on nodes like the cluster's."""
    return [probe for probe in probes if _same_fabric(probe, cluster)]


def probe_of_run(
    measured: wire.AllReduces, configuration: wire.Configuration, cluster: wire.ClusterSpec
) -> wire.FabricProbe | None:
    """What the ranks of a run measured, as a probe of its cluster; None where another number of ranks took part.

    Nodes are those of the configuration, as in its samples; what was measured in one node counts where the ranks saw
    the same nodes.
    """
    c = configuration
    if measured.num_nodes * measured.ranks_per_node != c.world_size:
        return None
    same = (measured.num_nodes, measured.ranks_per_node) == (c.num_nodes, c.ranks_per_node)
    return wire.FabricProbe(
        instance_type=cluster.instance_type,
        accelerator=cluster.accelerator,
        network_gbps=cluster.network_gbps,
        backend=measured.backend,
        num_nodes=c.num_nodes,
        ranks_per_node=c.ranks_per_node,
        all_ranks=measured.all_ranks,
        in_node=measured.in_node if same else None,
    )


def _same_fabric(probe: wire.FabricProbe, cluster: wire.ClusterSpec) -> bool:
    if any(getattr(probe, name) != getattr(cluster, name) for name in ("instance_type", "accelerator", "network_gbps")):
        return False
    named = cluster.accelerator is not None or cluster.instance_type != wire.DEFAULT_INSTANCE_TYPE
    return named or probe.ranks_per_node == cluster.ranks_per_node
