"""Tests that jobs survive failures anywhere from specification to trained weights, with real processes and SLURM."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.support.forked import Server
from tests.e2e.command import ALONE, BATCH, HANGS, SCRIPT, TORCHRUN, Tula, wait_until
from tests.e2e.memory_limit import limited
from tests.e2e.slurm import slurm


def test_kill_9_of_tune_leaves_no_process_and_the_same_command_continues(server: Server, tmp_path: Path) -> None:
    tula = Tula(server, tmp_path)
    command = ["tune", tula.spec("killed", nodes=1), *TORCHRUN, *BATCH, "--step-s=0.05", "--steps=200"]
    first = tula.start(*command)
    wait_until(lambda: "starts at step" in tula.logs())
    assert len(tula.processes()) >= 2  # at least a rank and torchrun
    first.send_signal(signal.SIGKILL)
    first.communicate()
    wait_until(lambda: not tula.processes())
    tuned, _ = Tula(server, tmp_path, forked=True)(*command)
    assert [run.state for run in tula.runs("killed")] == ["succeeded"]
    assert tuned["recommendation"]["basis"] == "profiled"


def test_a_hang_ends_at_the_time_limit_with_the_stack_of_each_rank(server: Server, tmp_path: Path) -> None:
    tula = Tula(server, tmp_path)
    hanging = [*TORCHRUN[:-1], HANGS]
    _, said = tula("tune", tula.spec("hangs"), "--time-limit=20", *hanging, *BATCH, fails=True)
    assert "did not finish within its time limit of 20 s" in said
    log = tula.logs()
    assert "Stack of rank 0" in log
    assert "Stack of rank 1" in log
    assert log.count("in stuck_on_purpose") == 2
    assert [run.state for run in tula.runs("hangs")] == ["failed"]
    assert not tula.processes(hanging[-1])


def test_nothing_that_happens_to_its_terminal_ends_a_training(server: Server, tmp_path: Path) -> None:
    """The terminal cannot show a character, stops reading, and closes; SLURM announces the end of the allocation."""
    tula = Tula(server, tmp_path, PYTHONIOENCODING="ascii")
    tula.register("lasts", nodes=1)
    go_on = tmp_path / "go-on"
    script = f"printf '\\360\\237\\232\\200 up\\n'; until [ -e {go_on} ]; do echo at work; sleep 0.05; done; exit 0"
    training = tula.start("run", "lasts", "--", "bash", "-c", script, "{local_batch_size}")
    assert training.stdout is not None
    wait_until(lambda: "at work" in tula.logs())
    training.stdout.close()
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        training.send_signal(number)
    lines = len(tula.logs().splitlines())
    wait_until(lambda: len(tula.logs().splitlines()) > lines + 40)
    assert training.poll() is None
    go_on.touch()
    training.wait(60)
    assert [run.state for run in tula.runs("lasts") if run.kind == "train"] == ["succeeded"]


def test_out_of_memory_in_training_falls_back_from_the_last_checkpoint(server: Server, tmp_path: Path) -> None:
    """This test uses torch's CPU error; `tests/client/launch/test_judge.py` tests the messages of other devices."""
    tula = Tula(server, tmp_path, forked=True)
    script = [*ALONE, *BATCH, "--accumulate={grad_accum_steps}"]
    tula.register("shrinks", nodes=1)
    trained, _ = tula("run", "shrinks", *script, "--fits=4")
    assert [one["state"] for one in trained["attempts"]] == ["out_of_memory", "succeeded"]
    before, after = (one["configuration"] for one in trained["attempts"])
    assert after["local_batch_size"] < before["local_batch_size"]
    assert (
        after["local_batch_size"] * after["grad_accum_steps"] == before["local_batch_size"] * before["grad_accum_steps"]
    )
    assert "starts at step 4" in tula.logs()
    failed = next(run for run in tula.runs("shrinks") if run.state == "out_of_memory")
    assert failed.configuration.local_batch_size == before["local_batch_size"]
    assert "DefaultCPUAllocator" in (failed.message or "")


@pytest.mark.cluster("memory")
def test_a_rank_that_the_kernel_kills_for_its_memory_also_falls_back(server: Server, tmp_path: Path) -> None:
    tula = Tula(server, tmp_path, forked=True)
    script = [*TORCHRUN, *BATCH, "--accumulate={grad_accum_steps}"]
    tula.register("killed-for-memory")
    with limited(400 * 2**20) as group:
        trained, _ = tula("run", "killed-for-memory", *script, "--fits=4", f"--memory-group={group}")
    assert [one["state"] for one in trained["attempts"]] == ["out_of_memory", "succeeded"]
    before, after = (one["configuration"] for one in trained["attempts"])
    assert (before["local_batch_size"], after["local_batch_size"]) == (8, 4)
    assert after["grad_accum_steps"] == 2 * before["grad_accum_steps"]
    assert "starts at step 4" in tula.logs()
    assert not tula.processes()  # the rank that waited for the killed rank has ended, too


def test_an_out_of_memory_that_the_script_catches_does_not_hang_the_other_rank(server: Server, tmp_path: Path) -> None:
    tula = Tula(server, tmp_path, forked=True)
    began = time.monotonic()
    spec = tula.spec("catches", least_batch=2, search="full")
    tuned, _ = tula("tune", spec, *TORCHRUN, *BATCH, "--steps=400", "--fits=4", "--catch")
    runs = {run.configuration.local_batch_size: run.state for run in tula.runs("catches")}
    assert runs == {2: "succeeded", 4: "succeeded", 8: "out_of_memory"}
    assert [run["state"] for run in tuned["runs"]] == ["succeeded", "succeeded", "out_of_memory"]
    assert "rank 1 ran out of memory at a local batch of 8" in tula.logs()
    assert time.monotonic() - began < 120  # gloo alone would have waited for 30 minutes


def test_a_script_that_ignores_its_batch_is_named_with_the_batch_it_used(server: Server, tmp_path: Path) -> None:
    tula = Tula(server, tmp_path, forked=True)
    _, said = tula("tune", tula.spec("deaf", nodes=1), *ALONE, "--batch-size=6", fails=True)
    (run,) = tula.runs("deaf")
    assert f"Run {run.id} was planned with local batch 8" in said
    assert "but used 6" in said
    assert (run.state, run.configuration.local_batch_size) == ("failed", 8)
    assert run.num_samples >= 8  # samples are kept with the batch that was used


@pytest.fixture(scope="module")
def slurm_environment() -> Iterator[dict[str, str]]:
    """Start a real SLURM with one node; yield the environment for its commands."""
    with slurm() as environment:
        yield environment


@pytest.mark.cluster("slurm")
def test_slurm_starts_the_ranks_and_the_whole_job_is_one_command(
    server: Server, tmp_path: Path, slurm_environment: dict[str, str]
) -> None:
    tula = Tula(server, tmp_path, forked=True, **slurm_environment)
    spec = tula.spec("on-slurm", nodes=1, ranks=2)
    tuned, _ = tula("tune", spec, "--then-run", "--launcher=slurm", "--", SCRIPT, *BATCH)
    assert tuned["trained"]["attempts"][-1]["state"] == "succeeded"
    profiled, trained = tula.runs("on-slurm")
    assert (profiled.state, trained.state) == ("succeeded", "succeeded")
    assert profiled.num_samples >= 8


@pytest.mark.cluster("slurm")
def test_fewer_nodes_than_asked_for_is_one_sentence(
    server: Server, tmp_path: Path, slurm_environment: dict[str, str]
) -> None:
    tula = Tula(server, tmp_path, **slurm_environment)
    spec = tula.spec("too-many", nodes=64)
    _, said = tula("tune", spec, "--launcher=slurm", "--", SCRIPT, *BATCH, fails=True)
    assert "Unable to allocate resources" in said
