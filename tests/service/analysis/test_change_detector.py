"""Tests that a change of speed soon raises an alarm, and that stragglers and steady steps raise none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.busy_host import steady_steps
from tula_service.analysis.alarm import DriftState, watch_drift
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
    with pytest.raises(ObservationError, match="step_times_s"):
        watch_drift(DriftState.expecting(0.9, 1.1), [float("nan")])


@pytest.mark.parametrize("every", [2, 4, 8])
def test_slow_steps_that_recur_as_predicted_confirm_no_alarm(every):
    """Each single step is far from the predicted mean, but the mean of many steps is near the predicted mean."""
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
    assert not any(found[:44]), "fourteen consecutive slow steps are a burst"


@pytest.mark.parametrize(("interval", "change"), [(0.1, 1.12), (0.2, 1.25), (0.3, 1.35), (0.5, 1.6), (0.5, 0.45)])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_speed_just_outside_a_wide_interval_alarms_within_a_hundred_steps(interval, change, noise):
    times = change * np.exp(np.random.default_rng(4).normal(0, noise, 100))
    promised = DriftState.expecting(1.0 - interval, 1.0 + interval)
    state = watch_drift(promised, times)
    assert state.alarm == ("slower" if change > 1.0 else "faster")
    assert state.alarm_after_steps == 50
    assert state.confirmed_by(times[30:50])
    inside = watch_drift(promised, np.full(40, 1.0))
    assert watch_drift(inside, np.full(100, change)).alarm_after_steps <= 140


@pytest.mark.parametrize("interval", [0.1, 0.2, 0.3, 0.5])
@pytest.mark.parametrize("place", [0.03, 0.97])
def test_a_speed_just_inside_a_wide_interval_never_alarms(interval, place):
    """The noise is so large that single steps are outside the interval."""
    mean = 1.0 - interval + 2.0 * interval * place
    times = mean * np.exp(np.random.default_rng(5).normal(0, interval / 3.0, 2000))
    assert watch_drift(DriftState.expecting(1.0 - interval, 1.0 + interval), times).alarm is None


def confirmed_alarms(times, width):
    """Return (step, alarm) of a run that samples 100 steps and then every fifth, and sends ten samples at a time."""
    at = np.concatenate([np.arange(100), np.arange(100, times.size, 5)])
    state, found = DriftState.expecting(1.0 / (1.0 + width), 1.0 + width), []
    for seen in range(10, at.size + 1, 10):
        state = watch_drift(state, times[at[seen - 10 : seen]])
        if state.alarm:
            if state.confirmed_by(times[at[max(0, seen - 20) : seen]]):
                found.append((int(at[seen - 1]), state.alarm))
            state = state.rearmed()
    return found


@pytest.mark.parametrize("width", [0.05, 0.08, 0.12, 0.2])
def test_steady_steps_on_a_busy_host_confirm_no_alarm(width):
    assert confirmed_alarms(steady_steps(), width) == []


@pytest.mark.parametrize("width", [0.05, 0.08, 0.12])
@pytest.mark.parametrize(("since", "within"), [(0, 100), (1000, 200)])
def test_a_training_that_becomes_a_quarter_slower_on_a_busy_host_is_noticed(width, since, within):
    """The alarm takes at most 100 steps at the start and 200 later, when only every fifth step is sampled."""
    times = steady_steps()
    times[since:] *= 1.25
    step, alarm = confirmed_alarms(times, width)[0]
    assert alarm == "slower"
    assert since <= step < since + within


def test_only_an_alarm_of_the_sums_begins_them_again():
    """A block of steps that ends soon after a change and is not confirmed must not delay the next alarm."""
    far = watch_drift(DriftState.expecting(0.9, 1.1), np.full(20, 2.0))
    assert far.rearmed() == DriftState(far.centre, far.half_width, steps=20)
    near = watch_drift(DriftState.expecting(0.9, 1.1), np.full(50, 1.12))
    assert near.alarm == "slower"
    assert 0.0 < near.rearmed().slower == near.slower
    assert near.rearmed().alarm is None
