"""Tests that training resumes after its launcher was killed, and that the service reports the remaining steps."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from benchmarks.support.forked import Server
from tests.e2e.command import ALONE, BATCH, Tula, wait_until
from tula_client import Client
from tula_wire import JobPatch, Limits

STEPS = 200


def test_the_remaining_steps_are_counted_from_the_checkpoint(server: Server, tmp_path: Path) -> None:
    tula = Tula(server, tmp_path, forked=True)
    tula.register("goes-on", nodes=1, dataset=STEPS * 8)
    command = ["run", "goes-on", *ALONE, *BATCH, f"--steps={STEPS}", "--checkpoint-at=100", "--step-s=0.02"]
    first = tula.start(*command)
    wait_until(lambda: list(tmp_path.glob(".tula/*/checkpoints/*/.metadata")))
    first.send_signal(signal.SIGKILL)
    first.communicate()
    wait_until(lambda: not tula.processes())

    with Client(server.url, token="") as client:
        job_id = client.handle("goes-on").id
        client.patch_job(job_id, JobPatch(limits=Limits(deadline_s=1.0)))  # far too short: the steps left are reported
        trained, _ = tula(*command)
        assert [one["state"] for one in trained["attempts"]] == ["succeeded"]
        assert "starts at step 100" in tula.logs()
        before, after = (run for run in tula.runs("goes-on") if run.kind == "train")
        assert (before.state, after.state) == ("failed", "succeeded")
        advice = next(event for event in client.events(job_id, last_id=0) if event.kind == "advice")
    assert advice.run_id == after.id
    assert advice.data["kind"] == "deadline"
    assert 50 <= advice.data["step"] < 100
    assert advice.data["steps_left"] == pytest.approx(100 - (advice.data["step"] + 1))
    assert "of earlier starts" in advice.data["sentence"]
