"""Thresholds follow the observed variability, and are rolled back when they hurt validation accuracy."""

from __future__ import annotations

import numpy as np
import pytest

from tula_service.analysis.scaling import (
    RECENT_COLUMNS,
    WHOLE_COLUMNS,
    Body,
    Columns,
    FloatArray,
    first_body,
    in_force,
    next_body,
    tuned_delta,
)

NOTHING = np.zeros(0, np.int64), np.zeros(0)
SEEN: Columns = dict.fromkeys((*RECENT_COLUMNS, *WHOLE_COLUMNS), NOTHING)


def next_after(body: Body, version: int, columns: Columns, run_id: str = "run") -> Body | None:
    return next_body(body, version, run_id, columns)


def tuned(delta: float) -> Body:
    """A body whose delta was tuned in the run, as version 2."""
    mark = {"run_id": "run", "version": 2, "before": {"delta": 0.5}}
    return first_body() | {"tuned": {"delta": delta, **mark}}


def seen(*accuracy: float, before: int) -> Columns:
    """Evaluations every 100 steps, of which the first `before` were made under the earlier thresholds."""
    steps = np.arange(100, 100 * len(accuracy) + 1, 100)
    versions = np.array([1.0, 2.0])
    taken_up = np.array([0, 100 * before + 50])
    return {**SEEN, "validation_accuracy": (steps, np.array(accuracy)), "thresholds_version": (taken_up, versions)}


def varying(values: FloatArray, columns: Columns = SEEN) -> Columns:
    return {**columns, "gradient_variability": (np.arange(values.size), values)}


def test_delta_moves_to_where_one_step_in_ten_is_sensitive() -> None:
    column = np.random.default_rng(0).uniform(0.0, 0.8, 4000)
    found = tuned_delta(column, 0.5)
    assert found is not None
    assert np.mean(column >= found) == pytest.approx(0.10, abs=0.02)


def test_thresholds_that_fit_the_variability_are_not_published_again() -> None:
    telemetry = varying(np.random.default_rng(0).uniform(0.0, 0.8, 4000))
    body = next_after(first_body(), 1, telemetry)
    assert body is not None
    assert next_after(body, 2, telemetry) is None


def test_a_short_or_empty_column_changes_nothing() -> None:
    assert next_after(first_body(), 1, varying(np.array([0.1, np.inf, np.nan]))) is None
    assert next_after(first_body(), 1, SEEN) is None


def test_numbers_that_the_script_passed_are_not_tuned() -> None:
    calm = varying(np.full(200, 0.1))
    body = next_after(first_body(), 1, {**calm, "scripted_delta": (np.array([0]), np.array([0.5]))})
    assert body is None


def test_a_number_that_a_user_set_overrides_the_tuned_one_of_its_policy_only() -> None:
    body = tuned(delta=0.1) | {"set": {"ags": {"delta": 0.7}}}
    assert in_force(body, "ags")["delta"] == 0.7
    assert in_force(body, "static")["delta"] == 0.1
    assert in_force(body, "gain") == {}


def test_a_number_that_a_users_value_hides_is_not_tuned() -> None:
    calm = varying(np.full(200, 0.1))
    by_user = {"ags": {"delta": 0.7}}
    assert next_after(first_body() | {"policy": "ags", "set": by_user}, 1, calm) is None
    assert next_after(first_body() | {"set": by_user | {"static": {"delta": 0.7}}}, 1, calm) is None
    assert next_after(first_body() | {"set": by_user}, 1, calm) is not None


def test_a_lasting_drop_restores_the_delta_before() -> None:
    body = next_after(tuned(delta=0.1), 2, seen(0.70, 0.72, 0.73, 0.74, 0.60, 0.61, before=4))
    assert body is not None
    assert body["tuned"] == {"delta": 0.5}
    assert "accuracy fell from 0.74 at step 400" in body["reason"]


def test_a_run_whose_thresholds_were_rolled_back_is_not_tuned_again() -> None:
    body = next_after(tuned(delta=0.1), 2, seen(0.70, 0.74, 0.60, 0.61, before=2))
    assert body is not None
    calm = varying(np.full(200, 0.1), seen(0.70, 0.74, 0.60, 0.61, before=2))
    assert next_after(body, 3, calm) is None
    assert next_after(body, 3, calm, "next") is not None


@pytest.mark.parametrize(
    ("accuracy", "before"),
    [
        ((0.70, 0.74, 0.60), 2),  # one bad evaluation may be chance
        ((0.70, 0.74, 0.60, 0.745), 2),  # it recovered
        ((0.70, 0.60, 0.72, 0.59, 0.71, 0.60, 0.61), 5),  # no worse than the usual swing
        ((0.60, 0.61), 0),  # nothing to compare with
        ((), 0),
    ],
)
def test_chance_recovery_and_ordinary_swings_roll_nothing_back(accuracy: tuple[float, ...], before: int) -> None:
    assert next_after(tuned(delta=0.1), 2, seen(*accuracy, before=before)) is None


def test_a_drop_before_the_ranks_took_the_tuned_delta_up_rolls_nothing_back() -> None:
    columns = seen(0.70, 0.74, 0.60, 0.61, before=2)
    assert next_after(tuned(delta=0.1), 2, {**columns, "thresholds_version": NOTHING}) is None
    assert next_after(tuned(delta=0.1), 2, columns) is not None


def test_a_drop_under_the_scripts_own_numbers_rolls_nothing_back() -> None:
    assert next_after(first_body(), 1, seen(0.7, 0.6, 0.5, before=1)) is None
