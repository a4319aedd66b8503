"""Tests that runs with and without waits for data determine the predicted wait, which is a part of the step time."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.configurations import make_configuration
from tula_service.perfmodel.points import StepTimeObservations
from tula_service.perfmodel.step_time_model import fit_input_wait, fit_step_time
from tula_wire import Configuration

GRID = [make_configuration(nodes, 1, batch) for nodes in (1, 2, 4) for batch in (16, 32, 64, 128, 256)]
PROFILED = [make_configuration(*each) for each in ((1, 1, 16), (1, 1, 256), (4, 1, 16), (4, 1, 64), (4, 1, 256))]


def rest(c: Configuration) -> float:
    return 0.03 + 0.0002 * c.local_batch_size + 0.02 * (1 - 1 / c.num_nodes)


def wait(c: Configuration, hidden: float, s_per_example: float = 0.001) -> float:
    return max(0.0, s_per_example * c.local_batch_size - hidden * rest(c))


def measured(configurations: list[Configuration], hidden: float, noise: float = 0.0) -> StepTimeObservations:
    dice = np.random.default_rng(5)
    waits = np.array([wait(c, hidden) for c in configurations])
    waits *= np.exp(noise * dice.standard_normal(waits.size))
    rests = np.array([rest(c) for c in configurations])
    return StepTimeObservations.at(configurations, rests + waits, compute_time_s=rests, input_time_s=waits)


@pytest.mark.parametrize("hidden", [0.0, 0.6, 1.0])
def test_loading_and_what_hides_it_are_recovered(hidden: float) -> None:
    found = fit_input_wait(measured(PROFILED, hidden))
    assert found.s_per_example == pytest.approx(0.001, rel=0.05)
    assert found.hidden == pytest.approx(hidden, abs=0.05)


@pytest.mark.parametrize("hidden", [0.0, 0.6, 1.0])
def test_a_wait_whose_share_grows_with_the_batch_is_predicted_where_it_was_not_measured(hidden: float) -> None:
    observed = measured(PROFILED, hidden, noise=0.03)
    predicted = fit_step_time(observed, candidates=GRID).predict(GRID)
    true = np.array([wait(c, hidden) for c in GRID])
    step = np.array([rest(c) for c in GRID]) + true
    assert predicted.input_s / step == pytest.approx(true / step, abs=0.04)
    assert predicted.mean_s == pytest.approx(step, rel=0.08)
    assert predicted.compute_s + predicted.exposed_comm_s + predicted.input_s == pytest.approx(predicted.mean_s)
    assert np.all((predicted.low_s < predicted.mean_s) & (predicted.mean_s < predicted.high_s))


def test_a_run_that_was_measured_waits_as_it_did() -> None:
    observed = measured(PROFILED, 0.6, noise=0.2)
    predicted = fit_step_time(observed, candidates=GRID).predict(PROFILED)
    assert predicted.input_s == pytest.approx(observed.input_time_s)


def test_without_waits_nothing_changes() -> None:
    times = [rest(c) for c in PROFILED]
    plain = fit_step_time(StepTimeObservations.at(PROFILED, times), candidates=GRID).predict(GRID)
    none = StepTimeObservations.at(PROFILED, times, input_time_s=[0.0] * len(PROFILED))
    assert fit_input_wait(none).s_per_example == 0.0
    assert fit_step_time(none, candidates=GRID).predict(GRID).mean_s == pytest.approx(plain.mean_s, rel=1e-12)


def test_one_run_says_how_long_an_example_takes() -> None:
    found = fit_input_wait(measured(PROFILED[1:2], 0.0))
    assert found.s_per_example == pytest.approx(0.001, rel=0.02)


def test_another_instance_type_loads_as_that_which_was_measured() -> None:
    other = make_configuration(2, 1, 256, instance_type="other")
    predicted = fit_step_time(measured(PROFILED, 0.0), candidates=[*GRID, other]).predict([other])
    assert predicted.input_s[0] == pytest.approx(0.256, rel=0.05)
