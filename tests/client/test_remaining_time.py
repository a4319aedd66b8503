"""The time that a plan still takes follows what the service predicts of the runs that wait."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tests.client.launch.fakes import FakeService, configuration
from tula_client.cli.progress import ProgressReporter, seconds_left
from tula_client.launch.judge import Outcome


def planned(*runs):
    """A job whose runs are (state, step time, predicted step time, samples), of 1 + 5 steps each."""
    service = FakeService()
    for state, step_time_s, predicted, samples in runs:
        run = service.add("profile", configuration(), state)
        service.change(run.id, step_time_s=step_time_s, predicted_step_time_s=predicted, num_samples=samples)
    return service.job("job-1")


def test_before_the_first_end_there_is_no_estimate():
    assert seconds_left(planned(("pending", None, 1.0, 0)), {}, {}) is None


def test_every_run_takes_its_start_and_its_predicted_steps():
    job = planned(("succeeded", 2.0, None, 6), ("pending", None, 5.0, 0), ("pending", None, 0.5, 0))
    # Ten seconds around six steps of 2 s; then six of 5 s and six of half a second.
    assert seconds_left(job, {"r0": 22.0}, {}) == pytest.approx((10 + 30) + (10 + 3))


def test_runs_that_ended_early_say_that_others_will():
    job = planned(("succeeded", 2.0, None, 3), ("pending", None, 4.0, 0))
    assert seconds_left(job, {"r0": 16.0}, {}) == pytest.approx(10 + 0.5 * 6 * 4)


def test_without_a_prediction_a_run_takes_what_runs_took():
    job = planned(("succeeded", 2.0, None, 6), ("failed", None, None, 0), ("pending", None, None, 0))
    assert seconds_left(job, {"r0": 22.0, "r1": 8.0}, {}) == pytest.approx(15)


def test_active_runs_have_less_time_left_and_run_at_once():
    job = planned(("succeeded", 2.0, None, 6), *[("running", None, 2.0, 0)] * 2)
    assert seconds_left(job, {"r0": 22.0}, {"r1": 12.0, "r2": 30.0}) == pytest.approx((10 + 0) / 2)


def test_a_terminal_shows_the_remaining_time(tmp_path):
    printed = io.StringIO()
    console = Console(file=printed, force_terminal=True, width=120)
    with ProgressReporter(console) as reporter:
        reporter.job(planned(("running", None, None, 0), ("pending", None, 10.0, 0)))
        job = planned(("succeeded", 2.0, None, 6), ("pending", None, 10.0, 0))
        reporter.started(job.plan[0], tmp_path / "log")
        reporter.finished(job.plan[0], Outcome("succeeded"), tmp_path / "log", 72.0)
        reporter.job(job)
    assert "1 left, about 2 min" in printed.getvalue()
