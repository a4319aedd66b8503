"""The nouns that store, perfmodel and usecases share: plain frozen values without behaviour that needs I/O."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = [
    "DEFAULT_INSTANCE_TYPE",
    "Basis",
    "Collective",
    "Configuration",
    "Objective",
    "RunKind",
    "RunState",
    "Search",
]

DEFAULT_INSTANCE_TYPE = "default"


class Objective(str, Enum):
    """What a recommendation optimises."""

    TIME = "time"
    COST = "cost"
    KNEE = "knee"
    TIME_TO_QUALITY = "time_to_quality"


class Search(str, Enum):
    """How a job's candidates are profiled."""

    FULL = "full"
    PARTIAL = "partial"
    ADAPTIVE = "adaptive"


class Collective(str, Enum):
    """How gradients are summed over ranks; each has its own communication term."""

    RING = "ring"
    TREE = "tree"
    PARAMETER_SERVER = "parameter_server"
    HIERARCHICAL = "hierarchical"


class Basis(str, Enum):
    """What a prediction rests on; never dressed up as more."""

    PRIOR = "prior"
    TRANSFER = "transfer"
    PROFILED = "profiled"


class RunKind(str, Enum):
    """Why a run exists."""

    PROFILE = "profile"
    TRAIN = "train"


class RunState(str, Enum):
    """Life of a run: pending -> claimed -> running -> one of the final states."""

    PENDING = "pending"
    CLAIMED = "claimed"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    OUT_OF_MEMORY = "out_of_memory"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """True when no transition leaves this state."""
        return self in (RunState.SUCCEEDED, RunState.OUT_OF_MEMORY, RunState.FAILED, RunState.CANCELLED)


@dataclass(frozen=True, order=True)
class Configuration:
    """One way to run a job; global batch B = local batch x accumulation x world size."""

    num_nodes: int
    ranks_per_node: int
    local_batch_size: int
    grad_accum_steps: int = 1
    instance_type: str = DEFAULT_INSTANCE_TYPE

    @property
    def world_size(self) -> int:
        """Number of ranks, N."""
        return self.num_nodes * self.ranks_per_node

    @property
    def global_batch_size(self) -> int:
        """Examples per optimizer step, B."""
        return self.local_batch_size * self.grad_accum_steps * self.world_size
