"""A configuration: the one thing that Tula chooses."""

from __future__ import annotations

from typing import Final

from tula_wire._base import Count, Name, WireModel

__all__ = ["DEFAULT_INSTANCE_TYPE", "Configuration"]

DEFAULT_INSTANCE_TYPE: Final = "default"


class Configuration(WireModel):
    """One way to run a job; global batch = local batch x accumulation x world size."""

    num_nodes: Count
    ranks_per_node: Count = 1
    local_batch_size: Count
    grad_accum_steps: Count = 1
    instance_type: Name = DEFAULT_INSTANCE_TYPE

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.num_nodes * self.ranks_per_node

    @property
    def global_batch_size(self) -> int:
        """Examples per optimizer step."""
        return self.local_batch_size * self.grad_accum_steps * self.world_size
