"""Tests that replicas agree under every policy, in 2 and 4 real processes over gloo, for up to 200 steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.agent.scaling.ranks_job import SERVED_AT, SHORT_STEPS

JOB = Path(__file__).with_name("ranks_job.py")


def by_scenario(of_ranks: list[list[dict]]) -> dict[str, list[dict]]:
    """Return one record per rank for each scenario."""
    return {records[0]["scenario"]: list(records) for records in zip(*of_ranks, strict=True)}


@pytest.fixture(scope="module")
def two_ranks(results_of_ranks: Callable[..., list[Any]]) -> dict[str, list[dict]]:
    return by_scenario(results_of_ranks(2, JOB))


@pytest.fixture(scope="module")
def four_ranks(results_of_ranks: Callable[..., list[Any]]) -> dict[str, list[dict]]:
    return by_scenario(results_of_ranks(4, JOB, "gain", "gain-served", "ags-served"))


def assert_identical(records: list[dict]) -> None:
    first = records[0]
    assert len(set(first["digests"])) == len(first["digests"])  # the weights moved
    for other in records[1:]:
        assert other["digests"] == first["digests"]
        assert other["factors"] == first["factors"]
        assert other["versions"] == first["versions"]


def test_weights_and_factors_are_bit_identical_on_two_ranks(two_ranks):
    assert len(two_ranks) == 23
    for records in two_ranks.values():
        assert len(records) == 2
        assert_identical(records)


def test_weights_and_factors_are_bit_identical_on_four_ranks(four_ranks):
    assert len(four_ranks) == 3
    for records in four_ranks.values():
        assert len(records) == 4
        assert_identical(records)


def test_gradients_held_for_a_common_kernel_give_the_weights_of_those_read_one_by_one(two_ranks):
    """Neither a further micro-step nor DDP's averaging changes a gradient that the hooks hold."""
    held, one_by_one = (two_ranks[name][0] for name in ("gain-accumulate-held", "gain-accumulate"))
    assert held["factors"] == one_by_one["factors"]
    assert held["digests"] == one_by_one["digests"]


def test_every_policy_that_scales_does_and_a_compressed_gradient_is_not_taken_for_noise(two_ranks):
    """PowerSGD changes more than the scale of a gradient, so these steps are not measured and the gain remains 1."""
    for name, records in two_ranks.items():
        scaled = any(abs(factor - 1.0) > 1e-3 for factor in records[0]["factors"])
        assert scaled == (name not in ("measure", "none", "unwrapped", "gain-powersgd")), name


def test_policy_measure_reports_the_noise_scale_and_changes_no_bit_of_the_weights(two_ranks):
    measured, unwrapped = two_ranks["measure"], two_ranks["unwrapped"]
    assert measured[0]["digests"] == unwrapped[0]["digests"] == two_ranks["none"][0]["digests"]
    assert measured[0]["noise_scale"] == measured[1]["noise_scale"] > 1.0
    assert unwrapped[0]["noise_scale"] is two_ranks["none"][0]["noise_scale"] is None


def test_batch_normalization_that_one_rank_sees_slows_the_growth_of_the_factor_on_both(two_ranks):
    for record in two_ranks["gain-normalized-twice"]:
        assert 1.0 < record["factors"][0] <= 2.0 ** (2 / 88 * (SHORT_STEPS // 5)), "instead of 1.1 per step"


def test_policies_lead_to_different_weights(two_ranks):
    excluded = ("adamw", "accumulate", "measure", "none", "unwrapped")
    sgd = [records[0]["digests"][-1] for name, records in two_ranks.items() if not name.endswith(excluded)]
    assert len(set(sgd)) == len(sgd)


def test_numbers_pulled_on_the_first_rank_take_effect_on_all_ranks_at_the_next_step(two_ranks, four_ranks):
    for of_ranks in (two_ranks, four_ranks):
        for name in ("gain-served", "ags-served"):
            assert {record["versions"].index(7) for record in of_ranks[name]} == {SERVED_AT + 1}
            assert all(factor <= 1.3 + 1e-6 for record in of_ranks[name] for factor in record["factors"][-1:])
