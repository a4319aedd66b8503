"""Tests that no command starts if the service returns a run that was not requested, which would alter training."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from tests.client.launch.fakes import TEMPLATE, Bench, FakeProcess, FakeService, Notes, configuration
from tula_client._errors import LaunchError
from tula_client.launch.run_loop import check_configuration
from tula_client.launch.train import train
from tula_client.launch.tune import work_through
from tula_wire import BatchSpec, Configuration, Instruction, Run, RunClaimed

ANOTHER = configuration(1, 4)
TOO_MANY_NODES = configuration(1_000, 32)


class LyingService(FakeService):
    """A service that returns runs with the fields in `lie` overwritten."""

    def __init__(self, lie, **options):
        super().__init__(**options)
        self.lie = lie

    def create_run(self, job_id, run):
        return super().create_run(job_id, run).model_copy(update=self.lie)

    def claim(self, job_id, claim):
        answer = super().claim(job_id, claim)
        return RunClaimed(run=answer.run and answer.run.model_copy(update=self.lie), reason="")


def bench_of(tmp_path, service):
    def fate(command, environment, log):  # noqa: ARG001
        run = environment["TULA_RUN_ID"]
        return FakeProcess(during=lambda: service.change(run, num_samples=5))

    return Bench(tmp_path, service, fate, Notes())


@pytest.mark.parametrize(
    "lie",
    [
        {"kind": "profile", "instruction": Instruction(profiling_warmup_steps=0, measuring_steps=2, precision=1.0)},
        {"job_id": "job-2"},
        {"configuration": ANOTHER},
        {"time_limit_s": 1.0},
    ],
    ids=lambda lie: next(iter(lie)),
)
def test_no_training_starts_from_a_run_that_was_not_asked_for(tmp_path, lie):
    """With `kind: profile`, the command would get TULA_KIND=profile and end early with exit code 0."""
    service = LyingService(lie, chosen=configuration(2, 64))
    bench = bench_of(tmp_path, service)
    with pytest.raises(LaunchError, match=f"with {next(iter(lie))} "):
        train(bench.runner, service.job("job-1"), TEMPLATE)
    assert not bench.started


@pytest.mark.parametrize(
    "chosen",
    [TOO_MANY_NODES, ANOTHER, replace(configuration(), ranks_per_node=8), configuration(1, 32, 4)],
)  # fmt: skip
def test_a_recommendation_outside_the_specification_is_not_trained_with(tmp_path, chosen):
    service = FakeService(chosen=chosen)
    bench = bench_of(tmp_path, service)
    with pytest.raises(LaunchError, match="the job's specification does not allow"):
        train(bench.runner, service.job("job-1"), TEMPLATE)
    assert not bench.started


@pytest.mark.parametrize("number", [1, 2, 8])
def test_a_script_that_accumulates_by_itself_is_started_with_no_other_number_of_micro_steps(number):
    job = FakeService().job("job-1")
    batch = BatchSpec(min_local_batch_size=8, grad_accum_steps=4)
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"batch": batch})})
    assert check_configuration(configuration(1, 32, 4), job) == configuration(1, 32, 4)
    with pytest.raises(LaunchError, match="the job's specification does not allow"):
        check_configuration(configuration(1, 32, number), job)


@pytest.mark.parametrize(
    "lie", [{"kind": "train"}, {"job_id": "job-2"}, {"configuration": TOO_MANY_NODES}, {"configuration": ANOTHER}]
)
def test_no_measurement_starts_from_a_run_that_is_not_of_the_plan(tmp_path, lie):
    service = LyingService(lie, configurations=[configuration(1, 32)])
    bench = bench_of(tmp_path, service)
    with pytest.raises(LaunchError, match="the service returned"):
        work_through(bench.runner, service.job("job-1"), TEMPLATE)
    assert not bench.started


@pytest.mark.parametrize("smaller", [configuration(2, 32), configuration(1, 128)])
def test_runs_of_a_launch_differ_in_a_smaller_batch_alone(tmp_path, smaller):
    service = FakeService([configuration(1, 64), smaller])
    service.share_launches = True
    service.claim = lambda *_: RunClaimed(run=service.runs["r0"], smaller=[service.runs["r1"]], reason="")
    bench = bench_of(tmp_path, service)
    with pytest.raises(LaunchError, match="with configuration"):
        work_through(bench.runner, service.job("job-1"), TEMPLATE)
    assert not bench.started


def test_a_run_measured_again_is_the_one_asked_for(tmp_path):
    service = LyingService({"configuration": ANOTHER})
    bench = bench_of(tmp_path, service)
    with pytest.raises(LaunchError, match="with configuration"):
        work_through(bench.runner, service.job("job-1"), TEMPLATE, again=(configuration(),))
    assert not bench.started


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e12])
def test_time_limits_and_instructions_have_bounds(seconds):
    run = FakeService().add("train", Configuration(num_nodes=1, local_batch_size=1)).model_dump()
    with pytest.raises(ValidationError, match="time_limit_s"):
        Run.model_validate(run | {"time_limit_s": seconds})
    for wrong in ({"measuring_steps": 1}, {"measuring_steps": 10**6}, {"profiling_warmup_steps": -1}):
        with pytest.raises(ValidationError, match=next(iter(wrong))):
            Instruction.model_validate({"profiling_warmup_steps": 1, "measuring_steps": 5, "precision": 0.1, **wrong})
