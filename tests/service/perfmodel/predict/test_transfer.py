"""The first guess of a step time: from hardware figures, and corrected by how fast earlier jobs really ran."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import cold_start
from tula_service.domain import Basis
from tula_service.perfmodel import (
    EarlierScale,
    Hardware,
    ModelFacts,
    ObservationError,
    StepTimePrior,
    prior_from_hardware,
    scale_from_jobs,
)

TABLE = Path(__file__).parents[3] / "data" / "single_device.csv"


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    out = tmp_path_factory.mktemp("cold") / "out.json"
    assert cold_start.main(["--steps", str(TABLE), "--json", str(out)]) == 0
    return dict(json.loads(out.read_text(encoding="utf-8")))


def a_guess(**facts: float) -> StepTimePrior:
    known = ModelFacts(parameter_count=25e6, flops_per_sample=8e9, **facts)
    return prior_from_hardware(known, Hardware(15.7, 25.0, None, 900.0), reference_batch_size=128)


def test_hardware_figures_guess_measured_devices_within_the_stated_interval(figures):
    assert figures["cold.same.0.0.median"] < 0.8
    assert 0.85 <= figures["cold.same.0.0.coverage"] <= 0.97


def test_one_earlier_job_on_the_device_brings_the_guess_much_nearer(figures):
    assert figures["cold.same.1.0.median"] < 0.65 * figures["cold.same.1.0.without"]
    assert figures["cold.any.1.0.median"] < 0.9 * figures["cold.any.1.0.without"], "in whatever precision it ran"
    assert figures["cold.same.1.0.p90"] < 0.7 * figures["cold.same.0.0.p90"]


def test_jobs_on_other_devices_help_too_and_less(figures):
    assert figures["cold.same.1.0.median"] < figures["cold.same.0.5.median"] < 0.7 * figures["cold.same.0.5.without"]


def test_intervals_hold_with_any_history(figures):
    coverage = {key: value for key, value in figures.items() if key.endswith(".coverage")}
    assert len(coverage) == 2 * len(cold_start.HISTORIES)
    assert min(coverage.values()) >= 0.85


def test_without_earlier_jobs_the_guess_stays_what_it_is():
    guess = a_guess()
    assert scale_from_jobs(guess, []) is guess


def test_a_job_here_says_more_than_one_elsewhere_and_neither_is_believed_whole():
    guess = a_guess()
    here, elsewhere = (
        scale_from_jobs(guess, [EarlierScale(1.0, same_device)]).mean[0] - guess.mean[0]
        for same_device in (True, False)
    )
    assert 0.2 < elsewhere < here < 0.9


def test_launches_and_links_take_as_long_as_before_beside_another_compute():
    guess = a_guess()
    corrected = scale_from_jobs(guess, [EarlierScale(0.8, True)] * 4)
    assert corrected.mean[0] > guess.mean[0] + 0.4
    for entry in (1, 4, 6):
        assert corrected.mean[0] + corrected.mean[entry] == pytest.approx(guess.mean[0] + guess.mean[entry])
    assert corrected.basis is Basis.PRIOR
    assert corrected.reference_batch_size == guess.reference_batch_size


def test_jobs_that_agree_narrow_the_interval_and_jobs_that_differ_do_not():
    guess = a_guess()
    agree = scale_from_jobs(guess, [EarlierScale(0.5, True)] * 8)
    differ = scale_from_jobs(guess, [EarlierScale(0.5 + off, True) for off in (-1.2, 1.2) * 4])
    assert agree.sd[0] < 0.75 * guess.sd[0]
    assert differ.sd[0] > 1.3 * agree.sd[0]
    assert differ.sd[0] <= guess.sd[0], "what was seen never makes the guess worse than a guess"


def test_a_job_whose_flops_were_guessed_weighs_less_and_so_does_what_is_guessed():
    guess = a_guess()
    counted = scale_from_jobs(guess, [EarlierScale(1.0, True)])
    guessed = scale_from_jobs(guess, [EarlierScale(1.0, True, flops_sd=1.0)])
    assert guess.mean[0] < guessed.mean[0] < counted.mean[0]
    wide = a_guess(flops_sd=1.0)
    assert scale_from_jobs(wide, [EarlierScale(1.0, True)] * 8, flops_sd=1.0).sd[0] > 1.0


def test_the_correction_is_the_same_every_time_and_in_any_order():
    jobs = [EarlierScale(float(off), off > 0) for off in np.linspace(-1.0, 2.0, 7)]
    first, again, reversed_ = (scale_from_jobs(a_guess(), each) for each in (jobs, jobs, jobs[::-1]))
    assert first.mean.tolist() == again.mean.tolist()
    assert first.sd.tolist() == again.sd.tolist()
    assert reversed_.mean[0] == pytest.approx(first.mean[0], abs=1e-9)


def test_uncertain_flops_that_are_no_spread_are_refused():
    with pytest.raises(ObservationError, match="flops_sd"):
        a_guess(flops_sd=-1.0)
