"""Columns: the candidates that differ in nothing but the local batch, which one launch can measure together."""

from __future__ import annotations

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


def first_columns(candidates: Sequence[Configuration], *, probed: Collection[str] = ()) -> list[Column]:
    """Of each instance type the largest and the smallest cluster; of those in `probed` the smallest alone.

    The links between nodes of the latter are known. Of several columns of one cluster, the one with the least
    accumulation counts as the largest.
    """
    chosen: list[Column] = []
    for name in sorted({c.instance_type for c in candidates}):
        columns = sorted(
            columns_of(c for c in candidates if c.instance_type == name),
            key=lambda column: (column.world_size, -column.grad_accum_steps, column),
        )
        chosen += [columns[0]] if name in probed else dict.fromkeys((columns[-1], columns[0]))
    return chosen
