"""Tests that the paper's equation 2 fits data that follow it, and that `overlap` replaces it if it cannot be fitted."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.configurations import make_configuration
from tula_service.perfmodel.points import StepTimeObservations
from tula_service.perfmodel.priors import Hardware, ModelFacts, Priors, prior_from_hardware
from tula_service.perfmodel.step_time_model import fit_step_time
from tula_wire import Configuration
from tula_wire.configurations import Variant
from tula_wire.enums import StepTimeForm

GRID = [make_configuration(nodes, 4, batch) for nodes in (1, 2, 4, 8) for batch in (32, 64, 128, 256, 512)]
PLANNED = [GRID[i] for i in (0, 4, 7, 11, 15, 19)]
PAPER = ("ring", "parameter_server")


def additive(c: Configuration, form: StepTimeForm) -> float:
    """Return the step time of equation 2 with accumulation; only the last micro-step synchronises."""
    sync = c.world_size if form == "parameter_server" else 1 - 1 / c.world_size
    return c.grad_accum_steps * (0.02 + 0.001 * c.local_batch_size) + 0.004 * sync


@pytest.mark.parametrize("form", PAPER)
def test_each_form_recovers_its_own_data(form: StepTimeForm) -> None:
    observed = StepTimeObservations.at(PLANNED, [additive(c, form) for c in PLANNED])
    model = fit_step_time(observed, form=form)
    at = [*GRID, make_configuration(8, 4, 32, 4)]
    assert np.allclose(model.predict(at).mean_s, [additive(c, form) for c in at], rtol=1e-6)
    assert model.basis == "profiled"


@pytest.mark.parametrize("form", PAPER)
def test_intervals_hold_noisy_measurements_of_that_form(form: StepTimeForm) -> None:
    inside = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        measured = np.array([additive(c, form) for c in GRID]) * np.exp(rng.normal(0, 0.08, len(GRID)))
        rows = rng.permutation(len(GRID))[:6]
        observed = StepTimeObservations.at([GRID[row] for row in rows], measured[rows])
        predicted = fit_step_time(observed, form=form).predict(GRID)
        rest = np.setdiff1d(np.arange(len(GRID)), rows)
        inside.append(np.mean((predicted.low_s <= measured)[rest] & (measured <= predicted.high_s)[rest]))
    assert np.mean(inside) >= 0.85


@pytest.mark.parametrize("form", PAPER)
def test_two_configurations_determine_the_equation_as_printed(form: StepTimeForm) -> None:
    printed = {c: additive(c, form) - 0.02 * c.grad_accum_steps for c in GRID}
    corners = [GRID[0], GRID[-1]]
    model = fit_step_time(StepTimeObservations.at(corners, [printed[c] for c in corners]), form=form)
    assert np.allclose(model.predict(GRID).mean_s, list(printed.values()), rtol=1e-6)


@pytest.mark.parametrize("form", PAPER)
def test_overlap_predicts_until_two_configurations_were_measured(form: StepTimeForm) -> None:
    observed = StepTimeObservations.at(PLANNED[:1], [additive(c, form) for c in PLANNED[:1]])
    few, overlap = (fit_step_time(observed, form=each, candidates=GRID) for each in (form, "overlap"))
    assert np.array_equal(few.predict(GRID).mean_s, overlap.predict(GRID).mean_s)
    assert few.paper_fits == {Variant(): None}


def test_before_any_run_the_prior_is_that_of_overlap() -> None:
    prior = prior_from_hardware(
        ModelFacts(25.6e6, 4.1e9, 90e6, 100e6), Hardware(peak_tflops=15.7), reference_batch_size=128
    )
    ring, overlap = (fit_step_time(None, form=form, prior=Priors({"default": prior})) for form in ("ring", "overlap"))
    assert ring.basis == "prior"
    assert np.array_equal(ring.predict(GRID).mean_s, overlap.predict(GRID).mean_s)


def test_an_instance_type_that_was_not_measured_is_predicted_by_overlap() -> None:
    observed = StepTimeObservations.at(PLANNED, [additive(c, "ring") for c in PLANNED])
    other = [make_configuration(2, 4, 64, 1, "other")]
    ring, overlap = (fit_step_time(observed, form=form) for form in ("ring", "overlap"))
    assert ring.predict(other).mean_s == overlap.predict(other).mean_s
