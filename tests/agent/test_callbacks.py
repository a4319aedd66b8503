"""Tests the callbacks with the real frameworks, each in a separate process."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from benchmarks.support.fork_server import ForkServer
from tests.agent.conftest import Launch, framework_fork_server
from tests.agent.sink import Sink
from tula_client import write_schedule
from tula_wire import BatchSchedule, BatchStage, Configuration, Estimate

BATCHES = {"lightning_fit.py": 8, "transformers_train.py": 4, "accelerate_train.py": 8}


@pytest.fixture(scope="module")
def forks() -> ForkServer:
    """Return the fork server that has imported the frameworks."""
    return framework_fork_server()


@pytest.mark.parametrize("script", BATCHES)
def test_a_training_reports_steps_of_two_micro_steps_and_its_loss(sink: Sink, launch: Launch, script: str) -> None:
    done = launch(script, "3")
    steps = int(done.printed("steps")[0].split()[1])
    assert not sink.invalid
    assert sink.states == ["running", "succeeded"]
    assert sink.steps()[-1] >= steps - 2
    measured = [body for body in sink.samples if not body["warmup"]]
    assert {(body["local_batch_size"], body["grad_accum_steps"]) for body in measured} == {(BATCHES[script], 2)}
    assert sink.column("loss")
    assert sink.column("grad_norm")
    if script != "accelerate_train.py":
        assert sink.column("validation_accuracy")


@pytest.mark.parametrize("script", BATCHES)
def test_a_profile_run_ends_the_framework_s_loop(sink: Sink, launch: Launch, script: str) -> None:
    done = launch(script, "50", TULA_WARMUP_STEPS="2", TULA_MEASURE_STEPS="9")
    assert int(done.printed("steps")[0].split()[1]) in (11, 12)
    assert sink.steps() == list(range(11))
    assert sink.states == ["running", "succeeded"]


@pytest.mark.parametrize("script", BATCHES)
def test_one_launch_measures_several_batches_where_the_framework_lets_them_be_cut(
    sink: Sink, launch: Launch, script: str
) -> None:
    """Lightning's strategy and accelerate's loader can cut batches; the Trainer's callbacks receive no batch."""
    plan = {"TULA_WARMUP_STEPS": "2", "TULA_MEASURE_STEPS": "6", "TULA_LOCAL_BATCH_SIZE": str(BATCHES[script])}
    done = launch(script, "50", TULA_SMALLER_BATCHES="2=small", **plan)
    assert not sink.invalid
    seen = [path.split("/")[3] for _, path, body in sink.requests if path.endswith("/samples") for _ in body["step"]]
    sizes = {
        (path.split("/")[3], body["local_batch_size"]) for _, path, body in sink.requests if path.endswith("/samples")
    }
    whole = {("run1", BATCHES[script])}
    if script == "transformers_train.py":
        assert (sizes, seen.count("run1")) == (whole, 8)
        assert done.stderr.count("measures one batch size instead of several") == 1
    else:
        assert (sizes, seen.count("small"), seen.count("run1")) == (whole | {("small", 2)}, 8, 8)
        assert sorted(sink.states) == ["running", "running", "succeeded", "succeeded"]
    if script == "lightning_fit.py":  # the peak of memory is of the cut batch, and the trainer is left as it was
        assert done.printed("moved") == ["moved [2, 8] by batch_to_device"]


def test_a_lightning_module_that_takes_batches_from_the_loader_itself_measures_whole_ones(
    sink: Sink, launch: Launch
) -> None:
    plan = {
        "TULA_WARMUP_STEPS": "2",
        "TULA_MEASURE_STEPS": "6",
        "TULA_LOCAL_BATCH_SIZE": "8",
        "TULA_SMALLER_BATCHES": "2=small",
    }
    done = launch("lightning_fit.py", "50", PULLS="1", **plan)
    assert not sink.invalid
    assert {path.split("/")[3] for _, path, _ in sink.requests if path.endswith("/samples")} == {"run1"}
    assert done.stderr.count("measures one batch size instead of several") == 1


@pytest.mark.parametrize("script", ["lightning_fit.py", "transformers_train.py"])
def test_a_training_that_the_framework_resumes_reports_its_earlier_epochs(
    sink: Sink, launch: Launch, tmp_path: Path, script: str
) -> None:
    checkpoint = tmp_path / "saved"
    launch(script, "2", str(checkpoint))  # leaves one from the middle of the second pass
    assert {body["epochs_before"] for body in sink.samples} == {0.0}
    launch(script, "3", str(checkpoint))
    assert not sink.invalid
    assert {body["epochs_before"] for body in sink.samples} == {0.0, 1.5}


@pytest.mark.parametrize("script", ["lightning_fit.py", "transformers_train.py"])
def test_a_profile_run_leaves_no_checkpoint_even_where_one_is_due(launch: Launch, tmp_path: Path, script: str) -> None:
    done = launch(script, "50", str(tmp_path / "saved"), TULA_WARMUP_STEPS="2", TULA_MEASURE_STEPS="10")
    assert done.printed("steps") == ["steps 12"]
    assert not [*tmp_path.rglob("checkpoint-12"), *tmp_path.rglob("*.ckpt")]


@pytest.mark.parametrize("script", ["lightning_fit.py", "transformers_train.py"])
def test_evaluation_inside_the_framework_s_loop_belongs_to_no_step(sink: Sink, launch: Launch, script: str) -> None:
    launch(script, "1", SLOW_EVALUATION_S="1.5")
    assert sink.column("validation_accuracy")
    times = sink.column("step_time_s")
    assert len(times) >= 3
    assert max(times.values()) < 1.5


@pytest.mark.parametrize("framework", ["accelerate", "lightning", "transformers"])
def test_two_ranks_of_the_framework_s_own_ddp_end_with_the_same_bits(
    sink: Sink, launch: Launch, framework: str
) -> None:
    with_agent, without = (
        launch("by_framework.py", framework, ranks=2, TULA_URL=url).printed("weights") for url in (sink.url, "")
    )
    assert len(with_agent) == 2
    assert len({*with_agent, *without}) == 1
    assert not sink.invalid
    assert sink.states == ["running", "succeeded"]
    assert sink.steps() == list(range(36))  # 96 rows, by 4, on two ranks, three times
    assert {(body["world_size"], body["local_batch_size"]) for body in sink.samples} == {(2, 4)}
    assert sink.column("loss")
    assert sink.rows("step", "skew_s")  # both ranks were heard


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_a_written_batch_schedule_ends_its_stages_and_sets_their_rates(
    launch: Launch, tmp_path: Path, framework: Literal["lightning", "transformers"]
) -> None:
    second = Estimate(value=1.0, low=1.0, high=1.0)
    stages = [
        BatchStage(
            first_step=first,
            first_example=4 * first,
            first_share=0.0,
            steps=steps,
            configuration=Configuration(num_nodes=1, local_batch_size=batch),
            global_batch_size=batch,
            noise_scale=10.0,
            learning_rate_factor=rate,
            beta2=beta2,
            time_s=second,
        )
        for first, steps, batch, rate, beta2 in ((0, 6, 4, 1.25, 0.99), (6, 4, 16, 2.5, 0.96))
    ]
    schedule = BatchSchedule(job_id="job-1", objective="time", stages=stages, steps=10, base_batch_size=4, sentence="")
    (tmp_path / "schedule.py").write_text(write_schedule(schedule, framework))
    done = launch("scheduled.py", framework, str(tmp_path), TULA_URL="")
    assert done.printed("stage") == ["stage 6 0.00125 0.99", "stage 10 0.0025 0.96"]


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_fits_of_a_launched_script_without_an_edit_are_one_run(sink: Sink, launch: Launch, package: str) -> None:
    """The installed package registers a callback through an entry point, so every Trainer uses it."""
    done = launch("lightning_callbacks.py", package, TULA_KIND="train")
    assert done.printed("callbacks") == ["callbacks UneditedCallback True"] * 2
    assert sink.states == ["running", "succeeded"]
    assert sink.steps() == list(range(20))


def test_a_script_that_measures_itself_or_that_nobody_launched_gets_no_callback(launch: Launch) -> None:
    script, package = "lightning_callbacks.py", "lightning.pytorch"
    assert launch(script, package, "--measures-itself").printed("callbacks") == ["callbacks"] * 2
    assert launch(script, package, TULA_RUN_ID="").printed("callbacks") == ["callbacks"] * 2
