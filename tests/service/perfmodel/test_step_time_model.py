"""Tests that the step-time model recovers known parameters, has valid intervals, and rejects invalid input."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.configurations import make_configuration
from tula_service.perfmodel.points import ObservationError, StepTimeObservations
from tula_service.perfmodel.priors import Hardware, ModelFacts, Priors, prior_from_hardware, prior_from_jobs
from tula_service.perfmodel.step_time_model import StepTimePredictions, fit_step_time, unmeasured_model
from tula_wire import Configuration
from tula_wire.configurations import Variant
from tula_wire.enums import StepTimeForm

GRID = [make_configuration(nodes, 4, batch) for nodes in (1, 2, 4, 8) for batch in (32, 64, 128, 256, 512)]
PLANNED = [GRID[i] for i in (0, 4, 7, 11, 15, 19)]


def overlap_time(c: Configuration, *, floor=0.02, slope=0.001, intra=0.01, inter=0.05, speed=1.0) -> float:
    """Return the step time of a job that hides communication behind compute, with an overlap exponent g of 2."""
    compute = floor + slope * c.local_batch_size
    comm = intra * (c.ranks_per_node > 1) + inter * (c.num_nodes > 1) * (c.num_nodes / 2) ** 0.3
    return speed * ((c.grad_accum_steps - 1) * compute + (compute**2 + comm**2) ** 0.5)


def observe(configurations, time=overlap_time, **columns) -> StepTimeObservations:
    return StepTimeObservations.at(configurations, [time(c) for c in configurations], **columns)


def log_sd(predicted: StepTimePredictions) -> np.ndarray:
    """Return the standard deviations of log step time, computed from the upper ends of the intervals."""
    return np.log(predicted.high_s / predicted.mean_s) / 1.7


def test_six_runs_predict_the_rest_of_a_physical_job_within_five_per_cent():
    model = fit_step_time(observe(PLANNED), candidates=GRID)
    errors = np.abs(model.predict(GRID).mean_s / [overlap_time(c) for c in GRID] - 1)
    assert np.median(errors) < 0.02
    assert errors.max() < 0.10
    assert model.basis == "profiled"


@pytest.mark.parametrize("form", get_args(StepTimeForm))
def test_every_form_orders_its_intervals_and_marks_what_was_measured(form):
    predicted = fit_step_time(observe(PLANNED), form=form, candidates=GRID).predict(GRID)
    assert np.all(predicted.low_s < predicted.mean_s)
    assert np.all(predicted.mean_s < predicted.high_s)
    assert np.allclose(predicted.compute_s + predicted.exposed_comm_s, predicted.mean_s)
    assert predicted.measured.sum() == len(PLANNED)


def test_measured_configurations_are_predicted_as_measured():
    predicted = fit_step_time(observe(PLANNED), candidates=GRID).predict(PLANNED)
    assert np.allclose(predicted.mean_s, [overlap_time(c) for c in PLANNED], rtol=0.03)


@settings(max_examples=15, deadline=None)
@given(speed=st.floats(1e-4, 1e4))
def test_predictions_scale_with_the_clock(speed):
    once = fit_step_time(observe(PLANNED), candidates=GRID).predict(GRID)
    scaled = fit_step_time(observe(PLANNED, lambda c: overlap_time(c, speed=speed)), candidates=GRID).predict(GRID)
    assert np.allclose(scaled.mean_s, speed * once.mean_s, rtol=2e-3)
    assert np.allclose(scaled.high_s, speed * once.high_s, rtol=2e-2)


@settings(max_examples=10, deadline=None)
@given(order=st.permutations(range(len(PLANNED))))
def test_the_order_of_observations_does_not_matter_and_a_fit_is_deterministic(order):
    first = fit_step_time(observe(PLANNED), candidates=GRID).predict(GRID)
    again = fit_step_time(observe([PLANNED[i] for i in order]), candidates=GRID).predict(GRID)
    assert np.allclose(first.mean_s, again.mean_s, rtol=1e-4)
    same = fit_step_time(observe(PLANNED), candidates=GRID).predict(GRID)
    assert np.array_equal(first.mean_s, same.mean_s)


def test_terms_add_up_and_communication_falls_with_the_batch():
    predicted = fit_step_time(observe(GRID[::2]), candidates=GRID).predict(GRID[15:])
    assert np.allclose(predicted.compute_s + predicted.exposed_comm_s, predicted.mean_s)
    shares = predicted.exposed_comm_s / predicted.mean_s
    assert shares[0] > 2 * shares[-1]


def test_accumulated_micro_steps_cost_compute_only():
    model = fit_step_time(observe(GRID), candidates=GRID)
    one, eight = model.predict([make_configuration(8, 4, 32, 1), make_configuration(8, 4, 32, 8)]).mean_s
    truth = overlap_time(make_configuration(8, 4, 32, 8))
    assert eight < 8 * one
    assert eight == pytest.approx(truth, rel=0.15)


def test_more_runs_narrow_the_intervals():
    few = log_sd(fit_step_time(observe(PLANNED[:3]), candidates=GRID).predict(GRID))
    many = log_sd(fit_step_time(observe(GRID[::2]), candidates=GRID).predict(GRID))
    assert np.median(many) < 0.6 * np.median(few)


def test_predictions_outside_the_measured_range_are_flagged_and_uncertain():
    model = fit_step_time(observe([c for c in PLANNED if c.num_nodes <= 4]), candidates=GRID)
    inside, beyond = model.predict([make_configuration(4, 4, 128), make_configuration(32, 4, 128)]), None
    beyond = inside.extrapolated[1]
    assert beyond
    assert not inside.extrapolated[0]
    assert log_sd(inside)[1] > 1.5 * log_sd(inside)[0]


def test_one_bad_run_does_not_bend_the_rest():
    bad = observe(GRID[::2]).step_time_s.copy()
    bad[5] *= 3.0
    model = fit_step_time(StepTimeObservations.at(GRID[::2], bad), candidates=GRID)
    others = GRID[1::2]
    errors = np.abs(model.predict(others).mean_s / [overlap_time(c) for c in others] - 1)
    assert np.median(errors) < 0.06


def test_repeats_are_merged_with_the_extremes_of_their_runs():
    repeated = [*PLANNED, PLANNED[0], PLANNED[0]]
    times = [overlap_time(c) for c in PLANNED] + [overlap_time(PLANNED[0]), 5 * overlap_time(PLANNED[0])]
    model = fit_step_time(StepTimeObservations.at(repeated, times), candidates=GRID)
    assert np.max(model.extremes[:, 1] / model.extremes[:, 0]) == pytest.approx(5.0)
    assert model.predict(PLANNED[:1]).mean_s[0] == pytest.approx(overlap_time(PLANNED[0]), rel=0.05)


def test_two_runs_of_one_configuration_that_contradict_each_other_widen_its_interval():
    repeated, once = [*PLANNED, PLANNED[0]], [overlap_time(c) for c in PLANNED]
    agree, contradict = (
        fit_step_time(StepTimeObservations.at(repeated, [*once, factor * once[0]]), candidates=GRID)
        for factor in (1.0, 2.0)
    )
    narrow, wide = (model.predict(PLANNED[:1]) for model in (agree, contradict))
    assert log_sd(wide)[0] > 3.0 * log_sd(narrow)[0]
    assert wide.low_s[0] < once[0] < wide.high_s[0]


@pytest.mark.parametrize(
    "configurations",
    [[GRID[0]], [c for c in GRID if c.local_batch_size == 64], [c for c in GRID if c.num_nodes == 2]],
)
def test_parameters_that_the_data_do_not_determine_have_an_interval(configurations):
    predicted = fit_step_time(observe(configurations), candidates=GRID).predict(GRID)
    assert np.isfinite(predicted.high_s).all()
    unseen = ~predicted.measured
    assert np.median(log_sd(predicted)[unseen]) > 0.05


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_are_no_times_are_refused_by_name(value):
    with pytest.raises(ObservationError, match=r"step_time_s\[0\]"):
        StepTimeObservations.at(GRID[:1], [value])


def test_ragged_columns_are_refused():
    with pytest.raises(ObservationError, match="one value for each"):
        StepTimeObservations.at(GRID[:2], [1.0])


def test_without_data_or_prior_there_is_no_model():
    with pytest.raises(ObservationError, match="profile one"):
        fit_step_time(None)


def test_a_prior_from_hardware_is_right_within_its_own_wide_interval():
    facts = ModelFacts(25.6e6, 4.1e9, 90e6, 100e6)
    hardware = Hardware(peak_tflops=15.7, inter_node_gbps=25.0)
    model = fit_step_time(
        None, prior=Priors({"default": prior_from_hardware(facts, hardware, reference_batch_size=128)})
    )
    predicted = model.predict([make_configuration(1, 8, 128)])
    assert model.basis == "prior"
    # ResNet-50 in fp32 trains at 300 to 400 images/s on this device, so 128 images take about 0.35 s.
    assert predicted.low_s[0] < 0.35 < predicted.high_s[0]
    assert predicted.high_s[0] > 2 * predicted.low_s[0]
    assert predicted.extrapolated.all()


def test_earlier_jobs_on_the_same_hardware_sharpen_the_first_guess():
    earlier = [
        fit_step_time(observe(GRID, lambda c, s=s: overlap_time(c, speed=s)), candidates=GRID)
        .posterior_for(Variant())
        .as_prior()
        for s in (0.5, 2.0)
    ]
    transfer = prior_from_jobs(earlier)
    guess = fit_step_time(None, prior=Priors({"default": transfer}))
    assert guess.basis == "transfer"
    one_run = observe(GRID[:1])
    with_jobs = fit_step_time(one_run, prior=Priors({"default": transfer}), candidates=GRID).predict(GRID)
    without = fit_step_time(one_run, candidates=GRID).predict(GRID)
    truth = np.array([overlap_time(c) for c in GRID])
    assert np.median(np.abs(with_jobs.mean_s / truth - 1)) < np.median(np.abs(without.mean_s / truth - 1))
    assert np.median(log_sd(with_jobs)) < np.median(log_sd(without))
    assert log_sd(guess.predict(GRID)).min() > 0.3


def test_an_instance_type_that_was_not_profiled_borrows_the_shape_of_one_that_was():
    model = fit_step_time(observe(GRID), candidates=GRID)
    other = [make_configuration(c.num_nodes, 4, c.local_batch_size, 1, "faster") for c in GRID]
    predicted = model.predict(other)
    assert predicted.extrapolated.all()
    assert log_sd(predicted).min() > 0.3
    one = [*GRID, other[0]]
    times = [overlap_time(c) for c in GRID] + [0.5 * overlap_time(other[0])]
    informed = fit_step_time(StepTimeObservations.at(one, times), candidates=one).predict(other)
    assert informed.mean_s[4] == pytest.approx(0.5 * overlap_time(GRID[4]), rel=0.25)


V100 = Hardware(peak_tflops=15.7, inter_node_gbps=25.0, memory_gb_per_s=900.0)
T4 = Hardware(peak_tflops=8.1, inter_node_gbps=25.0, memory_gb_per_s=320.0)


def test_measurements_of_one_instance_type_are_transferred_to_another_by_their_hardware():
    slower = 900.0 / 320.0
    other = [make_configuration(c.num_nodes, 4, c.local_batch_size, 1, "t4") for c in GRID]
    seen = [make_configuration(c.num_nodes, 4, c.local_batch_size, 1, "v100") for c in GRID]
    observed = StepTimeObservations.at(seen, [overlap_time(c) for c in seen])

    def missed(**hardware):
        found = fit_step_time(observed, prior=Priors(hardware=hardware), candidates=[*seen, *other]).predict(other)
        # The device is slower, but the links and the time to launch a kernel are the same.
        truth = np.array([overlap_time(c, slope=0.001 * slower) for c in other])
        return float(np.median(np.abs(np.log(found.mean_s / truth)))), found

    known, informed = missed(v100=V100, t4=T4)
    unknown, blind = missed(v100=V100)
    assert known < 0.15 < unknown
    assert np.all(log_sd(informed) < log_sd(blind))
    assert log_sd(informed).min() > 0.4, "a transferred scale is not a measured one"
    assert informed.extrapolated.all()


def test_each_instance_type_starts_from_its_own_prior():
    facts = ModelFacts(25.6e6, 4.1e9, 90e6, 100e6)
    believed = {
        name: prior_from_hardware(facts, hardware, reference_batch_size=128)
        for name, hardware in {"v100": V100, "t4": T4}.items()
    }
    model = fit_step_time(None, prior=Priors(believed))
    fast, slow = model.predict([make_configuration(1, 1, 128, 1, name) for name in ("v100", "t4")]).mean_s
    assert model.basis == "prior"
    assert 15.7 / 8.1 < slow / fast < 900 / 320, "between the ratio of the peaks and that of the bandwidths"
    # ResNet-50 in fp32 trains at 300 to 400 images/s on the first device and at 110 to 140 on the second.
    predicted = model.predict([make_configuration(1, 1, 128, 1, name) for name in ("v100", "t4")])
    assert np.all(predicted.low_s < [0.37, 1.0])
    assert np.all(predicted.high_s > [0.37, 1.0])
    with pytest.raises(ObservationError, match="'tpu'"):
        model.predict([make_configuration(1, 1, 128, 1, "tpu")])


def test_unknown_hardware_is_guessed_and_marked_uncertain():
    facts = ModelFacts(25.6e6, 4.1e9, 90e6, 100e6)
    known = prior_from_hardware(facts, V100, reference_batch_size=128)
    guessed = prior_from_hardware(facts, Hardware(), reference_batch_size=128)
    assert guessed.sd[0] > known.sd[0] + 0.3


def test_a_prior_of_earlier_jobs_goes_before_what_is_carried_over_when_it_knows_the_scale_better():
    seen = [make_configuration(c.num_nodes, 4, c.local_batch_size, 1, "v100") for c in GRID]
    observed = StepTimeObservations.at(seen, [overlap_time(c) for c in seen])
    earlier = (
        fit_step_time(observe(GRID, lambda c: overlap_time(c, speed=5.0)), candidates=GRID)
        .posterior_for(Variant())
        .as_prior()
    )
    sharp = replace(prior_from_jobs([earlier]), sd=np.full(len(earlier.sd), 0.1))
    other = [replace(c, instance_type="t4") for c in GRID]
    priors = Priors({"t4": sharp}, {"v100": V100, "t4": T4})
    predicted = fit_step_time(observed, prior=priors, candidates=[*seen, *other]).predict(other)
    truth = np.array([overlap_time(c, speed=5.0) for c in other])
    assert np.median(np.abs(np.log(predicted.mean_s / truth))) < 0.1


def test_measured_compute_teaches_the_split():
    columns = {"exposed_comm_time_s": [overlap_time(c) - (0.02 + 0.001 * c.local_batch_size) for c in PLANNED[:3]]}
    informed = fit_step_time(observe(PLANNED[:3], **columns), candidates=GRID).predict(GRID)
    truth = np.array([0.02 + 0.001 * c.local_batch_size for c in GRID])
    blind = fit_step_time(observe(PLANNED[:3]), candidates=GRID).predict(GRID)
    assert np.mean(np.abs(np.log(informed.compute_s / truth))) < np.mean(np.abs(np.log(blind.compute_s / truth)))


def test_the_optimizer_counts_once_a_step_however_many_micro_steps_accumulate() -> None:
    """This also holds if some measured runs accumulate gradients."""
    gradients_s, optimizer_s = 0.02, 0.03
    configurations = [make_configuration(1, 1, 32, micro_steps) for micro_steps in (1, 2, 4, 16)]
    times = np.array([c.grad_accum_steps * gradients_s + optimizer_s for c in configurations])
    for measured in ([0], [0, 1], [2]):
        points = [configurations[row] for row in measured]
        taken = {"step_time_s": times[measured], "compute_time_s": times[measured]}
        apart = StepTimeObservations.at(points, **taken, optimizer_time_s=[optimizer_s] * len(points))
        predicted = fit_step_time(apart, candidates=configurations).predict(configurations)
        assert predicted.mean_s == pytest.approx(times, rel=0.1)
        assert predicted.compute_s == pytest.approx(times, rel=0.1)
        assert np.all(predicted.low_s < predicted.mean_s)
        assert np.all((predicted.low_s < times) & (times < predicted.high_s))


def test_runs_of_several_accumulations_tell_what_comes_once_a_step_without_a_timed_optimizer() -> None:
    gradients_s, once_s = 0.02, 0.01
    configurations = [make_configuration(1, 1, 32, micro_steps) for micro_steps in (1, 2, 4, 8, 16)]
    times = np.array([c.grad_accum_steps * gradients_s + once_s for c in configurations])
    seen = StepTimeObservations.at(configurations[::4], times[::4])
    predicted = fit_step_time(seen, candidates=configurations).predict(configurations)
    assert predicted.mean_s == pytest.approx(times, rel=0.06)


def test_where_no_step_accumulates_a_timed_optimizer_changes_nothing() -> None:
    points = [make_configuration(nodes, 1, batch) for nodes in (1, 2) for batch in (32, 64)]
    taken = [0.1, 0.15, 0.12, 0.17]
    plain = StepTimeObservations.at(points, taken)
    timed = StepTimeObservations.at(points, taken, optimizer_time_s=[0.05] * 4)
    assert list(fit_step_time(timed).predict(points).mean_s) == list(fit_step_time(plain).predict(points).mean_s)


def test_runs_that_accumulate_teach_an_unmeasured_type_and_the_next_job_no_slower_step() -> None:
    """If the optimizer's 0.5 s were counted in each of the four micro-steps, a step would take 4 s."""
    gradients_s, optimizer_s = 0.5, 0.5
    points = [make_configuration(1, 1, batch, 4) for batch in (32, 64)]
    taken = [4 * gradients_s * batch / 32 + optimizer_s for batch in (32, 64)]
    seen = StepTimeObservations.at(points, taken, compute_time_s=taken, optimizer_time_s=[optimizer_s] * 2)
    model = fit_step_time(seen)
    other = replace(points[0], instance_type="other")
    assert model.predict([other]).mean_s[0] == pytest.approx(taken[0], rel=0.25)
    (learned,) = model.posteriors.values()
    priors = Priors({points[0].instance_type: prior_from_jobs([learned.without_prior()])})
    assert unmeasured_model(priors, points).predict(points[:1]).mean_s[0] == pytest.approx(taken[0], rel=0.25)


def test_an_optimizer_that_waits_for_other_ranks_leaves_each_micro_step_some_compute() -> None:
    """A sharded optimizer gathers parameters in its step, so its reported time may exceed the compute time."""
    points = [make_configuration(2, 1, 32, micro_steps) for micro_steps in (1, 8)]
    observed = StepTimeObservations.at(
        points[:1], [1.0], compute_time_s=[0.1], exposed_comm_time_s=[0.9], optimizer_time_s=[0.8]
    )
    predicted = fit_step_time(observed).predict(points)
    assert np.all(predicted.compute_s > 0.0)
    assert np.all(predicted.mean_s >= 0.99 * predicted.mean_s[0])
