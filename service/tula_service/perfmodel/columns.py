"""Columns: the candidates that differ in nothing but the local batch, which one launch can measure together."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from tula_wire.configurations import Configuration


class Column(NamedTuple):
    """What the configurations of one launch have in common."""

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


def first_columns(
    candidates: Sequence[Configuration], *, middle: bool = False, probed: Collection[str] = ()
) -> list[Column]:
    """Of each instance type the largest and the smallest cluster; with `middle` also the one nearest to their mean.

    Of the types in `probed`, whose links between nodes are known, the smallest cluster alone. The mean is geometric. Of
    several columns of one cluster, the one with the least accumulation counts as the largest.
    """
    chosen: list[Column] = []
    for name in sorted({c.instance_type for c in candidates}):
        columns = sorted(
            columns_of(c for c in candidates if c.instance_type == name),
            key=lambda column: (column.world_size, -column.grad_accum_steps, column),
        )
        smallest, largest = columns[0], columns[-1]
        chosen += [smallest] if name in probed else dict.fromkeys((largest, smallest))
        centre = math.sqrt(smallest.world_size * largest.world_size)
        rest = [column for column in columns if column not in chosen]
        if middle and rest:
            chosen.append(min(rest, key=lambda column: (abs(math.log(column.world_size / centre)), column)))
    return chosen
