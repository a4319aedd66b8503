"""Tests that candidates cover the permitted node counts and the batches that fit, or keep one global batch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tula_wire as wire
from tests.support.configurations import make_configuration
from tula_service.analysis.job_data import list_candidates, powers_of_two
from tula_service.perfmodel.points import ObservationError
from tula_wire.configurations import Variant


def a_job(batch: dict[str, Any], **cluster: int) -> wire.JobSpec:
    return wire.JobSpec.model_validate(
        {
            "name": "a job",
            "model": {"name": "net"},
            "dataset": {"size": 1_000_000},
            "batch": batch,
            "cluster": [{"instance_type": "a", **cluster}],
        }
    )


@given(st.integers(1, 50), st.integers(1, 2000))
def test_powers_of_two_always_hold_both_ends(smallest, extra):
    values = powers_of_two(smallest, smallest + extra)
    assert values[0] == smallest
    assert values[-1] == smallest + extra
    assert all(larger <= 2 * smaller for smaller, larger in pairwise(values))


def test_candidates_span_nodes_and_batches_with_both_ends():
    found = list_candidates(a_job({"max_local_batch_size": 100}, max_nodes=6, ranks_per_node=4), {})
    assert make_configuration(6, 4, 100, 1, "a") in found
    assert {c.num_nodes for c in found} == {1, 2, 4, 6}
    assert {c.local_batch_size for c in found} == {32, 64, 100}
    assert list(found) == sorted(found)


def test_a_constant_global_batch_is_kept_by_accumulation_when_memory_is_short():
    batch = {"max_local_batch_size": 64, "global_batch_size": 512, "max_grad_accum_steps": 16}
    found = list_candidates(a_job(batch, max_nodes=8, ranks_per_node=2), {})
    assert {c.global_batch_size for c in found} == {512}
    assert {c.num_nodes for c in found} == {1, 2, 4, 8}
    assert max(c.local_batch_size for c in found) <= 64
    assert any(c.grad_accum_steps > 1 for c in found if c.num_nodes == 1)


def test_every_candidate_has_the_micro_steps_that_the_script_holds():
    job = a_job({"max_local_batch_size": 64, "grad_accum_steps": 2}, max_nodes=2)
    found = {(c.num_nodes, c.local_batch_size, c.grad_accum_steps) for c in list_candidates(job, {})}
    assert found == {(nodes, batch, 2) for nodes in (1, 2) for batch in (32, 64)}
    fixed = a_job({"max_local_batch_size": 64, "global_batch_size": 256, "grad_accum_steps": 2}, max_nodes=4)
    found = {(c.num_nodes, c.local_batch_size, c.grad_accum_steps) for c in list_candidates(fixed, {})}
    assert found == {(2, 64, 2), (4, 32, 2)}


def test_micro_steps_that_are_held_and_varied_or_that_no_batch_fits_are_refused():
    with pytest.raises(ValueError, match="mutually exclusive"):
        a_job({"grad_accum_steps": 2, "max_grad_accum_steps": 4}, max_nodes=2)
    odd = a_job({"max_local_batch_size": 64, "global_batch_size": 255, "grad_accum_steps": 2}, max_nodes=1)
    with pytest.raises(ObservationError, match="grad_accum_steps = 2"):
        list_candidates(odd, {})


def test_the_largest_batch_is_accumulated_as_far_as_is_allowed():
    job = a_job({"max_local_batch_size": 64, "max_grad_accum_steps": 6}, max_nodes=2)
    found = {(c.num_nodes, c.local_batch_size, c.grad_accum_steps) for c in list_candidates(job, {})}
    assert found == {(nodes, *rest) for nodes in (1, 2) for rest in ((32, 1), (64, 1), (64, 2), (64, 4), (64, 6))}


def test_an_empty_space_says_what_to_change():
    with pytest.raises(ObservationError, match="lower min_local_batch_size"):
        list_candidates(a_job({}, max_nodes=2), {Variant("a"): 16})
