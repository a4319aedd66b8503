"""Tests the batch schedules that people, scripts and Megatron-LM read.

`tests/agent/test_callbacks.py` tests the callbacks of frameworks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.client.conftest import application, job_spec, serving
from tests.client.test_cli import Tula, answer, tula
from tests.client.test_client import steps
from tula_client import Client, write_schedule
from tula_wire import (
    BatchSchedule,
    BatchStage,
    ClaimRequest,
    Configuration,
    Estimate,
    Job,
    Run,
    RunCreate,
    RunPatch,
    SampleBatch,
    TelemetryChunk,
)
from tula_wire.format import money

__all__ = ["tula"]
TRAINED = Configuration(num_nodes=4, local_batch_size=32)


def slow_steps(run: Run) -> SampleBatch:
    """Return steps of about ten seconds each, so that a relaunch is short compared with a stage."""
    quick = steps(run)
    return quick.model_copy(update={"step_time_s": [100.0 * value for value in quick.step_time_s]})


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of a service without other jobs, from which it would learn what a schedule saves."""
    with application(tmp_path_factory.mktemp("schedule")) as app, serving(app) as url:
        yield url


@pytest.fixture(scope="module")
def scheduled(address: str) -> Job:
    """Return a profiled job for which the noise scale grew from 64 to 3,000 examples in its last training run."""
    with Client(address, token="") as client:
        made = client.register(job_spec("a batch schedule")).job
        while (claimed := client.claim(made.id, ClaimRequest(holder="test")).run) is not None:
            client.patch_run(claimed.id, RunPatch(state="running", holder="test"))
            client.send_samples(claimed.id, slow_steps(claimed))
            client.patch_run(claimed.id, RunPatch(state="succeeded", holder="test"))
        run = client.create_run(made.id, RunCreate(kind="train", configuration=TRAINED, holder="test"))
        client.send_samples(run.id, slow_steps(run))
        number = 500_000 // TRAINED.global_batch_size
        noise = [64.0 if step < number // 2 else 3000.0 for step in range(number)]
        columns = {"gradient_noise_scale": noise}
        chunk = TelemetryChunk(rank=0, boot_id="a", sequence=0, steps=list(range(number)), columns=columns)
        client.send_telemetry(run.id, chunk)
        client.patch_run(run.id, RunPatch(state="succeeded", holder="test"))
        return made


def test_recommend_prints_a_schedule_for_people_programs_and_megatron(tula: Tula, scheduled: Job) -> None:
    planned = BatchSchedule.model_validate(answer(tula("recommend", scheduled.id, "--schedule", "--json")))
    assert len(planned.stages) > 1, planned.sentence
    code, out, err = tula("recommend", scheduled.name, "--schedule")
    assert (code, err) == (0, "")
    rows = out.splitlines()[1 : 1 + len(planned.stages)]
    assert [row.split()[2] for row in rows] == [f"{stage.first_step:,}" for stage in planned.stages]
    assert planned.sentence[:60] in out
    assert planned.saved_usd is not None
    assert planned.saved_usd.value < 0.0
    assert planned.sentence.split(" and ")[-1].startswith(f"costs {money(-planned.saved_usd.value)} more (")
    option = write_schedule(planned, "megatron")
    assert out.splitlines()[-1] == f"Megatron-LM: {option}"
    assert tula("recommend", scheduled.id, "--schedule", "--for", "megatron") == (0, option + "\n", "")
    pairs = " ".join(f"{stage.first_example}:{stage.global_batch_size}" for stage in planned.stages)
    assert option == f'--step-batch-size-schedule "{pairs}"'
    with Client() as client:
        assert client.handle(scheduled.id).schedule() == planned


def test_launches_of_stages_do_not_hide_the_training_that_measured_the_noise(address: str, scheduled: Job) -> None:
    with Client(address, token="") as client:
        before = client.handle(scheduled.id).schedule().noise_run_id
        for _ in range(3):
            run = client.create_run(scheduled.id, RunCreate(kind="train", configuration=TRAINED, holder="test"))
            client.send_samples(run.id, slow_steps(run))
            columns = {"gradient_noise_scale": [64.0] * 20}
            chunk = TelemetryChunk(rank=0, boot_id="a", sequence=0, steps=list(range(20)), columns=columns)
            client.send_telemetry(run.id, chunk)
            client.patch_run(run.id, RunPatch(state="succeeded", holder="test"))
        assert client.handle(scheduled.id).schedule().noise_run_id == before is not None


def test_what_is_missing_is_said_in_one_sentence(tula: Tula, address: str) -> None:
    with Client(address, token="") as client:
        job = client.register(job_spec("no noise scale")).job.id
    code, out, err = tula("recommend", job, "--schedule")
    assert (code, err) == (0, "")
    assert "complete a training run with `TulaOptimizer`" in " ".join(out.split())
    code, out, err = tula("recommend", job, "--schedule", "--for", "lightning")
    assert (code, out) == (1, "")
    assert re.match(r"tula: No training run has measured .*\n$", err)
    code, _, err = tula("recommend", job, "--for", "lightning")
    assert (code, err) == (2, "tula: --for and --beta2 apply only to a batch schedule: add --schedule\n")
    for unheard, said in (("--candidates", "mutually exclusive"), ("--for=megatron", "mutually exclusive")):
        code, out, err = tula("recommend", job, "--schedule", "--json", unheard)
        assert (code, out) == (2, "")
        assert said in err


def test_megatron_counts_thresholds_in_tokens_where_tokens_are_known() -> None:
    nothing = Estimate(value=1.0, low=1.0, high=1.0)
    stages = [
        BatchStage(
            first_step=step,
            first_example=example,
            first_share=0.0,
            steps=100,
            configuration=Configuration(num_nodes=nodes, local_batch_size=64),
            global_batch_size=64 * nodes,
            noise_scale=100.0,
            time_s=nothing,
        )
        for step, example, nodes in ((0, 0, 1), (100, 6400, 4))
    ]
    schedule = BatchSchedule(job_id="job-1", objective="time", stages=stages, sentence="", tokens_per_example=2048.0)
    assert write_schedule(schedule, "megatron") == '--step-batch-size-schedule "0:64 13107200:256"'
    with pytest.raises(ValueError, match="the schedule has no stages to write: Keep it"):
        write_schedule(schedule.model_copy(update={"stages": [], "sentence": "Keep it."}), "megatron")
