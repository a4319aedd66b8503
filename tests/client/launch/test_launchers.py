"""Tests the ready-made templates: how they are expanded, and that each starts the user's script with its arguments."""

from __future__ import annotations

import json

import pytest

from tests.client.launch.fakes import FakeService
from tula_client._calls import calls
from tula_client._errors import UnexpectedAnswerError, UsageError
from tula_client._request import Answer
from tula_client.cli.launch import launchers
from tula_client.launch.template import LAUNCHERS, Template, with_launcher
from tula_client.launch.workdir import WorkDir
from tula_wire import Configuration
from tula_wire.options import PLACEHOLDERS

CONFIGURATION = Configuration(num_nodes=2, ranks_per_node=4, local_batch_size=32)
SCRIPT = ["train.py", "--batch-size={local_batch_size}"]


def filled(name: str) -> tuple[list[str], list[str]]:
    words, stop = with_launcher(name, SCRIPT)
    made = Template(tuple(words)).fill(CONFIGURATION, run_id="run-1", launch_id="run-1-a", env_file="/w/run-1.json")
    return made, Template(tuple(stop)).fill(CONFIGURATION, launch_id="run-1-a") if stop else []


@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_template_is_filled_in_whole_and_ends_with_the_script(name):
    command, _ = filled(name)
    assert command[-2:] == ["train.py", "--batch-size=32"]
    assert not any("{" in word or "}" in word for word in command)


def test_torchrun_starts_every_rank_on_this_machine():
    assert filled("torchrun")[0][:3] == ["torchrun", "--standalone", "--nproc-per-node=8"]


def test_slurm_asks_for_nodes_and_ranks_and_can_cancel_by_name():
    command, stop = filled("slurm")
    assert {"--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--job-name=tula-run-1-a"} <= set(command)
    assert stop == ["scancel", "--name=tula-run-1-a"]


def test_ray_gets_its_variables_from_a_file_and_can_stop_its_job():
    command, stop = filled("ray")
    assert "--runtime-env=/w/run-1.json" in command
    assert stop == ["ray", "job", "stop", "--no-wait", "tula-run-1-a"]


@pytest.mark.parametrize("identity", ["../../../x", "..", ".hidden", "a/b", "a\\b", "x;touch y", "", "a" * 201])
def test_an_id_that_could_leave_its_folder_is_no_answer_of_a_service(identity):
    """Run ids become names of files and folders, so such an id could cause writes outside the working folder."""
    run = FakeService().add("train", CONFIGURATION)
    body = json.dumps({**run.model_dump(mode="json"), "id": identity}).encode()
    with pytest.raises(UnexpectedAnswerError, match="id"):
        calls.run("r").parse(Answer(200, {}, body))
    body = json.dumps({**run.model_dump(mode="json"), "job_id": identity}).encode()
    with pytest.raises(UnexpectedAnswerError, match="job_id"):
        calls.run("r").parse(Answer(200, {}, body))


def test_the_file_of_variables_is_for_the_user_alone(tmp_path):
    path = WorkDir(tmp_path, "job-1").env_file("run-1", {"TULA_TOKEN": "secret"})
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text()) == {"env_vars": {"TULA_TOKEN": "secret", "RAY_DEDUP_LOGS": "0"}}


def test_an_unknown_launcher_is_refused_with_those_that_exist():
    with pytest.raises(UsageError, match="'lsf' is unknown: use one of torchrun, slurm, ray"):
        with_launcher("lsf", SCRIPT)


def test_the_command_prints_every_template_and_placeholder(capsys):
    launchers()
    printed = capsys.readouterr().out
    for name, launcher in LAUNCHERS.items():
        assert f"{name}: {launcher.description}" in printed.replace("\n", " ").replace("  ", " ")
    assert all(f"{{{name}}}" in printed for name in PLACEHOLDERS)
    launchers(as_json=True)
    assert set(json.loads(capsys.readouterr().out)["launchers"]) == set(LAUNCHERS)
