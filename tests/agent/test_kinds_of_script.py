"""Tests the measurement of each kind of unedited training loop: batch, micro-steps, steps and log messages."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.support.fork_server import ForkServer
from tests.agent.conftest import SCRIPTS, Launch, framework_fork_server
from tests.agent.sink import Sink
from tula_agent.ship.spool import read_records

PROFILE = {"TULA_KIND": "profile", "TULA_WARMUP_STEPS": "2", "TULA_MEASURE_STEPS": "8", "TULA_LOCAL_BATCH_SIZE": "8"}


@dataclass
class Kind:
    """The expected measurement of a script and part of its log message; at least `fewest` of ten steps are sampled."""

    ranks: int = 0
    micro_steps: int = 1
    fewest: int = 10
    said: str = ""


KINDS = {
    "cycle": Kind(),
    "zip_of_two": Kind(ranks=2, fewest=8),
    "own_batches": Kind(said="the batches, since no DataLoader yields them"),
    "own_batches_accumulated": Kind(micro_steps=4, said="the batches, since no DataLoader yields them"),
    "loader_per_episode": Kind(ranks=2),
    "loader_per_episode_of_three": Kind(ranks=2),
    "evaluated_with_gradients": Kind(),
    "critic_twice": Kind(ranks=2, fewest=8),
    "gradient_penalty": Kind(said="the batches, since no DataLoader yields them"),
    "second_phase": Kind(fewest=8),
    "optimizer_per_layer": Kind(),
    "dispatched": Kind(ranks=2),
    "detection": Kind(),
    "time_first": Kind(),
    "reduced_every_micro_step": Kind(ranks=2, micro_steps=2),
    "head_first": Kind(ranks=2, said="% of the weights are frozen"),
}


@pytest.fixture(scope="module")
def forks() -> ForkServer:
    """Return the fork server that has imported accelerate."""
    return framework_fork_server()


@pytest.mark.parametrize("kind", KINDS)
def test_a_profiling_run_measures_every_step_of_its_size_and_leaves(sink: Sink, launch: Launch, kind: str) -> None:
    due = KINDS[kind]
    done = launch("with_hook.py", str(SCRIPTS / "kinds.py"), kind, ranks=due.ranks, **PROFILE)
    assert not sink.invalid
    assert "complete" not in done.stdout
    measured = [body for body in sink.samples if body["rank"] == 0]
    assert {(body["local_batch_size"], body["grad_accum_steps"]) for body in measured} == {(8, due.micro_steps)}
    assert len(sink.steps()) >= due.fewest
    assert len(sink.steps()) <= 10
    assert sink.states == ["running", "succeeded"]
    said = [line for line in done.stderr.splitlines() if "tula:" in line]
    assert [due.said in line for line in said] == ([True] if due.said else [])


def test_batches_that_a_script_keeps_are_measured_in_one_launch_for_each(sink: Sink, launch: Launch) -> None:
    """The script keeps its cut batches, so the launch ends after the smallest; other launches measure the rest."""
    launch("with_hook.py", str(SCRIPTS / "kinds.py"), "cycle", **PROFILE, TULA_SMALLER_BATCHES="2=small,4=middle")
    assert not sink.invalid
    found = [(path.split("/")[3], body) for _, path, body in sink.requests if path.endswith("/samples")]
    assert {(run, body["local_batch_size"]) for run, body in found} == {("small", 2)}


@pytest.mark.parametrize("variables", [{"TULA_KIND": "train"}, PROFILE, PROFILE | {"TULA_SMALLER_BATCHES": "4=small"}])
def test_ranks_that_step_unequally_often_train_to_their_end(
    sink: Sink, launch: Launch, variables: dict[str, str]
) -> None:
    """No two ranks wait for each other, and no rank stops alone."""
    done = launch("with_hook.py", str(SCRIPTS / "kinds.py"), "joined", ranks=2, **variables)
    assert done.stdout.count("complete") == 2
    assert done.stderr.count("loop over run.steps(loader)") == 1
    assert {body["local_batch_size"] for body in sink.samples} == {8}
    assert len(sink.steps()) == (29 if variables["TULA_KIND"] == "train" else 10)
    assert sink.states[-1] == "succeeded"


def test_the_first_rank_never_waits_for_another_to_send_what_it_measured(
    sink: Sink, launch: Launch, environment: dict[str, str]
) -> None:
    """If the service hangs, a run takes five seconds to end; the first rank must not count this time in a step."""
    sink.behaviour = "hang"
    launch("with_hook.py", str(SCRIPTS / "kinds.py"), "joined_nearly_even", ranks=2, **PROFILE)
    files = Path(environment["TULA_SPOOL_DIR"]).glob("run1-0-*.spool")
    sent = [json.loads(request.body) for file in files for request in read_records(file)]
    times_s = [time_s for body in sent for time_s in body.get("step_time_s", [])]
    assert len(times_s) == 10
    assert max(times_s) < 3.0


@pytest.mark.parametrize("kind", ["loader_per_step", "list_per_step"])
def test_batches_of_a_loader_that_is_new_at_each_step_are_its_micro_steps(
    sink: Sink, launch: Launch, kind: str
) -> None:
    """This also holds if the run asks for another number of micro-steps, or if only one rank drops its data sets."""
    done = launch("with_hook.py", str(SCRIPTS / "kinds.py"), kind, ranks=2, TULA_GRAD_ACCUM_STEPS="1", **PROFILE)
    assert "complete" not in done.stdout
    measured = {(body["local_batch_size"], body["grad_accum_steps"]) for body in sink.samples if body["rank"] == 0}
    assert measured == {(8, 2)}
    assert sink.states == ["running", "succeeded"]


@pytest.mark.parametrize("smaller", ["", "2=small,4=middle"])
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_batch_that_a_script_lowers_after_an_out_of_memory_did_not_fit(
    sink: Sink, launch: Launch, ranks: int, smaller: str
) -> None:
    """Only the run with the largest batch ends; the launch's other runs return to the plan."""
    launch(
        "with_hook.py", str(SCRIPTS / "kinds.py"), "finds_its_batch",
        ranks=ranks, expect=None, TULA_SMALLER_BATCHES=smaller, **PROFILE,
    )  # fmt: skip
    ended = [(path, body) for _, path, body in sink.requests if body.get("state") not in ("running", None)]
    assert {(path, body["state"], body["failed_local_batch_size"]) for path, body in ended} == {
        ("/v1/runs/run1", "out_of_memory", 8)
    }
    assert "from 8 to 5 after this error: OutOfMemoryError: CUDA out of memory" in ended[0][1]["message"]
    assert {path for _, path, _ in sink.requests if "/small" in path or "/middle" in path} == set()


def test_an_out_of_memory_of_another_batch_ends_no_run(sink: Sink, launch: Launch) -> None:
    """This also holds if cut batches are smaller than the batch of the run."""
    launch("with_hook.py", str(SCRIPTS / "kinds.py"), "lowers_to_its_batch", **PROFILE, TULA_SMALLER_BATCHES="2=small")
    measured = {(path.split("/")[3], body["local_batch_size"]) for _, path, body in sink.requests if "step" in body}
    assert measured == {("small", 2), ("run1", 8)}
    assert "out_of_memory" not in sink.states


def test_a_training_may_lower_its_batch(sink: Sink, launch: Launch) -> None:
    variables = PROFILE | {"TULA_KIND": "train"}
    done = launch("with_hook.py", str(SCRIPTS / "kinds.py"), "finds_its_batch", **variables)
    assert done.printed("complete")
    assert sink.states[-1] == "succeeded"


def test_accumulation_that_rises_while_it_is_measured_is_said(sink: Sink, launch: Launch) -> None:
    done = launch("with_hook.py", str(SCRIPTS / "kinds.py"), "accumulation_rises", ranks=2, **PROFILE)
    assert done.stderr.count("accumulation rose from 1 to 2 micro-steps per step while it was measured") == 1
    assert sink.states == ["running", "succeeded"]
