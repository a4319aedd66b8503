"""Tests what `tula tune` and `tula run` print while they work."""

from __future__ import annotations

import io

from rich.console import Console

from tests.client.launch.fakes import FakeService, configuration
from tula_client.launch.judge import Outcome
from tula_client.launch.reporter import Reporter
from tula_wire.jobs import ProfilingCost


def left(launches, runs, seconds, usd=None, *, most=0):
    return ProfilingCost(
        spent_gpu_seconds=0.0,
        spent_usd=None if usd is None else 0.0,
        launches_left=launches,
        runs_left=runs,
        left_s=seconds,
        left_gpu_seconds=seconds,
        left_usd=usd,
        launches_at_most=launches + most,
        at_most_s=seconds * (1 + most),
        at_most_usd=None if usd is None else usd * (1 + most),
    )


def printed_of(*costs, terminal=False):
    """Return what the reporter prints while the cost of a plan of two runs takes these values in turn."""
    service, printed = FakeService([configuration(), configuration(2)]), io.StringIO()
    with Reporter(Console(file=printed, force_terminal=terminal, width=160)) as reporter:
        for cost in costs:
            reporter.job(service.job("job-1").model_copy(update={"profiling_cost": cost}))
    return printed.getvalue()


def test_the_rest_of_the_plan_and_its_cost_are_printed_before_and_after_each_launch():
    costs = left(3, 8, 540.0, 2.1, most=2), left(1, 1, 29.0), left(0, 0, 0.0)
    assert printed_of(*costs).splitlines() == [
        "plan      3 launches, 8 configurations, about 9 min and $2.10; "
        "including launches that the search may add: at most 5 launches, 27 min and $6.30",
        "plan      1 launch, about 29 s",
    ]


def test_a_terminal_shows_the_remaining_time():
    assert "2 left, about 2 min" in printed_of(left(2, 2, 130.0), terminal=True)


def test_a_training_prints_its_lines_its_log_and_its_step_time(tmp_path):
    service = FakeService()
    run = service.add("train", configuration(), "succeeded")
    run = service.change(run.id, step_time_s=0.0319)
    for quiet in (False, True):
        printed = io.StringIO()
        with Reporter(Console(file=printed, width=120), quiet=quiet) as reporter:
            reporter.started(run, tmp_path / "[log]")
            reporter.output(["epoch 1: [loss] \x1b[31m2.5\x1b[0m"])
            reporter.finished(run, Outcome("succeeded"), tmp_path / "[log]", 7.41)
        lines = printed.getvalue().splitlines()
        assert lines[1] == f"          log: {tmp_path}/[log]"
        assert ("epoch 1: [loss] 2.5" in lines) is not quiet
        assert lines[-1] == "trained   1 node, global batch 32 (local 32): 31.9 ms a step in 7.4 s"


def test_a_measurement_of_few_steps_says_of_how_many():
    service = FakeService()
    run = service.add("profile", configuration(), "succeeded")
    for num_steps, said in ((4, ", 4 of 5 steps"), (5, "")):
        printed = io.StringIO()
        with Reporter(Console(file=printed, width=120)) as reporter:
            reporter.finished(service.change(run.id, num_steps=num_steps), Outcome("succeeded"), None, 0.0)
        assert printed.getvalue() == f"measured  1 node, global batch 32 (local 32){said}\n"
