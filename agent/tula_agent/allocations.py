"""Simulates PyTorch's CUDA caching allocator to compute how much device memory a sequence of allocations needs.

    reserved(capacity) >= allocated, since blocks are rounded, split, cached, and returned only when memory is short

The simulation follows `c10/cuda/CUDACachingAllocator.cpp` for one stream and the default settings. Sizes are rounded up
to 512 bytes. Requests of up to 1 MiB are served from segments of 2 MiB, requests below 10 MiB from segments of 20 MiB,
and each larger request from its own segment, whose size is rounded up to a multiple of 2 MiB. The smallest free block
that is large enough serves a request (best fit); the block is split if the remainder is large enough. Adjacent free
blocks are merged. If a new segment does not fit on the device, every entirely free segment is returned to the device,
and the request is retried once.
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tula_wire.memory import ALLOCATOR_VARIABLES, GROWING_SEGMENTS

_MIB = 2**20
_ROUNDING = 512
_SMALL = _MIB
_SMALL_SEGMENT = 2 * _MIB
_LARGE_SEGMENT, _OWN_SEGMENT_FROM = 20 * _MIB, 10 * _MIB
_SEGMENT_ROUNDING = 2 * _MIB


def segments_grow() -> bool:
    """Return True if this process's environment enables expandable segments in PyTorch's allocator.

    PyTorch reads only the first of ALLOCATOR_VARIABLES that is set.

    Expandable segments do not fragment, so the simulation does not apply to them. In tests on an H100, the allocator
    with expandable segments reserved at most 2 % more memory than was allocated.
    """
    settings = (os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ)
    return GROWING_SEGMENTS in next(settings, "").replace(" ", "")


class Allocation(NamedTuple):
    """Event in a trace that allocates `size` bytes under `key` or, if `size` is None, frees the bytes under `key`."""

    key: int
    size: int | None


class OutOfMemory(Exception):
    """Raised if a request does not fit even after every free segment has been returned to the device."""


class _Block:
    """Part of a segment, linked to its neighbours in the segment; blocks are ordered by size, then by age."""

    __slots__ = ("age", "free", "next", "previous", "size", "small")

    def __init__(self, size: int, small: bool, age: int) -> None:
        self.size, self.small, self.age = size, small, age
        self.free = False
        self.previous: _Block | None = None
        self.next: _Block | None = None

    def __lt__(self, other: _Block) -> bool:
        return (self.size, self.age) < (other.size, other.age)


class CachingAllocator:
    """Simulates the allocator of one process that may use `capacity_bytes` of device memory.

    `reserved`: the number of bytes that are currently reserved. `most_reserved`: the peak of `reserved`. `retries`: the
    number of requests for which free segments had to be returned.
    """

    def __init__(self, capacity_bytes: float) -> None:
        self.reserved = self.most_reserved = self.retries = 0
        self._capacity = capacity_bytes
        self._cached: dict[bool, list[_Block]] = {True: [], False: []}
        self._held: dict[int, _Block] = {}
        self._age = 0

    def replay(self, events: Iterable[Allocation]) -> None:
        """Process `events` in order. Raises OutOfMemory if the device is too small."""
        for event in events:
            if event.size is None:
                self._release(event.key)
            elif event.size > 0:
                self._take(event.key, event.size)

    def _take(self, key: int, size: int) -> None:
        size = -(-size // _ROUNDING) * _ROUNDING
        small = size <= _SMALL
        block = self._best_fit(size, small) or self._new_segment(size, small)
        rest = block.size - size
        if rest >= _ROUNDING if small else rest > _SMALL:
            self._split(block, size)
        block.free = False
        self._held[key] = block

    def _best_fit(self, size: int, small: bool) -> _Block | None:
        cached = self._cached[small]
        place = bisect_left(cached, size, key=lambda block: block.size)
        return cached.pop(place) if place < len(cached) else None

    def _new_segment(self, size: int, small: bool) -> _Block:
        segment = -(-size // _SEGMENT_ROUNDING) * _SEGMENT_ROUNDING
        if small:
            segment = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT_FROM:
            segment = _LARGE_SEGMENT
        if self.reserved + segment > self._capacity:
            self.retries += 1
            self._give_back()
            if self.reserved + segment > self._capacity:
                raise OutOfMemory
        self.reserved += segment
        self.most_reserved = max(self.most_reserved, self.reserved)
        self._age += 1
        return _Block(segment, small, self._age)

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.size - size, block.small, block.age)
        rest.free = True
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size = rest, size
        insort(self._cached[block.small], rest)

    def _release(self, key: int) -> None:
        block = self._held.pop(key, None)
        if block is None:
            return
        block.free = True
        if block.next is not None and block.next.free:
            self._uncache(block.next)
            self._absorb_next(block)
        if block.previous is not None and block.previous.free:
            block = block.previous
            self._uncache(block)
            self._absorb_next(block)
        insort(self._cached[block.small], block)

    def _absorb_next(self, block: _Block) -> None:
        following = block.next
        assert following is not None
        block.size += following.size
        block.next = following.next
        if block.next is not None:
            block.next.previous = block

    def _uncache(self, block: _Block) -> None:
        cached = self._cached[block.small]
        place = bisect_left(cached, block)
        while cached[place] is not block:
            place += 1
        del cached[place]

    def _give_back(self) -> None:
        for small, cached in self._cached.items():
            kept = [block for block in cached if block.previous is not None or block.next is not None]
            self.reserved -= sum(block.size for block in cached) - sum(block.size for block in kept)
            self._cached[small] = kept


@dataclass(frozen=True)
class AllocationModel:
    """Predicts the allocations of a process's first steps at any batch size from traces at two batch sizes.

    The size of each allocation is predicted as a linear function of the batch size. `first`, `second`: the events at
    `first_batch` and `second_batch` examples, which must allocate in the same order. All releases are taken from
    `second`, since Python's garbage collector may release memory at different points in the two traces.
    """

    first_batch: int
    second_batch: int
    first: Sequence[Allocation]
    second: Sequence[Allocation]

    def __post_init__(self) -> None:
        """Raise ValueError if the two traces do not contain the same allocations."""
        if self._sizes(self.first).keys() != self._sizes(self.second).keys():
            raise ValueError("the model allocates memory in a different order at a different batch size")

    def events(self, local_batch_size: int) -> list[Allocation]:
        """Return the allocations and releases at `local_batch_size` examples, in order."""
        share = (local_batch_size - self.first_batch) / (self.second_batch - self.first_batch)
        first = self._sizes(self.first)
        return [
            event
            if event.size is None
            else Allocation(event.key, max(0, round(first[event.key] + share * (event.size - first[event.key]))))
            for event in self.second
        ]

    def fits(self, local_batch_size: int, capacity_bytes: float) -> bool:
        """Return True if no step runs out of memory on a device with `capacity_bytes` of free memory."""
        try:
            CachingAllocator(capacity_bytes).replay(self.events(local_batch_size))
        except OutOfMemory:
            return False
        return True

    @staticmethod
    def _sizes(events: Sequence[Allocation]) -> dict[int, int]:
        return {event.key: event.size for event in events if event.size is not None}
