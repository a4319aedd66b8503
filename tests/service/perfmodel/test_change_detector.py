"""A change of speed raises an alarm soon; stragglers and steady steps raise none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tula_service.perfmodel.change_detector import DriftState, watch_drift
from tula_service.perfmodel.points import ObservationError


def steps(rng: np.random.Generator, mean: float, number: int) -> np.ndarray:
    times = mean * np.exp(rng.normal(0, 0.03, number))
    times[rng.random(number) < 0.03] *= 5.0
    return times


@pytest.mark.parametrize("seed", range(20))
def test_two_thousand_steady_steps_with_stragglers_raise_no_alarm(seed):
    rng = np.random.default_rng(seed)
    state = watch_drift(DriftState.expecting(0.93, 1.08), steps(rng, 1.0 + 0.05 * (seed % 3 - 1), 2000))
    assert state.alarm is None
    assert state.steps == 2000


@pytest.mark.parametrize("share_of_communication", [0.15, 0.3, 0.6])
def test_a_link_four_times_slower_is_noticed_within_fifty_steps(share_of_communication):
    rng = np.random.default_rng(3)
    state = watch_drift(DriftState.expecting(0.93, 1.08), steps(rng, 1.0, 1000))
    slowed = 1.0 + 3.0 * share_of_communication
    state = watch_drift(state, steps(rng, slowed, 50))
    assert state.alarm == "slower"
    assert state.alarm_after_steps is not None
    assert 1000 < state.alarm_after_steps <= 1050


@settings(max_examples=25)
@given(cut=st.integers(0, 300))
def test_folding_in_parts_equals_folding_at_once(cut):
    times = steps(np.random.default_rng(1), 1.2, 300)
    state = DriftState.expecting(0.95, 1.05)
    assert watch_drift(watch_drift(state, times[:cut]), times[cut:]) == watch_drift(state, times)


def test_a_faster_job_is_noticed_too_and_nonsense_is_refused():
    assert watch_drift(DriftState.expecting(0.9, 1.1), np.full(50, 0.5)).alarm == "faster"
    with pytest.raises(ObservationError, match="below low_s"):
        DriftState.expecting(1.1, 0.9)
    with pytest.raises(ObservationError, match="step_times_s"):
        watch_drift(DriftState.expecting(0.9, 1.1), [float("nan")])


@pytest.mark.parametrize("every", [2, 4, 8])
def test_slow_steps_that_recur_as_predicted_confirm_no_alarm(every):
    """The single steps are far from the predicted mean, their mean is not."""
    times = np.where(np.arange(400) % every == 0, 0.162, 0.012)
    state = DriftState.expecting(0.95 * times.mean(), 1.05 * times.mean())
    for seen in range(20, 400):
        state = watch_drift(state, times[seen : seen + 1])
        assert not state.confirmed_by(times[seen - 19 : seen + 1])
        state = state.rearmed() if state.alarm else state


@pytest.mark.parametrize(("factor", "confirmed"), [(1.08, False), (1.2, True), (4.0, True)])
def test_only_a_change_of_ten_per_cent_that_lasts_is_confirmed(factor, confirmed):
    times = np.concatenate([np.ones(50), np.full(25, factor)]) * np.exp(np.random.default_rng(2).normal(0, 0.01, 75))
    state, found = DriftState.expecting(0.99, 1.01), []
    for seen in range(20, 75):
        state = watch_drift(state, times[seen : seen + 1])
        found.append(state.confirmed_by(times[seen - 19 : seen + 1]))
        state = state.rearmed() if state.alarm else state
    assert any(found) is confirmed
    assert not any(found[:44]), "fourteen slow steps in a row are a burst"
