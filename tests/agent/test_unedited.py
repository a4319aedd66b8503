"""Tests a loop that never calls the agent: which steps and batches count, and how a profiling run leaves the loop."""

from __future__ import annotations

from tests.agent.conftest import Launch
from tests.agent.sink import Sink

PROFILE = {"TULA_KIND": "profile", "TULA_WARMUP_STEPS": "2", "TULA_MEASURE_STEPS": "20", "TULA_LOCAL_BATCH_SIZE": "8"}


def test_steps_are_those_of_the_optimizer_and_evaluation_belongs_to_none(launch: Launch, sink: Sink) -> None:
    done = launch("unedited.py", "--accumulate=2", **PROFILE, TULA_GRAD_ACCUM_STEPS="2")
    assert "complete" not in done.stdout  # left by SystemExit(0)
    assert sink.steps() == list(range(22))
    assert {(body["local_batch_size"], body["grad_accum_steps"]) for body in sink.samples} == {(8, 2)}
    assert sink.states == ["running", "succeeded"]
    assert "not seen" not in done.stderr


def test_a_training_runs_to_its_end(launch: Launch, sink: Sink) -> None:
    done = launch("unedited.py", "--steps=12", TULA_KIND="train")
    assert done.printed("complete")
    assert len(sink.steps()) >= 9  # all but those around the first step
    assert sink.states == ["running", "succeeded"]


def test_without_a_loader_one_sentence_says_what_is_not_seen(launch: Launch, sink: Sink) -> None:
    done = launch("unedited.py", "--without-loader", **PROFILE)
    assert "complete" not in done.stdout
    assert sink.steps() == list(range(22))
    assert done.stderr.count("the batches, since no DataLoader yields them") == 1
