"""Tests `init`, `steps`, `watch`, `log` and `finish` in training scripts by what the service receives."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy
import pytest
import torch

from tests.agent.conftest import Launch
from tests.agent.sink import Sink
from tests.support.forked_commands import launchers
from tula_agent.config import read_config
from tula_agent.profiling import TRAIN_WARMUP_STEPS
from tula_agent.run import Run
from tula_agent.scaling import TulaOptimizer

Plain = Callable[..., list[str]]


def test_a_training_run_reports_every_step_and_leaves_the_weights_alone(
    sink: Sink, launch: Launch, plain: Plain
) -> None:
    done = launch("train.py")
    assert done.printed("weights") == plain()
    assert not sink.invalid
    assert sink.states == ["running", "succeeded"]
    assert sink.steps() == list(range(64))
    assert list(sink.column("step_time_s")) == list(range(64))
    assert list(sink.column("loss")) == list(range(64))
    assert sink.column("grad_norm")
    memory = [body["memory"] for body in sink.samples if "memory" in body][-1]
    weights = (32 * 64 + 64 + 64 * 4 + 4) * 4
    assert memory["parameter_bytes"] == memory["gradient_bytes"] == memory["optimizer_bytes"] == weights
    assert memory["peak_bytes"] > 50 * 2**20
    # Eight examples of this toy are lost in what a process needs anyway; that they fit is known all the same.
    predicted = sink.column("largest_local_batch_size")
    assert predicted
    assert all(largest >= 8 for largest in predicted.values())
    assert {body["local_batch_size"] for body in sink.samples} == {8}
    assert [body["step"] for body in sink.samples if body["warmup"]] == [[0, 1, 2, 3, 4]]


def test_without_a_url_nothing_is_sent_and_nothing_printed(sink: Sink, launch: Launch) -> None:
    for variables in ({"TULA_URL": " "}, {"TULA_DISABLED": "1"}):
        done = launch("train.py", "--epochs", "1", **variables)
        assert "micro-steps 0 16" in done.stdout
        assert not done.stderr
    assert not sink.seen


def test_a_profile_run_ends_by_itself_even_when_the_loader_is_short(sink: Sink, launch: Launch) -> None:
    done = launch("train.py", "--epochs", "1", "--batches", "4", TULA_WARMUP_STEPS="3", TULA_MEASURE_STEPS="20")
    assert "micro-steps 0 23" in done.stdout
    assert sink.steps() == list(range(23))
    assert sum(len(body["step"]) for body in sink.samples if body["warmup"]) == 3
    assert sink.states == ["running", "succeeded"]


def test_ranks_of_a_profile_run_stop_at_the_same_step_once_it_is_precise(sink: Sink, launch: Launch) -> None:
    done = launch(
        "train.py", "--pause", "0.05", ranks=2,
        TULA_WARMUP_STEPS="3", TULA_MEASURE_STEPS="60", TULA_PRECISION="0.5",
    )  # fmt: skip
    counts = {line.split()[2] for line in done.printed("micro-steps")}
    assert len(counts) == 1
    assert 3 + 8 <= int(counts.pop()) < 63
    assert not sink.invalid
    split = sink.rows("step", "step_time_s", "compute_time_s", "exposed_comm_time_s", "skew_s")
    assert len(split) >= 5
    # In the median: where other programs run on the cores, the parts of a step may be of another moment than the whole.
    assert median((row[2] + row[3]) / row[1] for row in split if None not in row) <= 1.5
    assert len(sink.steps(rank=1)) <= 3
    assert next(body["memory"]["method"] for body in sink.samples if body["rank"] == 1) == "peak_rss"


def test_ranks_of_a_profile_run_probe_their_links_once_and_measure_the_same_steps(sink: Sink, launch: Launch) -> None:
    for _ in range(3):  # a busy machine may stop a step for as long as the probe takes, but not in each of three runs
        sink.requests.clear()
        done = launch("train.py", ranks=2, TULA_WARMUP_STEPS="3", TULA_MEASURE_STEPS="20", TULA_PROBE_S="0.6")
        (found,) = [body["all_reduces"] for body in sink.samples if "all_reduces" in body]
        slowest = max(time_s for _, time_s in sink.rows("step", "step_time_s"))
        probing_s = sum(each["time_s"] * each["repeats"] for each in found["all_ranks"])
        if slowest < probing_s:
            break
    assert {line.split()[2] for line in done.printed("micro-steps")} == {"23"}
    assert not sink.invalid
    assert (found["backend"], found["num_nodes"], found["ranks_per_node"]) == ("gloo", 1, 2)
    sizes = [each["size_bytes"] for each in found["all_ranks"]]
    assert sizes == [2 ** (10 + 2 * place) for place in range(len(sizes))]
    assert len(sizes) >= 3
    assert all(3 <= each["repeats"] <= 20 for each in found["all_ranks"])
    assert sink.steps() == list(range(23))
    assert slowest < probing_s  # no step holds the probe


def test_memory_is_read_after_warm_up_and_then_at_every_thousandth_step(
    sink: Sink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(read_config({"TULA_URL": sink.url, "TULA_RUN_ID": "run1", "TULA_SPOOL_DIR": str(tmp_path)}))
    assert run.recorder is not None
    timer, memory, read_after = run.recorder.timer, run.recorder.memory, []
    read = memory.read
    monkeypatch.setattr(memory, "read", lambda *watched: (read_after.append(timer.step - 1), read(*watched))[1])
    assert sum(1 for _ in run.steps([torch.zeros(2, 4)] * 2100)) == 2100
    assert read_after == [TRAIN_WARMUP_STEPS, 1000, 2000]
    run.finish()


def test_the_service_can_end_a_profile_run(sink: Sink, launch: Launch) -> None:
    sink.stop = True
    done = launch(
        "train.py", "--pause", "0.02", ranks=2, TULA_WARMUP_STEPS="1", TULA_MEASURE_STEPS="2000", TULA_PRECISION="0"
    )
    counts = {line.split()[2] for line in done.printed("micro-steps")}
    assert len(counts) == 1
    assert int(counts.pop()) < 1000


def test_a_service_cannot_make_a_profiling_run_of_a_training(sink: Sink, launch: Launch) -> None:
    """This response once ended training after half of the steps, with exit status 0."""
    sink.stop = True
    sink.run = {
        "kind": "profile",
        "instruction": {"profiling_warmup_steps": 2, "measuring_steps": 10, "precision": 0.0},
    }
    done = launch("train.py", "--pause", "0.02", TULA_MEASURE_STEPS="12", TULA_KIND="train")
    assert done.printed("micro-steps") == ["micro-steps 0 64"]
    done = launch("train.py", "--pause", "0.02")
    assert done.printed("micro-steps") == ["micro-steps 0 64"]


def test_accumulation_is_observed_and_reported_where_the_run_has_another(sink: Sink, launch: Launch) -> None:
    done = launch("train.py", "--accumulate", "4", TULA_GRAD_ACCUM_STEPS="1")
    assert "accumulates 4 micro-steps per step, but the run requires 1" in done.stderr
    assert {body["grad_accum_steps"] for body in sink.samples} == {4}


@pytest.mark.parametrize("accumulated", [1, 4])
def test_accumulation_that_nothing_watches_is_reported(
    environment: dict[str, str], caplog: pytest.LogCaptureFixture, accumulated: int
) -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = Run(read_config(environment))
    for number, batch in enumerate(run.steps([torch.randn(8, 4)] * 30)):
        model(batch).sum().backward()
        if (number + 1) % accumulated == 0:
            optimizer.step()
    run.finish()
    expected = "steps once in 4 batches, but 1 is assumed: call run.watch(model, optimizer)"
    assert (expected in caplog.text) is (accumulated == 4)


def test_accumulation_is_observed_without_being_configured(sink: Sink, launch: Launch) -> None:
    launch("train.py", "--accumulate", "4")
    measured = [body for body in sink.samples if not body["warmup"]]
    assert {body["grad_accum_steps"] for body in measured} == {4}
    assert sink.steps() == list(range(16))


def test_a_smaller_last_batch_is_no_sample_of_the_usual_one(sink: Sink, launch: Launch) -> None:
    launch("train.py", "--uneven")
    assert {body["local_batch_size"] for body in sink.samples} == {8}
    assert sink.steps() == [step for step in range(64) if step % 16 != 15]
    assert len(sink.column("step_time_s")) == 64


def test_a_shorter_last_accumulation_is_no_sample_of_the_usual_one(
    sink: Sink, environment: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Lightning also steps at the end of an epoch, which the service once mistook for another accumulation."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = Run(read_config(environment | {"TULA_NUM_NODES": "2", "TULA_RANKS_PER_NODE": "1"}))
    run.watch(model, optimizer)
    for _ in range(4):
        for number, batch in enumerate(run.steps([torch.randn(8, 4)] * 5)):
            model(batch).sum().backward()
            if number in (1, 3, 4):
                optimizer.step()
    run.finish()
    assert {(body["local_batch_size"], body["grad_accum_steps"]) for body in sink.samples} == {(8, 2)}
    assert sink.steps() == [step for step in range(12) if step % 3 != 2]
    assert "the run requires 2 rank(s), but 1 are training: check the launch command" in caplog.text


@pytest.mark.parametrize(
    "options", [["--amp"], ["--clip"], ["--workers", "2"], ["--accumulate", "3", "--amp", "--clip"]]
)
def test_weights_are_bit_for_bit_those_without_the_agent(
    sink: Sink, launch: Launch, plain: Plain, options: list[str]
) -> None:
    assert launch("train.py", *options).printed("weights") == plain(*options)
    assert sink.states == ["running", "succeeded"]
    assert not sink.invalid


@pytest.mark.parametrize("ends", ["finish", "leave"])
def test_the_agent_keeps_no_object_of_the_job_alive(sink: Sink, launch: Launch, ends: str) -> None:
    """If the agent kept a model alive, gloo's threads would also live on and abort the process when it exits."""
    done = launch("lets_go.py", ends, ranks=2)
    assert sink.column("gradient_noise_scale")
    # The place in the data stays, for a checkpoint, as long as there is a run to make one.
    assert sorted(done.printed("alive after")) == ["alive after 0 DataLoader", "alive after 1 DataLoader"]
    assert sorted(done.printed("alive at exit")) == ["alive at exit 0 ", "alive at exit 1 "]


def test_a_second_process_group_at_the_same_address_is_measured(sink: Sink, launch: Launch, tmp_path: Path) -> None:
    """If the agent kept a model or a store, the first group's store would keep the address and its old contents."""
    said = []
    for url in ("", sink.url):
        folder = tmp_path / f"agent{bool(url)}"
        folder.mkdir()
        done = launch("second_group.py", str(folder), ranks=2, TULA_URL=url)
        said.append(sorted(done.stdout.splitlines()))
    assert said[0] == said[1]
    assert [line.rpartition(" ")[2] for line in said[1]] == ["closed"] * 4
    assert len({line.split()[2] for line in said[1]}) == 2  # ranks agree, and the second stretch went on
    assert not sink.invalid
    assert sink.states == ["running", "succeeded"]
    assert sink.steps() == list(range(40))
    joined = {step for step, skew in sink.rows("step", "skew_s") if skew is not None}
    assert joined >= {*range(2, 9), *range(22, 29)}  # DDP's clock is read in its first ten steps, and then seldom


def test_times_measured_before_a_group_was_destroyed_are_joined_after_it(sink: Sink, launch: Launch) -> None:
    """In this test, the first rank hosts the group's store; destroying the group must not lose the agent's data."""
    launch("train.py", "--pause", "0.01", ranks=2, TULA_WARMUP_STEPS="2", TULA_MEASURE_STEPS="30")
    joined = {step for step, skew in sink.rows("step", "skew_s") if skew is not None}
    assert joined >= set(range(2, 31))


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (["--accumulate", "4", "--no-sync", "--clip"], 16),
        (["--amp", "--overflow", "--uneven"], 64),  # a GradScaler skips every eighth step
    ],
)
def test_ranks_end_with_the_same_bits_whatever_the_loop_does(
    sink: Sink, launch: Launch, plain: Plain, options: list[str], steps: int
) -> None:
    done = launch("train.py", *options, ranks=2)
    assert done.printed("weights") == plain(*options, ranks=2)
    assert sink.states == ["running", "succeeded"]
    assert not sink.invalid
    assert len(sink.column("step_time_s")) == steps
    assert {body["rank"] for body in sink.telemetry if "step_time_s" in body["columns"]} == {0}


def test_a_run_that_ends_within_a_step_leaves_the_optimizers_hooks_in_place(sink: Sink, launch: Launch) -> None:
    done = launch("finishes_within_a_step.py")
    assert done.printed("weight") == ["weight 0.0"]
    assert sink.states == ["running", "succeeded"]
    assert "failed" not in done.stderr


def test_a_batch_size_that_differs_from_the_configured_one_is_reported(sink: Sink, launch: Launch) -> None:
    done = launch("train.py", TULA_LOCAL_BATCH_SIZE="32")
    assert "a batch size of 8 per rank, but the run requires 32" in done.stderr
    assert {body["local_batch_size"] for body in sink.samples} == {8}


def test_sharded_models_and_several_optimizers_have_step_time_and_memory(sink: Sink, launch: Launch) -> None:
    done = launch("sharded.py", ranks=2)
    assert len(done.printed("rank")) == 2
    assert all("no rank keeps its own gradient" in said for said in done.printed("refused"))
    assert len(done.printed("refused")) == 2
    assert "left out" not in done.stderr
    assert not sink.invalid
    assert sink.steps() == list(range(20))
    memory = [body["memory"] for body in sink.samples if "memory" in body and body["rank"] == 0][-1]
    shard = (16 * 64 + 64 + 64 * 16 + 16) * 4 // 2
    assert memory["parameter_bytes"] == shard + (16 * 2 + 2) * 4
    assert 2 * shard <= memory["optimizer_bytes"] <= 2 * shard + 64


def test_the_first_version_of_fsdp_has_step_time_and_memory_too(sink: Sink, launch: Launch) -> None:
    done, without = (launch("sharded_flat.py", ranks=2, TULA_URL=url) for url in (sink.url, ""))
    assert len(done.printed("shard")) == 2
    assert sorted(done.printed("shard")) == sorted(without.printed("shard"))
    assert "left out" not in done.stderr
    assert not sink.invalid
    assert sink.steps() == list(range(20))
    memory = [body["memory"] for body in sink.samples if "memory" in body and body["rank"] == 0][-1]
    shard = (16 * 64 + 64 + 64 * 16 + 16) * 4 // 2
    assert memory["parameter_bytes"] == shard
    assert 2 * shard <= memory["optimizer_bytes"] <= 2 * shard + 64
    assert not sink.column("grad_norm")  # a rank's share of it is no norm of the gradient


def test_ranks_come_from_the_process_group_where_no_variable_is_set(sink: Sink, launch: Launch, plain: Plain) -> None:
    """As under `torch.multiprocessing.spawn`, no variable names the rank; only the first rank reports the run."""
    done = launch("train.py", "--spawned", ranks=2)
    assert done.printed("weights") == plain(ranks=2)
    assert sink.states == ["running", "succeeded"]
    assert sink.steps() == list(range(64))
    assert {body["world_size"] for body in sink.samples} == {2}
    assert {body["rank"] for body in sink.telemetry if "step_time_s" in body["columns"]} == {0}


def test_one_process_in_an_allocation_of_eight_is_one_rank(sink: Sink, launch: Launch) -> None:
    """Without srun, SLURM_NTASKS is the size of the allocation; the profiling run still ends."""
    done = launch(
        "train.py", "--epochs", "1", "--batches", "4", TULA_WARMUP_STEPS="3", TULA_MEASURE_STEPS="20", SLURM_NTASKS="8"
    )
    assert "micro-steps 0 23" in done.stdout
    assert {body["world_size"] for body in sink.samples} == {1}
    assert sink.states == ["running", "succeeded"]


def test_epochs_before_a_run_are_reported_only_where_known(sink: Sink, tmp_path: Path) -> None:
    environ = {"TULA_URL": sink.url, "TULA_SPOOL_DIR": str(tmp_path)}
    for run_id, restart, epoch in (("fresh", "0", None), ("again", "1", None), ("said", "1", 0.0)):
        run = Run(read_config({**environ, "TULA_RUN_ID": run_id, "TULA_RESTART": restart}))
        if epoch is not None:
            run.begin_at(epoch)
        for _ in run.steps([torch.zeros(2)] * 3):
            run.recorder.before_optimizer_step(None, (), {})  # type: ignore[union-attr,arg-type]
        run.finish()
    bodies = [(path.split("/")[3], body) for _, path, body in sink.requests if path.endswith("/samples")]
    reported = {run_id: body.get("epochs_before") for run_id, body in bodies}
    assert reported == {"fresh": 0.0, "again": None, "said": 0.0}
    assert not sink.invalid


def test_the_length_of_sequences_is_reported(sink: Sink, tmp_path: Path) -> None:
    run = Run(read_config({"TULA_URL": sink.url, "TULA_RUN_ID": "r", "TULA_SPOOL_DIR": str(tmp_path)}))
    lengths = [8, 8, 16]
    for _ in run.steps([{"input_ids": torch.zeros(4, length, dtype=torch.int64)} for length in lengths]):
        run.recorder.before_optimizer_step(None, (), {})  # type: ignore[union-attr,arg-type]
    run.finish()
    assert sink.column("tokens_per_example") == dict(enumerate(map(float, lengths)))


def test_paused_time_counts_in_no_step(sink: Sink, tmp_path: Path) -> None:
    """On an inactive run, `paused` does nothing and lets exceptions propagate."""
    run = Run(read_config({"TULA_URL": sink.url, "TULA_RUN_ID": "r", "TULA_SPOOL_DIR": str(tmp_path)}))
    began = time.monotonic()
    for _ in run.steps([torch.zeros(2)] * 3):
        with run.paused(), run.paused():
            time.sleep(0.5)
        run.recorder.before_optimizer_step(None, (), {})  # type: ignore[union-attr,arg-type]
    took_s = time.monotonic() - began
    run.finish()
    assert sum(sink.column("step_time_s").values()) <= took_s - 1.5
    assert len(sink.steps()) == 3
    with pytest.raises(KeyError), Run(None).paused():
        raise KeyError


def test_the_optimizer_s_time_is_apart_from_the_gradient_s(sink: Sink, tmp_path: Path) -> None:
    """The times of two optimizers are added; a step whose closure computes gradients has no optimizer time."""

    class Slow(torch.optim.SGD):
        def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
            time.sleep(0.02)
            return super().step(closure)

    run = Run(read_config({"TULA_URL": sink.url, "TULA_RUN_ID": "r", "TULA_SPOOL_DIR": str(tmp_path)}))
    model = torch.nn.Linear(2, 1)
    optimizers = [Slow([parameter], lr=0.1) for parameter in model.parameters()]
    run.watch(model, optimizers)

    def gradients() -> float:
        time.sleep(0.03)
        loss = model(torch.ones(4, 2)).sum()
        loss.backward()
        return loss.item()

    for step, _ in enumerate(run.steps([torch.zeros(4)] * 4)):
        if step < 2:
            gradients()
        for optimizer in optimizers:
            optimizer.step() if step < 2 else optimizer.step(gradients)
    run.finish()
    assert not sink.invalid
    assert sink.steps() == [0, 1, 2, 3]
    rows = [row for row in sink.rows("step", "step_time_s", "optimizer_time_s") if row[2] is not None]
    assert [step for step, *_ in rows] == [0, 1]
    assert all(0.04 <= optimizer_time_s <= step_time_s - 0.03 for _, step_time_s, optimizer_time_s in rows)


def test_the_host_times_no_optimizer_of_another_device(sink: Sink, tmp_path: Path) -> None:
    """On another device, the optimizer only launches work, so the host cannot measure the optimizer's time."""
    run = Run(read_config({"TULA_URL": sink.url, "TULA_RUN_ID": "r", "TULA_SPOOL_DIR": str(tmp_path)}))
    model = torch.nn.Linear(2, 1, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.watch(model, optimizer)
    for _ in run.steps([torch.zeros(4)] * 3):
        model(torch.ones(4, 2, device="meta")).sum().backward()
        optimizer.step()
    run.finish()
    assert len(sink.steps()) == 3
    assert {row[0] for body in sink.samples for row in zip(body.get("optimizer_time_s", [None]))} == {None}


def test_an_optimizer_that_is_no_key_does_not_hide_the_others(sink: Sink, tmp_path: Path) -> None:
    """A script's own optimizer wrapper may have slots or define equality, so it cannot be a dictionary key."""

    class Slots:
        __slots__ = ("state",)

    @dataclass
    class Equal:
        state: dict[str, float]

    run = Run(read_config({"TULA_URL": sink.url, "TULA_RUN_ID": "r", "TULA_SPOOL_DIR": str(tmp_path)}))
    model = torch.nn.Linear(2, 1)
    run.watch(model, [Slots(), Equal({}), torch.optim.SGD(model.parameters(), lr=0.1)])
    assert run.recorder is not None
    assert run.recorder.timer.watched
    run.finish()


def test_the_optimizer_s_hooks_raise_nothing(sink: Sink, tmp_path: Path) -> None:
    run = Run(read_config({"TULA_URL": sink.url, "TULA_RUN_ID": "r", "TULA_SPOOL_DIR": str(tmp_path)}))
    run.recorder.before_optimizer_step(None, None, None)  # type: ignore[union-attr,arg-type]
    run.finish()


def test_processes_that_share_a_replica_count_as_one_rank(
    sink: Sink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "8"), ("TULA_URL", sink.url), ("TULA_SPOOL_DIR", str(tmp_path))):
        monkeypatch.setenv(name, value)
    run = Run(read_config({**os.environ, "TULA_RUN_ID": "r"}), model_parallel_size=4)
    for _ in run.steps([torch.zeros(2)] * 3):
        run.recorder.before_optimizer_step(None, (), {})  # type: ignore[union-attr,arg-type]
    run.finish()
    assert {body["world_size"] for body in sink.samples} == {2}


def test_a_framework_that_fetches_a_whole_step_at_once_counts_all_its_batches(sink: Sink, tmp_path: Path) -> None:
    run = Run(read_config({"TULA_URL": sink.url, "TULA_RUN_ID": "r", "TULA_SPOOL_DIR": str(tmp_path)}))
    model = torch.nn.Linear(3, 1)
    optimizer = TulaOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    run.watch(model, optimizer)
    run.begin_loop()
    for _ in range(4):
        run.batch_arrived(torch.empty(5, 0), None, 2)
        for _ in range(2):
            model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.batch_done()
    run.finish()
    resumed = TulaOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), global_batch_size=20)
    resumed.load_state_dict(optimizer.state_dict())
    before, after = (each.telemetry()["gradient_noise_scale"] for each in (optimizer, resumed))
    assert after == pytest.approx(before)  # S is kept, so B was 10


@pytest.mark.parametrize("active", [True, False])
def test_the_agent_keeps_no_reference_to_a_batch(sink: Sink, tmp_path: Path, active: bool) -> None:
    """A script may free its input in the middle of a step because it needs the memory."""
    environ = {"TULA_URL": sink.url if active else "", "TULA_RUN_ID": "r", "TULA_SPOOL_DIR": str(tmp_path)}
    run = Run(read_config(environ))
    seen = 0
    for batch in run.steps(torch.zeros(8) for _ in range(3)):
        freed = weakref.ref(batch)
        del batch
        assert freed() is None
        seen += 1
    run.finish()
    assert seen == 3
    assert run.config is None or sink.states == ["running", "succeeded"]


def test_random_states_that_cannot_be_captured_raise_nothing() -> None:
    usual = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(1))
    try:
        assert list(Run(None).steps([1, 2, 3])) == [1, 2, 3]
    finally:
        numpy.random.set_bit_generator(usual)


@pytest.mark.parametrize(("how", "steps"), [("os._exit", 21), ("schedule", 6)])
def test_what_was_measured_is_sent_whatever_ends_the_script(sink: Sink, launch: Launch, how: str, steps: int) -> None:
    """The process ends without tear-down, or a learning-rate schedule raises an exception after six steps."""
    plan = {"TULA_WARMUP_STEPS": "1", "TULA_MEASURE_STEPS": "20"}
    launch("leaves.py", how, expect=int(how == "schedule"), **plan)
    assert len(sink.steps()) == steps
    assert sink.states == ["running", "succeeded"]


@pytest.mark.parametrize("how", ["exit(3)", "raise SystemExit(3)", "nothing"])
def test_the_agent_of_a_training_leaves_its_end_to_the_launcher(sink: Sink, launch: Launch, how: str) -> None:
    launch("leaves.py", how, expect=0 if how == "nothing" else 3, TULA_KIND="train", TULA_SUPERVISED="1")
    assert len(sink.steps()) == 6
    assert sink.states == ["running"]


@pytest.mark.parametrize("how", ["command", "fork"])
def test_a_process_that_a_training_starts_does_not_join_its_run(sink: Sink, launch: Launch, how: str) -> None:
    done = launch("starts_others.py", how, TULA_KIND="train", PYTHON_EXEC=str(launchers() / "python"))
    assert sorted(done.stdout.split()) == ["False", "True"]
    assert sink.steps() == list(range(5))
    assert len({body["boot_id"] for body in sink.samples}) == 1
    assert sink.states == ["running", "succeeded"]
    assert done.stderr.count("this process is not measured, because its parent process") == 1
