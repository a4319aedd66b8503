"""The candidates of a job: powers of two in nodes and in batch, over every instance type, within memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tula_service.perfmodel.points import ObservationError
from tula_wire.configurations import DEFAULT_INSTANCE_TYPE, Configuration

_MOST_CANDIDATES = 4096


@dataclass(frozen=True)
class SearchSpace:
    """What may be chosen. With `global_batch_size` set, every candidate has it exactly, by accumulation if needed.

    `ranks_per_node` and `max_local_batch_size` are per instance type; the latter is the memory bound (or the user's).
    """

    min_num_nodes: int
    max_num_nodes: int
    ranks_per_node: Mapping[str, int]
    max_local_batch_size: Mapping[str, int]
    min_local_batch_size: int = 32
    global_batch_size: int | None = None
    max_global_batch_size: int | None = None

    def __post_init__(self) -> None:
        """Raise ObservationError on an empty range."""
        if not 1 <= self.min_num_nodes <= self.max_num_nodes:
            raise ObservationError("min_num_nodes must be at least 1 and at most max_num_nodes.")
        if self.min_local_batch_size < 1:
            raise ObservationError("min_local_batch_size must be at least 1.")
        if not self.ranks_per_node or any(ranks < 1 for ranks in self.ranks_per_node.values()):
            raise ObservationError("ranks_per_node must name at least one instance type with at least one rank.")
        if missing := sorted(set(self.ranks_per_node) - set(self.max_local_batch_size)):
            raise ObservationError(f"max_local_batch_size lacks instance type {missing[0]!r}.")

    @classmethod
    def single(
        cls,
        *,
        min_num_nodes: int,
        max_num_nodes: int,
        max_local_batch_size: int,
        ranks_per_node: int = 1,
        min_local_batch_size: int = 32,
        global_batch_size: int | None = None,
        max_global_batch_size: int | None = None,
        instance_type: str = DEFAULT_INSTANCE_TYPE,
    ) -> SearchSpace:
        """A space over one instance type."""
        return cls(
            min_num_nodes=min_num_nodes,
            max_num_nodes=max_num_nodes,
            ranks_per_node={instance_type: ranks_per_node},
            max_local_batch_size={instance_type: max_local_batch_size},
            min_local_batch_size=min_local_batch_size,
            global_batch_size=global_batch_size,
            max_global_batch_size=max_global_batch_size,
        )


def powers_of_two(smallest: int, largest: int) -> tuple[int, ...]:
    """smallest, 2 smallest, 4 smallest ... and always `largest`; empty when largest < smallest."""
    values = []
    value = smallest
    while value < largest:
        values.append(value)
        value *= 2
    return (*values, largest) if largest >= smallest else ()


def enumerate_candidates(space: SearchSpace) -> tuple[Configuration, ...]:
    """Every candidate, sorted; always with the largest cluster and the largest batch that fits.

    Raises ObservationError when nothing is left, or when there would be more than 4096.
    """
    found: set[Configuration] = set()
    for instance_type, ranks in space.ranks_per_node.items():
        largest_batch = space.max_local_batch_size[instance_type]
        for nodes in powers_of_two(space.min_num_nodes, space.max_num_nodes):
            if space.global_batch_size is not None:
                found.update(_at_global_batch(space, nodes, ranks, largest_batch, instance_type))
                continue
            for batch in powers_of_two(space.min_local_batch_size, largest_batch):
                configuration = Configuration(
                    num_nodes=nodes,
                    ranks_per_node=ranks,
                    local_batch_size=batch,
                    grad_accum_steps=1,
                    instance_type=instance_type,
                )
                limit = space.max_global_batch_size
                if limit is None or configuration.global_batch_size <= limit:
                    found.add(configuration)
    if not found:
        raise ObservationError(
            "candidates: none is left; lower min_local_batch_size, raise the batch limit or use a larger instance type."
        )
    if len(found) > _MOST_CANDIDATES:
        raise ObservationError(f"candidates: {len(found)} are more than {_MOST_CANDIDATES}; narrow the ranges.")
    return tuple(sorted(found))


def _divisors(number: int) -> list[int]:
    """All divisors, ascending; in the square root of the number, since a user may ask for any global batch."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return [*small, *(number // divisor for divisor in reversed(small) if divisor * divisor != number)]


def _at_global_batch(
    space: SearchSpace, nodes: int, ranks: int, largest_batch: int, instance_type: str
) -> Sequence[Configuration]:
    """Local batches that make exactly the wanted global batch: least accumulation first, then halvings of the batch."""
    wanted = space.global_batch_size or 0
    world = nodes * ranks
    if wanted % world:
        return ()
    per_rank = wanted // world
    fitting = [
        Configuration(
            num_nodes=nodes,
            ranks_per_node=ranks,
            local_batch_size=per_rank // steps,
            grad_accum_steps=steps,
            instance_type=instance_type,
        )
        for steps in _divisors(per_rank)
        if per_rank // steps <= largest_batch
    ]
    if not fitting:
        return ()
    least = fitting[0]
    return [c for c in fitting if c == least or c.local_batch_size >= max(space.min_local_batch_size, 1)][:3]
