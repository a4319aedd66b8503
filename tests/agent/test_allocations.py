"""Tests that the replay of PyTorch's caching allocator obeys the rules of that allocator."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tula_agent.allocations import Allocation, AllocationModel, CachingAllocator, OutOfMemory

MIB = 2**20


def allocator_after(*events: tuple[int, int | None], capacity: float = 2**40) -> CachingAllocator:
    allocator = CachingAllocator(capacity)
    allocator.replay(Allocation(*event) for event in events)
    return allocator


@pytest.mark.parametrize(
    ("size", "segment"),
    [(1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB, 10 * MIB), (10 * MIB + 1, 12 * MIB)],
)
def test_a_first_request_takes_a_segment_of_its_class(size: int, segment: int) -> None:
    assert allocator_after((1, size)).reserved == segment


def test_small_requests_share_a_segment_and_a_freed_block_serves_the_next() -> None:
    assert allocator_after(*((key, 1000) for key in range(2048))).reserved == 2 * MIB
    assert allocator_after((1, 30 * MIB), (1, None), (2, 30 * MIB), (2, None), (3, 12 * MIB)).reserved == 30 * MIB


def test_a_block_that_is_split_cannot_serve_a_larger_request_until_its_neighbours_merge() -> None:
    """Two free pieces add up to 30 MiB, but a request for 30 MiB needs a new segment."""
    split = ((1, 40 * MIB), (1, None), (2, 15 * MIB), (3, 10 * MIB), (4, 15 * MIB), (2, None), (4, None))
    assert allocator_after(*split, (5, 30 * MIB)).reserved == 70 * MIB
    assert allocator_after(*split, (3, None), (5, 30 * MIB)).reserved == 40 * MIB


def test_free_segments_are_given_back_before_memory_runs_out() -> None:
    retried = allocator_after((1, 60 * MIB), (1, None), (2, 80 * MIB), capacity=100 * MIB)
    assert (retried.retries, retried.reserved, retried.most_reserved) == (1, 80 * MIB, 80 * MIB)
    with pytest.raises(OutOfMemory):
        allocator_after((1, 60 * MIB), (2, 80 * MIB), capacity=100 * MIB)


@given(st.lists(st.tuples(st.integers(1, 64 * MIB), st.integers(0, 30)), min_size=1, max_size=60))
def test_what_is_reserved_holds_what_is_allocated_and_a_retry_frees_it_all(requests: list[tuple[int, int]]) -> None:
    allocator, held = CachingAllocator(2**40), {}
    for key, (size, victim) in enumerate(requests):
        allocator.replay([Allocation(key, size)])
        held[key] = size
        if victim in held:
            allocator.replay([Allocation(victim, None)])
            del held[victim]
        assert allocator.reserved >= sum(held.values())
    allocator.replay([Allocation(key, None) for key in held])
    with pytest.raises(OutOfMemory):
        allocator.replay([Allocation(-1, 2**41)])
    assert allocator.reserved == 0


def test_sizes_follow_the_line_through_two_traces_and_other_orders_are_refused() -> None:
    first = [Allocation(1, 100), Allocation(2, 1000), Allocation(2, None)]
    second = [Allocation(1, 100), Allocation(2, 3000), Allocation(2, None)]
    model = AllocationModel(1, 3, first, second)
    assert model.events(1) == first
    assert model.events(3) == second
    assert model.events(10)[1] == Allocation(2, 10_000)
    with pytest.raises(ValueError, match="in a different order"):
        AllocationModel(1, 3, first, [*second, Allocation(3, 1)])
