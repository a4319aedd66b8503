"""The memory model: lines are recovered, out-of-memory tightens, and the largest batch is safe as stated."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tula_service.domain import Basis
from tula_service.perfmodel import MemoryObservations, MemoryPrior, ObservationError, fit_memory

GIB = 2.0**30


def line(batch: float, static: float = 2 * GIB, slope: float = 0.03 * GIB) -> float:
    return static + slope * batch


@settings(max_examples=25, deadline=None)
@given(static=st.floats(0.2, 20), slope=st.floats(0.005, 0.5))
def test_three_readings_of_a_line_predict_four_times_the_batch(static, slope):
    batches = np.array([16.0, 32.0, 64.0])
    peaks = static * GIB + slope * GIB * batches
    predicted = fit_memory(MemoryObservations(batches, peaks)).predict([256.0])
    truth = static * GIB + slope * GIB * 256
    assert predicted.mean_bytes[0] == pytest.approx(truth, rel=0.12)
    assert 0.99 * predicted.low_bytes[0] < truth < 1.01 * predicted.high_bytes[0]
    assert predicted.extrapolated[0]


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
    readings = {"local_batch_size": [16, 32], "peak_bytes": [line(16), line(32)], "capacity_bytes": 16 * GIB}
    calm = fit_memory(MemoryObservations(**readings))
    warned = fit_memory(MemoryObservations(**readings, out_of_memory_batch_sizes=[256]))
    assert calm.max_local_batch_size(16 * GIB) > 256
    assert warned.max_local_batch_size(16 * GIB) < 256
    assert warned.fits(256, 16 * GIB) == 0.0
    assert warned.predict([128.0]).mean_bytes[0] > calm.predict([128.0]).mean_bytes[0]


def test_one_reading_is_enough_for_a_wide_answer_and_counted_bytes_narrow_it():
    one = fit_memory(MemoryObservations([32], [line(32)]))
    counted = fit_memory(MemoryObservations([32], [line(32)], static_bytes=2 * GIB))
    assert any("one batch only" in note for note in one.notes)
    wide, narrow = one.predict([256.0]), counted.predict([256.0])
    assert wide.high_bytes[0] / wide.low_bytes[0] > 1.5 * narrow.high_bytes[0] / narrow.low_bytes[0]
    assert narrow.mean_bytes[0] == pytest.approx(line(256), rel=0.15)


def test_an_analytic_slope_alone_gives_a_bound_that_is_called_a_prior():
    model = fit_memory(None, prior=MemoryPrior(bytes_per_sample=0.03 * GIB, static_bytes=2 * GIB))
    assert model.basis is Basis.PRIOR
    assert 0 < model.max_local_batch_size(16 * GIB) < (16 - 2) / 0.03
    assert model.bytes_per_sample == pytest.approx(0.03 * GIB, rel=0.2)


def test_parts_add_up_to_the_whole():
    predicted = fit_memory(MemoryObservations([16, 32, 64], [line(16), line(32), line(64)])).predict([16.0, 128.0])
    assert np.allclose(predicted.static_bytes + predicted.batch_bytes, predicted.mean_bytes)
    assert predicted.static_bytes[0] == pytest.approx(2 * GIB, rel=0.2)


def test_readings_above_the_capacity_are_left_out_and_said():
    observed = MemoryObservations([16, 32, 64], [line(16), line(32), 100 * GIB], capacity_bytes=16 * GIB)
    model = fit_memory(observed)
    assert any("above the capacity" in note for note in model.notes)
    assert model.predict([64.0]).mean_bytes[0] == pytest.approx(line(64), rel=0.1)
    with pytest.raises(ObservationError, match="every reading is above"):
        fit_memory(MemoryObservations([16], [100 * GIB], capacity_bytes=16 * GIB))


def test_memory_that_falls_while_the_batch_grows_is_called_suspicious():
    model = fit_memory(MemoryObservations([16, 32], [line(32), line(16)]))
    assert any("fell while the batch grew" in note for note in model.notes)
    assert model.predict([64.0]).high_bytes[0] > line(32)


@pytest.mark.parametrize("peak", [0.0, -1.0, float("nan"), float("inf")])
def test_readings_that_are_no_readings_are_refused(peak):
    with pytest.raises(ObservationError, match="peak_bytes"):
        MemoryObservations([32], [peak])


def test_nothing_known_is_refused():
    with pytest.raises(ObservationError, match="no memory was measured"):
        fit_memory(None)
    with pytest.raises(ObservationError, match="safety_probability"):
        fit_memory(MemoryObservations([32], [GIB])).max_local_batch_size(GIB, safety_probability=1.0)
