"""Provides a function with which tests can write configurations briefly."""

from __future__ import annotations

from tula_wire import DEFAULT_INSTANCE_TYPE, Configuration


def make_configuration(
    nodes: int, ranks: int, batch: int, accumulation: int = 1, instance_type: str = DEFAULT_INSTANCE_TYPE
) -> Configuration:
    """Return a configuration of `nodes` nodes with `ranks` ranks each, and `batch` examples per rank and micro-step."""
    return Configuration(
        num_nodes=nodes,
        ranks_per_node=ranks,
        local_batch_size=batch,
        grad_accum_steps=accumulation,
        instance_type=instance_type,
    )
