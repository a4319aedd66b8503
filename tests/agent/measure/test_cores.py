"""Tests that the cores of a node are divided among the ranks that share them."""

from __future__ import annotations

import pytest

from tula_agent.measure.cores import cores_of_rank


@pytest.mark.parametrize(("allowed", "of_node", "cores"), [(64, 64, 8), (64, None, 8), (8, 64, 8), (4, 4, 1)], ids=str)
def test_cores_are_divided_only_where_the_ranks_of_a_node_share_them(
    allowed: int, of_node: int | None, cores: int
) -> None:
    assert cores_of_rank(allowed, of_node, ranks_per_node=8) == cores
