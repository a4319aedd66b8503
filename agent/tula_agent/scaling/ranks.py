"""Sums over ranks. Every number that can change a weight comes from one of these, so that all ranks hold the same."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from tula_agent.readings import HostCopy


@dataclass
class Arrival:
    """A reduced vector in flight to the host; `values` waits only for work that was queued before it."""

    vector: torch.Tensor
    work: Any = None
    event: torch.cuda.Event | None = None

    def values(self) -> list[float]:
        """The numbers, the same on every rank."""
        if self.work is not None:
            self.work.wait()
        if self.event is not None:
            self.event.synchronize()
        return [float(x) for x in self.vector.tolist()]


class Ranks:
    """The process group that shares one model; one rank when torch.distributed is not in use."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self._group = process_group

    @property
    def size(self) -> int:
        """World size N of the group."""
        if not (dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size(self._group)

    @property
    def is_first(self) -> bool:
        """True on the rank whose thresholds count."""
        return self.size == 1 or dist.get_rank(self._group) == 0

    def portion(self, sizes: Sequence[int]) -> list[bool]:
        """By tensor of these sizes, whether this rank reads it for a sum over ranks; every rank holds the same tensors.

        Exactly one rank reads each, and all read about as much: N ranks need an Nth of the time.
        """
        if self.size == 1:
            return [True] * len(sizes)
        rank = dist.get_rank(self._group)
        return [owner == rank for owner in owners(tuple(sizes), self.size)]

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` summed over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def send(self, vector: torch.Tensor) -> Arrival:
        """Start to sum `vector` over ranks and to copy it to the host; blocks neither host nor device."""
        if vector.device.type == "cuda":
            # The reduction is ordered on the stream, and the copy to the host after it.
            return to_host(self.sum_(vector))
        work = dist.all_reduce(vector, group=self._group, async_op=True) if self.size > 1 else None
        return Arrival(vector, work=work)


@lru_cache(maxsize=8)
def owners(sizes: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """The rank that reads each tensor of these sizes: largest first, each to the rank with the least so far."""
    loads = [(0, rank) for rank in range(ranks)]
    found = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        load, rank = loads[0]
        found[index] = rank
        heapq.heapreplace(loads, (load + sizes[index], rank))
    return tuple(found)


def to_host(vector: torch.Tensor) -> Arrival:
    """Start to copy `vector` to the host without waiting for it."""
    if vector.device.type != "cuda":
        return Arrival(vector)
    copy = HostCopy(vector)
    return Arrival(copy.host, event=copy.event)
