"""Tests that the memory model recovers linear growth, uses out-of-memory failures, and is as safe as stated."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tula_service.perfmodel.memory_model import Beside, MemoryObservations, fit_memory
from tula_service.perfmodel.points import ObservationError

GIB = 2.0**30


def line(batch: float, static: float = 2 * GIB, slope: float = 0.03 * GIB) -> float:
    return static + slope * batch


@settings(max_examples=25, deadline=None)
@given(static=st.floats(0.2, 20), slope=st.floats(0.005, 0.5))
@example(static=6.0, slope=0.005)
@example(static=9.04, slope=0.0076)
def test_three_readings_of_a_line_predict_four_times_the_batch(static, slope):
    batches = np.array([16.0, 32.0, 64.0])
    peaks = static * GIB + slope * GIB * batches
    predicted = fit_memory(MemoryObservations(batches, peaks)).predict(256.0)
    truth = static * GIB + slope * GIB * 256
    assert predicted.mean == pytest.approx(truth, rel=0.12)
    assert 0.99 * predicted.low < truth < 1.01 * predicted.high


@settings(max_examples=20, deadline=None)
@given(capacity=st.floats(4, 80), safety=st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_the_largest_batch_fits_with_the_stated_probability_and_one_more_does_not(capacity, safety):
    model = fit_memory(MemoryObservations([16, 32], [line(16), line(32)]))
    largest = model.max_local_batch_size(capacity * GIB, safety_probability=safety)
    if largest:
        assert model.fits(largest, capacity * GIB) >= safety
    assert model.fits(largest + 1, capacity * GIB) < safety


def test_more_safety_or_less_capacity_never_allows_a_larger_batch():
    model = fit_memory(MemoryObservations([16, 32], [line(16), line(32)]))
    by_safety = [model.max_local_batch_size(16 * GIB, safety_probability=p) for p in (0.5, 0.9, 0.95, 0.99)]
    by_capacity = [model.max_local_batch_size(c * GIB) for c in (32, 16, 8, 4, 2, 1)]
    assert by_safety == sorted(by_safety, reverse=True)
    assert by_capacity == sorted(by_capacity, reverse=True)
    assert by_capacity[-1] == 0


def test_an_out_of_memory_caps_the_batch_and_raises_the_curve():
    readings = {"local_batch_size": [16, 32], "peak_bytes": [line(16), line(32)], "static_bytes": 2 * GIB}
    readings["capacity_bytes"] = 16 * GIB
    calm = fit_memory(MemoryObservations(**readings))
    warned = fit_memory(MemoryObservations(**readings, out_of_memory_batch_sizes=[256]))
    assert calm.max_local_batch_size(16 * GIB) > 256
    assert warned.max_local_batch_size(16 * GIB) < 256
    assert warned.fits(256, 16 * GIB) == 0.0
    assert warned.predict(128.0).mean > calm.predict(128.0).mean


def test_one_reading_is_enough_for_a_wide_answer_and_counted_bytes_narrow_it():
    one = fit_memory(MemoryObservations([32], [line(32)]))
    counted = fit_memory(MemoryObservations([32], [line(32)], static_bytes=2 * GIB))
    assert any("at only one batch" in note for note in one.notes)
    wide, narrow = one.predict(256.0), counted.predict(256.0)
    assert wide.high / wide.low > 1.5 * narrow.high / narrow.low
    assert narrow.mean == pytest.approx(line(256), rel=0.15)


def test_static_memory_does_not_fluctuate_so_a_small_growth_beside_it_is_read_as_it_is():
    # In a tiny network, nearly all memory is context and libraries, and 8 more examples need 36 MiB.
    mib = 2.0**20
    model = fit_memory(MemoryObservations([8, 16], [1731 * mib, 1767 * mib]))
    assert model.predict(128.0).mean == pytest.approx((1731 + 4.5 * 120) * mib, rel=0.2)


@pytest.mark.parametrize("overhead", [1.0, 1.1, 1.3])
def test_a_counted_slope_beside_two_readings_pulls_a_jump_back_and_bends_to_what_was_measured(overhead):
    counted = 0.03 * GIB / overhead
    clean = fit_memory(MemoryObservations([8, 16], [line(8), line(16)], bytes_per_sample=counted))
    assert clean.predict(128.0).mean == pytest.approx(line(128), rel=0.1)
    jumped = MemoryObservations([8, 16], [line(8), 1.08 * line(16)])
    both = replace(jumped, bytes_per_sample=counted)
    alone, beside = fit_memory(jumped).predict(128.0), fit_memory(both).predict(128.0)
    assert abs(beside.mean - line(128)) < abs(alone.mean - line(128))
    assert beside.low < line(128) < beside.high


def test_of_three_readings_the_one_that_jumps_counts_least():
    jumped = MemoryObservations([8, 16, 32], [1.3 * line(8), line(16), line(32)], static_bytes=2 * GIB)
    assert fit_memory(jumped).predict(128.0).mean == pytest.approx(line(128), rel=0.05)


def test_the_context_is_added_to_the_line_and_what_the_allocator_reserves_takes_room():
    observed = MemoryObservations([16, 64], [line(16), line(64)], static_bytes=2 * GIB)
    context = Beside(context_bytes=GIB, context_sd_bytes=GIB / 2)
    models = [fit_memory(observed, beside=each) for each in (Beside(), context, Beside(reserved=1.1))]
    alone, beside, reserved = (model.predict(128.0) for model in models)
    assert beside.mean - alone.mean == pytest.approx(GIB)
    assert beside.high - beside.mean > alone.high - alone.mean
    assert reserved.mean == alone.mean
    most, *less = (model.max_local_batch_size(16 * GIB) for model in models)
    assert 0 < max(less) < most


def test_an_analytic_slope_alone_gives_a_bound():
    model = fit_memory(MemoryObservations(bytes_per_sample=0.03 * GIB, static_bytes=2 * GIB))
    assert 0 < model.max_local_batch_size(16 * GIB) < (16 - 2) / 0.03
    one, three = model.predict(32.0).mean, model.predict(96.0).mean
    assert (three - one) / 64 == pytest.approx(0.03 * GIB, rel=0.2)


def test_without_a_batch_the_static_memory_is_left():
    model = fit_memory(MemoryObservations([16, 32, 64], [line(16), line(32), line(64)]))
    assert model.predict(0.0).mean == pytest.approx(2 * GIB, rel=0.2)


def test_readings_above_the_capacity_are_left_out_and_said():
    observed = MemoryObservations([16, 32, 64], [line(16), line(32), 100 * GIB], capacity_bytes=16 * GIB)
    model = fit_memory(observed)
    assert any("above the capacity" in note for note in model.notes)
    assert model.predict(64.0).mean == pytest.approx(line(64), rel=0.1)
    with pytest.raises(
        ObservationError, match=r"every reading is above .* 16 GiB, .* 100 GiB; check .*memory_bytes_per_rank"
    ):
        fit_memory(MemoryObservations([16], [100 * GIB], capacity_bytes=16 * GIB))


def test_memory_that_falls_while_the_batch_grows_is_called_suspicious():
    model = fit_memory(MemoryObservations([16, 32], [line(32), line(16)]))
    assert any("fell although the batch grew" in note for note in model.notes)
    assert model.predict(64.0).high > line(32)


def test_an_out_of_memory_at_a_batch_that_was_also_read_as_fitting_is_said_and_the_cap_holds():
    observed = MemoryObservations([16, 32], [line(16), line(32)], [32], capacity_bytes=16 * GIB)
    model = fit_memory(observed)
    assert any("ran out of memory" in note and "also has a measured peak" in note for note in model.notes)
    assert model.max_local_batch_size(16 * GIB) == 31
    # A reading of 3 GiB on a device with 16 GiB that ran out has no explanation, but predictions stay plausible.
    assert model.predict(16.0).mean == pytest.approx(line(16), rel=0.25)
    assert all(np.isfinite(model.predict(batch).high) for batch in (16.0, 31.0, 64.0))


@settings(max_examples=40, deadline=None)
@given(
    readings=st.lists(st.tuples(st.integers(1, 4096), st.floats(1e6, 2e11)), max_size=5),
    failed=st.lists(st.integers(1, 4096), max_size=3),
    counted=st.none() | st.floats(1.0, 1e12),
)
def test_whatever_is_read_the_answer_is_finite_ordered_and_below_what_failed(readings, failed, counted):
    batches, peaks = [r[0] for r in readings], [r[1] for r in readings]
    if not readings and counted is None:
        return
    observed = MemoryObservations(batches, peaks, failed, capacity_bytes=2e11, bytes_per_sample=counted)
    model = fit_memory(observed)
    for batch in (1.0, 64.0, 5000.0):
        predicted = model.predict(batch)
        assert 0.0 < predicted.low <= predicted.mean <= predicted.high < math.inf
    assert model.max_local_batch_size(2e11) < min(failed, default=math.inf)


@pytest.mark.parametrize("peak", [0.0, -1.0, float("nan"), float("inf")])
def test_readings_that_are_no_readings_are_refused(peak):
    with pytest.raises(ObservationError, match="peak_bytes"):
        MemoryObservations([32], [peak])


def test_nothing_known_is_refused():
    with pytest.raises(ObservationError, match="no memory use was measured"):
        fit_memory(MemoryObservations())


def test_a_reading_of_one_byte_predicts_without_overflow():
    model = fit_memory(MemoryObservations([32.0], [1.0]))
    for batch in (1.0, 32.0, 2.0**31):
        predicted = model.predict(batch)
        assert np.isfinite([predicted.low, predicted.mean, predicted.high]).all()


def test_readings_that_differ_by_many_orders_of_magnitude_still_have_a_line():
    model = fit_memory(MemoryObservations([4e10, 11.0], [279.0, 8e15], static_bytes=1e15))
    assert np.isfinite([model.predict(32.0).low, model.predict(32.0).high, model.static_bytes]).all()
