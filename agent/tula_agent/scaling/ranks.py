"""Sums values over ranks. Every number that can change a weight is such a sum, so that it is equal on all ranks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist

from tula_agent.readings import HostCopy


@dataclass
class AsyncReduction:
    """A reduced vector that is being copied to the host; `values` waits only for operations queued earlier."""

    vector: torch.Tensor
    event: torch.cuda.Event | None = None

    def values(self) -> list[float]:
        """Return the numbers, which are the same on every rank."""
        if self.event is not None:
            self.event.synchronize()
        return [float(x) for x in self.vector.tolist()]


class Ranks:
    """The process group that shares a model; a single rank if torch.distributed is not in use."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self._group = process_group

    @property
    def size(self) -> int:
        """Return the world size N of the group."""
        if not (dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size(self._group)

    @property
    def rank(self) -> int:
        """Return the rank of this process within the group, from 0."""
        return 0 if self.size == 1 else dist.get_rank(self._group)

    @property
    def is_first(self) -> bool:
        """Return True on the first rank, whose thresholds apply to all ranks."""
        return self.size == 1 or dist.get_rank(self._group) == 0

    def portion(self, sizes: Sequence[int]) -> list[bool]:
        """Return a flag for each tensor of these sizes, True if this rank reads the tensor for a sum over ranks.

        All ranks have the same tensors. Exactly one rank reads each tensor, and all ranks read about the same amount,
        so with N ranks, reading takes 1/N of the time.
        """
        if self.size == 1:
            return [True] * len(sizes)
        rank = dist.get_rank(self._group)
        return [owner == rank for owner in owners(tuple(sizes), self.size)]

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over ranks, in place, and return it."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def gather(self, parcel: torch.Tensor) -> list[torch.Tensor]:
        """Return the `parcel` of each rank, in the order of ranks; all parcels have the same size and type."""
        if self.size == 1:
            return [parcel]
        raw = parcel.view(torch.uint8)  # gloo does not support bfloat16
        received = [torch.empty_like(raw) for _ in range(self.size)]
        dist.all_gather(received, raw, group=self._group)
        return [part.view(parcel.dtype) for part in received]

    def send(self, vector: torch.Tensor) -> AsyncReduction:
        """Start summing `vector` over ranks and copying the sum to the host, without waiting on a GPU.

        The reduction and then the copy to the host are queued on the stream. On a CPU, this method waits for the sum,
        because gloo aborts a process that ends while a reduction is in flight, and there may be no later step that
        could wait.
        """
        return to_host(self.sum_(vector))


@lru_cache(maxsize=8)
def owners(sizes: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Return the rank that reads each tensor; in descending order of size, each tensor is assigned to the least loaded
    rank.
    """
    loads = [(0, rank) for rank in range(ranks)]
    rank_of = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        load, rank = loads[0]
        rank_of[index] = rank
        heapq.heapreplace(loads, (load + sizes[index], rank))
    return tuple(rank_of)


def to_host(vector: torch.Tensor) -> AsyncReduction:
    """Start copying `vector` to the host, without waiting for the copy."""
    if vector.device.type != "cuda":
        return AsyncReduction(vector)
    copy = HostCopy(vector)
    return AsyncReduction(copy.host, event=copy.event)
