"""The candidates on one instance type, and the columns of those that one launch can measure together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tula_service.perfmodel.points import ObservationError
from tula_wire.configurations import DEFAULT_INSTANCE_TYPE, Configuration


@dataclass(frozen=True)
class SearchSpace:
    """What may be chosen on one instance type; `max_local_batch_size` is the memory bound or the user's.

    With `global_batch_size`, every candidate has exactly that, by accumulation if needed. Otherwise the largest batch
    is also accumulated, up to `max_grad_accum_steps` times: the same global batch from smaller ones takes longer.
    """

    min_num_nodes: int
    max_num_nodes: int
    max_local_batch_size: int
    ranks_per_node: int = 1
    min_local_batch_size: int = 32
    global_batch_size: int | None = None
    max_grad_accum_steps: int = 1
    instance_type: str = DEFAULT_INSTANCE_TYPE


class Column(NamedTuple):
    """What configurations that differ in the local batch alone have in common."""

    instance_type: str
    num_nodes: int
    world_size: int
    grad_accum_steps: int


def column_of(configuration: Configuration) -> Column:
    """The column that a configuration belongs to."""
    c = configuration
    return Column(c.instance_type, c.num_nodes, c.world_size, c.grad_accum_steps)


def columns_of(configurations: Iterable[Configuration]) -> frozenset[Column]:
    """The columns of all these configurations."""
    return frozenset(column_of(c) for c in configurations)


def powers_of_two(smallest: int, largest: int) -> tuple[int, ...]:
    """smallest, 2 smallest, 4 smallest ... and always `largest`; empty when largest < smallest."""
    values = []
    value = smallest
    while value < largest:
        values.append(value)
        value *= 2
    return (*values, largest) if largest >= smallest else ()


def enumerate_candidates(space: SearchSpace) -> tuple[Configuration, ...]:
    """Every candidate, sorted: powers of two in nodes and in batch, within memory, the largest of both included.

    Raises ObservationError when there is none.
    """
    found: list[Configuration] = []
    for nodes in powers_of_two(space.min_num_nodes, space.max_num_nodes):
        if space.global_batch_size is not None:
            shapes = _at_global_batch(space, nodes, space.global_batch_size)
        else:
            batches = powers_of_two(space.min_local_batch_size, space.max_local_batch_size)
            shapes = [(batch, 1) for batch in batches]
            steps = powers_of_two(2, space.max_grad_accum_steps) if batches else ()
            shapes += [(batches[-1], number) for number in steps]
        found += [
            Configuration(
                num_nodes=nodes,
                ranks_per_node=space.ranks_per_node,
                local_batch_size=batch,
                grad_accum_steps=number,
                instance_type=space.instance_type,
            )
            for batch, number in shapes
        ]
    if not found:
        raise ObservationError(
            "candidates: none is left; lower min_local_batch_size, raise the batch limit or use a larger instance type."
        )
    return tuple(sorted(found))


def _at_global_batch(space: SearchSpace, nodes: int, wanted: int) -> Sequence[tuple[int, int]]:
    """Up to three local batches that make exactly the wanted global batch, the one with least accumulation first."""
    if wanted % (nodes * space.ranks_per_node):
        return ()
    per_rank = wanted // (nodes * space.ranks_per_node)
    steps = [number for number in _divisors(per_rank) if per_rank // number <= space.max_local_batch_size]
    kept = [number for number in steps if number == steps[0] or per_rank // number >= space.min_local_batch_size]
    return [(per_rank // number, number) for number in kept[:3]]


def _divisors(number: int) -> list[int]:
    """All divisors, ascending; in the square root of the number, since a user may ask for any global batch."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return [*small, *(number // divisor for divisor in reversed(small) if divisor * divisor != number)]
