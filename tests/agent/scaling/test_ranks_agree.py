"""With 2 and 4 real processes over gloo, up to 200 steps: whatever the policy and source, replicas stay identical."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

JOB = Path(__file__).with_name("ranks_job.py")


def by_scenario(of_ranks: list[list[dict]]) -> dict[str, list[dict]]:
    """By scenario, one record per rank."""
    return {records[0]["scenario"]: list(records) for records in zip(*of_ranks, strict=True)}


@pytest.fixture(scope="module")
def two_ranks(said_by: Callable[..., list[Any]]) -> dict[str, list[dict]]:
    return by_scenario(said_by(2, JOB))


@pytest.fixture(scope="module")
def four_ranks(said_by: Callable[..., list[Any]]) -> dict[str, list[dict]]:
    return by_scenario(said_by(4, JOB, "gain", "ags-tensor", "ags-element", "gain-thresholds"))


def assert_identical(records: list[dict]) -> None:
    first = records[0]
    assert len(set(first["digests"])) == len(first["digests"])  # the weights did move
    for other in records[1:]:
        assert other["digests"] == first["digests"]
        assert other["factors"] == first["factors"]
        assert other["versions"] == first["versions"]


def test_weights_and_factors_are_bit_identical_on_two_ranks(two_ranks):
    assert len(two_ranks) == 15
    for records in two_ranks.values():
        assert len(records) == 2
        assert_identical(records)


def test_weights_and_factors_are_bit_identical_on_four_ranks(four_ranks):
    assert len(four_ranks) == 4
    for records in four_ranks.values():
        assert len(records) == 4
        assert_identical(records)


def test_every_policy_did_scale_something(two_ranks):
    for name, records in two_ranks.items():
        assert any(abs(factor - 1.0) > 1e-3 for factor in records[0]["factors"]), name


def test_policies_and_granularities_lead_to_different_weights(two_ranks):
    sgd = [r[0]["digests"][-1] for name, r in two_ranks.items() if not name.endswith(("adamw", "accumulate"))]
    assert len(set(sgd)) == len(sgd)


def test_new_thresholds_given_to_the_first_rank_alone_take_force_on_all_at_one_step(two_ranks, four_ranks):
    for records in (two_ranks["gain-thresholds"], four_ranks["gain-thresholds"]):
        changes = {record["versions"].index(7) for record in records}
        assert len(changes) == 1
        assert 50 < changes.pop() <= 50 + 17
