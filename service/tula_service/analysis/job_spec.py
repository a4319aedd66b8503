"""What a job specification says, in the types of the performance model: training, limits, prices, candidates."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import tula_wire as wire
from tula_service.perfmodel.candidates import SearchSpace, enumerate_candidates
from tula_service.perfmodel.choice import Limits
from tula_service.perfmodel.points import ObservationError
from tula_service.perfmodel.pricing import Offer, Spot, Training

_UNKNOWN_BOUND_DOUBLINGS = 5
_MOST_DOUBLINGS = 12


def training_of(spec: wire.JobSpec) -> Training:
    """How much the job trains: D examples, E epochs."""
    return Training(dataset_size=float(spec.dataset.size), epochs=spec.epochs)


def limits_of(spec: wire.JobSpec) -> Limits:
    """The user's limits; a budget is left out while no price is known."""
    return Limits(
        deadline_s=spec.limits.deadline_s,
        budget_usd=spec.limits.budget_usd if has_prices(spec) else None,
        max_global_batch_size=spec.limits.max_global_batch_size,
    )


def has_prices(spec: wire.JobSpec) -> bool:
    """True when every instance type has a price, so that costs are in USD."""
    return all(is_priced(cluster.price) for cluster in spec.cluster)


def payable(spec: wire.JobSpec, memory: Collection[str]) -> wire.JobSpec:
    """The specification, without prices if one is per GB-hour and the memory of that instance type is not known.

    `memory` names the instance types whose memory is known.
    """
    if all(c.instance_type in memory or not c.price.usd_per_gb_hour for c in spec.cluster):
        return spec
    return spec.model_copy(update={"cluster": [c.model_copy(update={"price": wire.Price()}) for c in spec.cluster]})


def offers_of(spec: wire.JobSpec) -> dict[str, Offer]:
    """On-demand prices by instance type. Without any price a node-hour costs 1, so that cost counts node-hours."""
    if not any(is_priced(cluster.price) for cluster in spec.cluster):
        return {cluster.instance_type: Offer(cluster.instance_type, usd_per_node_hour=1.0) for cluster in spec.cluster}
    return {
        cluster.instance_type: Offer(
            cluster.instance_type,
            usd_per_node_hour=cluster.price.usd_per_node_hour or 0.0,
            usd_per_gb_hour=cluster.price.usd_per_gb_hour or 0.0,
        )
        for cluster in spec.cluster
        if cluster.price.usd_per_node_hour is not None or cluster.price.usd_per_gb_hour is not None
    }


def spot_offers_of(spec: wire.JobSpec) -> dict[str, Offer]:
    """Spot prices, by instance type; only the types that have one."""
    return {
        cluster.instance_type: Offer(
            cluster.instance_type,
            usd_per_node_hour=cluster.price.spot.usd_per_node_hour,
            spot=Spot(
                interruptions_per_node_hour=cluster.price.spot.interruptions_per_node_hour,
                checkpoint_interval_s=cluster.price.spot.checkpoint_interval_s,
                restart_s=cluster.price.spot.restart_s,
            ),
        )
        for cluster in spec.cluster
        if cluster.price.spot is not None
    }


def unbounded_types(spec: wire.JobSpec, memory_bound: Mapping[str, int]) -> list[str]:
    """Instance types whose local batch neither the user nor the memory model bounds."""
    if spec.batch.max_local_batch_size is not None:
        return []
    return [cluster.instance_type for cluster in spec.cluster if cluster.instance_type not in memory_bound]


def candidates_of(spec: wire.JobSpec, memory_bound: Mapping[str, int]) -> tuple[wire.Configuration, ...]:
    """Every configuration that may be chosen, sorted.

    `memory_bound` is the largest local batch by instance type, where memory bounds it. It is rounded down to a
    power-of-two multiple of the smallest batch, so that a refit does not shift every candidate. Without a bound, five
    doublings are candidates. A global batch never exceeds the data set. Raises ObservationError when no candidate is
    left.
    """
    found: set[wire.Configuration] = set()
    problem = ""
    for cluster in spec.cluster:
        name = cluster.instance_type
        try:
            space = SearchSpace(
                min_num_nodes=cluster.min_nodes,
                max_num_nodes=cluster.max_nodes,
                ranks_per_node=cluster.ranks_per_node,
                min_local_batch_size=spec.batch.min_local_batch_size,
                max_local_batch_size=_largest_batch(spec, memory_bound.get(name)),
                global_batch_size=spec.batch.global_batch_size,
                instance_type=name,
            )
            found.update(enumerate_candidates(space))
        except ObservationError as error:
            problem = str(error)
    most_steps = spec.batch.max_grad_accum_steps if spec.batch.global_batch_size is not None else 1
    fitting = {c for c in found if c.global_batch_size <= spec.dataset.size and c.grad_accum_steps <= most_steps}
    if not fitting:
        raise ObservationError(
            problem
            or f"batch: no candidate's global batch fits the data set of {spec.dataset.size} examples; "
            "lower batch.min_local_batch_size or cluster.min_nodes, or raise batch.max_grad_accum_steps."
        )
    return tuple(sorted(fitting))


def _largest_batch(spec: wire.JobSpec, memory_bound: int | None) -> int:
    smallest, given = spec.batch.min_local_batch_size, spec.batch.max_local_batch_size
    if memory_bound is not None and (given is None or memory_bound < given):
        doublings = max(0, min(_MOST_DOUBLINGS, (memory_bound // smallest).bit_length() - 1))
        return smallest << doublings if memory_bound >= smallest else memory_bound
    return given if given is not None else smallest << _UNKNOWN_BOUND_DOUBLINGS


def is_priced(price: wire.Price) -> bool:
    """True when the instance type has any price."""
    return price.usd_per_node_hour is not None or price.usd_per_gb_hour is not None or price.spot is not None
