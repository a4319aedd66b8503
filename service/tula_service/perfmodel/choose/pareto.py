"""The Pareto frontier: what no other candidate beats in both time and cost."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["pareto_frontier"]


def pareto_frontier(first: Sequence[float], second: Sequence[float]) -> tuple[int, ...]:
    """Row numbers of the undominated rows (smaller is better in both), ordered by the first measure.

    A row is dominated when another is no worse in both and better in one; of equal rows the first one stays.
    """
    order = sorted(range(len(first)), key=lambda row: (first[row], second[row], row))
    frontier: list[int] = []
    best = float("inf")
    for row in order:
        if second[row] < best:
            frontier.append(row)
            best = second[row]
    return tuple(frontier)
