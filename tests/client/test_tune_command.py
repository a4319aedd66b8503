"""Tests that a restarted `tula tune` does not repeat finished work."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.client.test_bad_input import spec_file
from tests.client.test_cli import Tula, tula
from tests.client.test_client import profile, steps
from tula_client import Client
from tula_client._spec import load_spec
from tula_wire import ClaimRequest, RunCreate, RunPatch

__all__ = ["tula"]


def test_a_job_that_is_trained_is_not_trained_again_by_the_same_command(
    tula: Tula, tmp_path: Path, address: str
) -> None:
    path = spec_file(tmp_path, tmp_path.name)
    with Client(address, token="") as client:
        job_id = client.register(load_spec(Path(path))).job.id
        profile(client, job_id)
        chosen = client.recommendation(job_id).chosen
        assert chosen is not None
        create = RunCreate(kind="train", configuration=chosen.configuration, holder="test")
        run = client.create_run(job_id, create)
        for state in ("running", "succeeded"):
            client.patch_run(run.id, RunPatch.model_validate({"state": state, "holder": "test"}))
    command = [sys.executable, "-c", "raise SystemExit('started')", "{local_batch_size}", "{num_nodes}"]
    where = ["--work-dir", str(tmp_path / "w")]
    code, out, err = tula("tune", path, "--then-run", *where, "--json", "--", *command)
    assert code == 0, err
    assert json.loads(out)["trained"] is None
    code, out, _ = tula("tune", path, "--then-run", *where, "--", *command)
    assert code == 0
    assert "This job has already been trained" in out
    assert not list((tmp_path / "w").rglob("*.log"))


def test_the_end_of_tuning_says_what_bounds_the_recommended_run(tula: Tula, tmp_path: Path, address: str) -> None:
    path = spec_file(tmp_path, tmp_path.name)
    with Client(address, token="") as client:
        job_id = client.register(load_spec(Path(path))).job.id
        while (run := client.claim(job_id, ClaimRequest(holder="test")).run) is not None:
            client.patch_run(run.id, RunPatch(state="running", holder="test"))
            measured = steps(run)
            waits = [0.4 * time_s for time_s in measured.step_time_s]
            client.send_samples(run.id, measured.model_copy(update={"input_time_s": waits}))
            client.patch_run(run.id, RunPatch(state="succeeded", holder="test"))
        ran = {run.id for run in client.runs(job_id).runs}
    command = ["tune", path, "--work-dir", str(tmp_path / "w")]
    launch = ["--", sys.executable, "-c", "pass", "{local_batch_size}", "{num_nodes}"]
    code, out, err = tula(*command, *launch)
    assert code == 0, err
    said = " ".join(out.split())
    assert "Verdict on run run-" in said
    assert "Input-bound: training spends 40 % of a step waiting for data." in said
    assert "It saves up to 40 % of a step." in said
    code, out, _ = tula(*command, "--json", *launch)
    (verdict,) = json.loads(out)["verdicts"]
    assert verdict["run"] in ran
    assert (verdict["diagnosis"], verdict["at_most"]) == ("input_bound", True)


def test_a_training_says_what_the_last_one_used_and_can_be_held_to_it(tula: Tula, tmp_path: Path, address: str) -> None:
    path = spec_file(tmp_path, tmp_path.name)
    with Client(address, token="") as client:
        job_id = client.register(load_spec(Path(path))).job.id
        profile(client, job_id)
        answer = client.recommendation(job_id)
        assert answer.chosen is not None
        other = next(one.configuration for one in answer.candidates if one.configuration != answer.chosen.configuration)
        run = client.create_run(job_id, RunCreate(kind="train", configuration=other, holder="test"))
        for state in ("running", "succeeded"):
            client.patch_run(run.id, RunPatch.model_validate({"state": state, "holder": "test"}))
        shape = f"{other.num_nodes}x{other.local_batch_size}"
        command = [
            "--work-dir",
            str(tmp_path / "w"),
            "--",
            sys.executable,
            "-c",
            "pass",
            "{local_batch_size}",
            "{num_nodes}",
        ]
        code, out, _ = tula("run", job_id, *command)
        assert code == 0
        assert f"To use that configuration again, add --configuration {shape}." in " ".join(out.split())
        assert client.runs(job_id).runs[0].configuration == answer.chosen.configuration
        code, out, _ = tula("run", job_id, "--configuration", shape, *command)
        assert code == 0
        assert "The recommendation has changed" not in out
        assert client.runs(job_id).runs[0].configuration == other
        code, _, err = tula("run", job_id, "--configuration", "9x9", *command)
        assert (code, "--configuration 9x9: the job has no such configuration" in err) == (2, True)


def test_a_training_has_the_words_of_the_options_that_are_recommended_or_asked_for(
    tula: Tula, tmp_path: Path, address: str
) -> None:
    path = Path(spec_file(tmp_path, tmp_path.name))
    path.write_text(f'{path.read_text()}[options]\nprecision = ["fp32", "bf16"]\n')
    with Client(address, token="") as client:
        job_id = client.register(load_spec(path)).job.id
        profile(client, job_id)
        chosen = client.recommendation(job_id).chosen
        assert chosen is not None
        shape = f"{chosen.configuration.num_nodes}x{chosen.configuration.local_batch_size}"
        words = [sys.executable, "-c", "import sys; print('words', sys.argv[1:])"]
        command = ["--work-dir", str(tmp_path / "w"), "--", *words, "{local_batch_size}", "{num_nodes}", "{precision}"]
        code, out, _ = tula("run", job_id, *command)
        assert code == 0
        (word,) = dict(chosen.configuration.options).values()
        assert f"'{word}']" in out
        code, out, _ = tula("run", job_id, "--configuration", f"{shape},precision=bf16", *command)
        assert code == 0
        assert "'bf16']" in out
        assert client.runs(job_id).runs[0].configuration.options == (("precision", "bf16"),)
        for options, said in (
            ("compile=on", "this job has no option 'compile': use precision"),
            ("precision=fp8", "option 'precision' of this job has no value 'fp8': use fp32, bf16"),
        ):
            code, _, err = tula("run", job_id, "--configuration", f"{shape},{options}", *command)
            assert (code, f"--configuration {shape},{options}: {said}" in err) == (2, True)
            assert err.count("\n") == 1


def test_a_configuration_that_was_measured_is_measured_again(tula: Tula, tmp_path: Path, address: str) -> None:
    path = spec_file(tmp_path, tmp_path.name)
    with Client(address, token="") as client:
        job_id = client.register(load_spec(Path(path))).job.id
        profile(client, job_id)
        before = client.runs(job_id).runs
        again = before[-1].configuration
        word = f"{again.num_nodes}x{again.local_batch_size}"
        command = [sys.executable, "-c", "raise SystemExit(3)", "{local_batch_size}", "{num_nodes}"]
        _, out, _ = tula("tune", path, "--again", word, "--work-dir", str(tmp_path / "w"), "--", *command)
        assert "exit code 3" in out
        newest = client.runs(job_id).runs[0]
    assert newest.id not in {run.id for run in before}
    assert (newest.configuration, newest.state, newest.origin) == (again, "failed", "user")


def test_what_the_agent_says_reaches_the_terminal_and_a_failure_is_told_once(tula: Tula, tmp_path: Path) -> None:
    path = spec_file(tmp_path, tmp_path.name)
    script = "from tula_agent.guard import logger; logger.warning('cannot see %s', 'the batches'); raise SystemExit(3)"
    command = ["--", sys.executable, "-c", script, "{local_batch_size}", "{num_nodes}"]
    where = ["--work-dir", str(tmp_path / "w")]
    code, out, err = tula("tune", path, *where, *command)
    assert code == 1
    assert "note      Run run-" in out
    assert "cannot see the batches" in " ".join(out.split())
    assert "exit code 3" in out
    assert "exit code" not in err
    assert "finished measurements are kept" in err
    _, out, err = tula("tune", path, *where, "--json", *command)
    assert (out, "exit code 3" in err) == ("", True), "nothing else has told it"
