"""Candidates span nodes and batches within memory, or keep one global batch."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.configurations import make_configuration
from tula_service.perfmodel.candidates import SearchSpace, enumerate_candidates, powers_of_two
from tula_service.perfmodel.points import ObservationError


@given(st.integers(1, 50), st.integers(1, 2000))
def test_powers_of_two_always_hold_both_ends(smallest, extra):
    values = powers_of_two(smallest, smallest + extra)
    assert values[0] == smallest
    assert values[-1] == smallest + extra
    assert all(larger <= 2 * smaller for smaller, larger in pairwise(values))


def test_candidates_span_nodes_and_batches_with_both_ends():
    space = SearchSpace(min_num_nodes=1, max_num_nodes=6, ranks_per_node=4, max_local_batch_size=100, instance_type="a")
    found = enumerate_candidates(space)
    assert make_configuration(6, 4, 100, 1, "a") in found
    assert {c.num_nodes for c in found} == {1, 2, 4, 6}
    assert {c.local_batch_size for c in found} == {32, 64, 100}
    assert list(found) == sorted(found)


def test_a_constant_global_batch_is_kept_by_accumulation_when_memory_is_short():
    space = SearchSpace(
        min_num_nodes=1, max_num_nodes=8, ranks_per_node=2, max_local_batch_size=64, global_batch_size=512
    )
    found = enumerate_candidates(space)
    assert {c.global_batch_size for c in found} == {512}
    assert {c.num_nodes for c in found} == {1, 2, 4, 8}
    assert max(c.local_batch_size for c in found) <= 64
    assert any(c.grad_accum_steps > 1 for c in found if c.num_nodes == 1)


def test_the_largest_batch_is_accumulated_as_far_as_is_allowed():
    space = SearchSpace(min_num_nodes=1, max_num_nodes=2, max_local_batch_size=64, max_grad_accum_steps=6)
    found = {(c.num_nodes, c.local_batch_size, c.grad_accum_steps) for c in enumerate_candidates(space)}
    assert found == {(nodes, *rest) for nodes in (1, 2) for rest in ((32, 1), (64, 1), (64, 2), (64, 4), (64, 6))}


def test_an_empty_space_says_what_to_change():
    with pytest.raises(ObservationError, match="lower min_local_batch_size"):
        enumerate_candidates(SearchSpace(min_num_nodes=1, max_num_nodes=2, max_local_batch_size=16))
