"""Thresholds follow the observed variability, and are taken back when they hurt."""

from __future__ import annotations

import numpy as np
import pytest

from tula_service.perfmodel.points import ObservationError
from tula_service.perfmodel.threshold_tuning import AccuracyPoint, decide_roll_back, tune_thresholds


def test_delta_moves_to_where_one_step_in_ten_is_sensitive():
    column = np.random.default_rng(0).uniform(0.0, 0.8, 4000)
    tuned = tune_thresholds(column, delta=0.5, small_batch_size=64, global_batch_size=1024)
    assert tuned.changed
    assert np.mean(column >= tuned.delta) == pytest.approx(0.10, abs=0.02)


def test_thresholds_that_fit_already_stay():
    column = np.random.default_rng(0).uniform(0.0, 0.8, 4000)
    first = tune_thresholds(column, delta=0.5, small_batch_size=64, global_batch_size=1024)
    again = tune_thresholds(column, delta=first.delta, small_batch_size=first.small_batch_size, global_batch_size=1024)
    assert not again.changed


@pytest.mark.parametrize(("level", "expected"), [(0.1, 32), (0.6, 64), (3.0, 128)])
def test_rough_gradients_ask_for_milder_scaling_and_calm_ones_for_more(level, expected):
    tuned = tune_thresholds(np.full(200, level), delta=level, small_batch_size=64, global_batch_size=2048)
    assert tuned.small_batch_size == expected


def test_b_small_never_leaves_its_bounds():
    calm, rough = np.full(200, 0.01), np.full(200, 50.0)
    small = large = 64
    for _ in range(12):
        small = tune_thresholds(calm, delta=0.5, small_batch_size=small, global_batch_size=2048).small_batch_size
        large = tune_thresholds(rough, delta=0.5, small_batch_size=large, global_batch_size=2048).small_batch_size
    assert (small, large) == (32, 1024)


def test_a_short_or_empty_column_changes_nothing():
    tuned = tune_thresholds([0.1, np.inf, np.nan], delta=0.5, small_batch_size=64, global_batch_size=1024)
    assert (tuned.delta, tuned.small_batch_size, tuned.changed) == (0.5, 64, False)


def test_senseless_batches_are_refused():
    with pytest.raises(ObservationError, match="small_batch_size"):
        tune_thresholds([0.1] * 100, delta=0.5, small_batch_size=128, global_batch_size=64)


def history(*accuracies_by_version):
    points, step = [], 0
    for version, accuracies in accuracies_by_version:
        for accuracy in accuracies:
            step += 100
            points.append(AccuracyPoint(step, accuracy, version))
    return points


def test_a_lasting_drop_under_new_thresholds_goes_back_to_the_last_checkpoint_before_them():
    decision = decide_roll_back(history((1, [0.70, 0.72, 0.73, 0.74]), (2, [0.60, 0.61])))
    assert decision is not None
    assert (decision.to_version, decision.checkpoint_step) == (1, 400)
    assert "0.74" in decision.reason


@pytest.mark.parametrize(
    "points",
    [
        history((1, [0.70, 0.74]), (2, [0.60])),  # one bad evaluation may be chance
        history((1, [0.70, 0.74]), (2, [0.60, 0.745])),  # it recovered
        history((1, [0.70, 0.60, 0.72, 0.59, 0.71]), (2, [0.60, 0.61])),  # no worse than the usual swing
        history((1, [0.70, 0.60, 0.50])),  # nothing was changed, so nothing can be taken back
        [],
    ],
)
def test_chance_recovery_and_ordinary_swings_are_left_alone(points):
    assert decide_roll_back(points) is None


def test_a_nan_accuracy_is_refused():
    with pytest.raises(ObservationError, match="step 100"):
        decide_roll_back([AccuracyPoint(100, float("nan"), 1)])
