"""The time that a plan still takes follows what the service predicts of the runs that wait."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tests.client.launch.fakes import FakeService, configuration
from tula_client.cli.progress import ProgressReporter, plan_text, seconds_left
from tula_client.launch.judge import Outcome
from tula_wire import Price


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


def columns_of_two_clusters(state, price=None):
    """A column of two batches on one node that is done, and one on two nodes in `state`."""
    service = FakeService()
    service.columns = True
    for nodes in (1, 2):
        for batch, step_time_s in ((32, 0.5), (64, 1.0)):
            run = service.add("profile", configuration(nodes, batch), "succeeded" if nodes == 1 else state)
            measured = {"step_time_s": step_time_s, "num_samples": 6} if nodes == 1 else {}
            service.change(run.id, predicted_step_time_s=2 * step_time_s, **measured)
    job = service.job("job-1")
    cluster = job.spec.cluster[0].model_copy(update={"price": Price(usd_per_node_hour=price)})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"cluster": [cluster]})})


def test_a_launch_of_a_column_starts_up_once_and_its_plan_says_time_and_money():
    job = columns_of_two_clusters("pending", price=36.0)
    assert plan_text(job, {}) == "2 runs in 1 launch"
    took = {"r0": 4.0, "r1": 20.0}  # of the launch: 9 s of steps and 11 s around them
    assert seconds_left(job, took, {}) == pytest.approx(11 + 18)
    assert plan_text(job, took) == "2 runs in 1 launch, about 29 s and $0.58"
    assert plan_text(columns_of_two_clusters("pending"), took) == "2 runs in 1 launch, about 29 s"
    assert plan_text(columns_of_two_clusters("succeeded"), took) == ""


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


def test_a_training_prints_its_lines_its_log_and_its_step_time(tmp_path):
    service = FakeService()
    run = service.add("train", configuration(), "succeeded")
    run = service.change(run.id, step_time_s=0.0319)
    for quiet in (False, True):
        printed = io.StringIO()
        with ProgressReporter(Console(file=printed, width=120), quiet=quiet) as reporter:
            reporter.started(run, tmp_path / "[log]")
            reporter.output(["epoch 1: [loss] \x1b[31m2.5\x1b[0m"])
            reporter.finished(run, Outcome("succeeded"), tmp_path / "[log]", 7.41)
        lines = printed.getvalue().splitlines()
        assert lines[1] == f"          log: {tmp_path}/[log]"
        assert ("epoch 1: [loss] 2.5" in lines) is not quiet
        assert lines[-1] == "trained   1 node, global batch 32 (local 32): 31.9 ms a step in 7.4 s"
