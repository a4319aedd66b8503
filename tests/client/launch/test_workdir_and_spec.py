"""Tests that only one `tula` holds a job's folder at a time, and that errors name a specification's invalid field."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from pydantic import ValidationError

from tests.support.inprocess import InProcess
from tula_client._errors import LaunchError, UsageError
from tula_client._spec import faults, load_spec
from tula_client.launch.workdir import WorkDir
from tula_service.api.errors import install
from tula_wire import JobSpec

SPEC = """
name = "j"
model = { name = "m" }
dataset = { size = 10 }
cluster = { max_nodes = 4 }
"""


def test_a_second_tula_is_refused_and_its_successor_has_the_same_holder_name(tmp_path):
    with (
        WorkDir(tmp_path, "job-1").locked() as first,
        pytest.raises(LaunchError, match="another tula process is using"),
        WorkDir(tmp_path, "job-1").locked(),
    ):
        pass
    with WorkDir(tmp_path, "job-1").locked() as second:
        assert second == first


@pytest.mark.parametrize("left", ["", '"half'])
def test_a_holder_that_a_full_disk_cut_short_locks_nobody_out(tmp_path, left):
    work = WorkDir(tmp_path, "job-1")
    with work.locked() as before:
        assert before
    (work.path / "holder.json").write_text(left)
    with work.locked() as after:
        assert len(after) > 12
    with work.locked() as again:
        assert again == after


def test_saved_state_is_read_back_and_rubbish_is_nothing(tmp_path):
    work = WorkDir(tmp_path, "job-1")
    work.save("training", {"restart": 2})
    assert work.load(dict[str, int], "training") == {"restart": 2}
    (work.path / "training.json").write_text("{torn")
    assert work.load(dict[str, int], "training") is None
    work.save("training", ["another kind"])
    assert work.load(dict[str, int], "training") is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("max_nodes = 4", "max_nodes = 0"), r"cluster\.max_nodes: must be at least 1; give a larger value\."),
        (("max_nodes = 4", "max_nodes = 4, min_nodes = 9"), "swap them"),
        (("size = 10", "size = nan"), r"dataset\.size"),
        (('name = "j"', 'name = "j"\nobjective = "fame"'), "objective: must be one of 'balanced', "),
        (('name = "j"', 'name = "j"\nepochs = inf'), "epochs"),
        (('name = "j"', 'name = "j"\nepoch = 1'), "epoch: is not a known field; check its spelling or remove it"),
        (
            ("max_nodes = 4", "max_node = 4, max_nodes = 4"),
            r"cluster\.max_node: is not a known field; check",
        ),
        (("dataset = { size = 10 }", ""), r"dataset: is required; add it\."),
        (("dataset = { size = 10 }", "dataset = 10"), "dataset: must be a table of fields"),
        (("size = 10", 'size = "many"'), r"dataset\.size: must be a whole number\."),
        (('name = "j"', 'name = "j'), "is not valid TOML"),
    ],
)
def test_an_error_in_a_specification_names_the_field(tmp_path, change, said):
    path = tmp_path / "job.toml"
    path.write_text(SPEC.replace(*change))
    with pytest.raises(UsageError, match=said) as error:
        load_spec(path)
    assert "\n" not in str(error.value)


def test_all_that_is_wrong_is_named_each_on_its_line(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(
        SPEC.replace("dataset = { size = 10 }", 'serach = "full"').replace("max_nodes = 4", "max_nodes = 0")
    )
    with pytest.raises(UsageError) as error:
        load_spec(path)
    first, *rest = str(error.value).splitlines()
    assert first == f"{path}: 3 fields are wrong:"
    assert sorted(rest) == [
        "  cluster.max_nodes: must be at least 1; give a larger value.",
        "  dataset: is required; add it.",
        "  serach: is not a known field; check its spelling or remove it.",
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"name": "x" * 201},
        {"name": "a\nb"},
        {"zzz": 1},
        {"objective": "fame"},
        {"epochs": float("nan")},
        {"epochs": 0},
        {"epochs": 1e9},
        {"cluster": []},
        {"cluster": {"max_nodes": 0}},
        {"cluster": {"max_nodes": 1, "min_nodes": 2}},
        {"cluster": [{"max_nodes": 1, "instance_type": str(n)} for n in range(17)]},
        {"profiling": {"precision": 2}},
        {"dataset": {}},
    ],
)
def test_the_client_says_what_is_wrong_as_the_service_does(wrong):
    good = {"name": "j", "model": {"name": "m"}, "dataset": {"size": 10}, "cluster": {"max_nodes": 4}}
    with pytest.raises(ValidationError) as error:
        JobSpec.model_validate(good | wrong)
    service = FastAPI()
    service.state.services = SimpleNamespace(error_page=lambda *_: None)
    install(service)

    @service.get("/")
    def refuse() -> None:
        raise error.value

    road = InProcess(service)
    with httpx.Client(transport=road, base_url="http://localhost") as client:
        answer = client.get("/").json()
    road.shut_down()
    there = [f"{one['field']}: {one['message']}".removeprefix("body: ") for one in answer["errors"]]
    assert faults(error.value) == there


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"job\.toml cannot be read \(No such file"):
        load_spec(tmp_path / "job.toml")


def test_the_folder_and_its_files_are_the_users_alone(tmp_path: Path) -> None:
    """Logs and states may contain tokens and output. An existing folder loses its wider permissions."""
    (tmp_path / ".tula" / "old").mkdir(parents=True, mode=0o755)
    umask = os.umask(0o022)
    try:
        for root, job in ((tmp_path / "new" / ".tula", "job-1"), (tmp_path / ".tula", "old")):
            work = WorkDir(root, job)
            with work.locked():
                work.save("state", {"a": 1})
                work.env_file("run-1", {})
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (work.path, *work.path.iterdir())}
            assert modes.pop(job) == 0o700
            assert modes.pop("env") == 0o755, "inside of the closed folder"
            assert modes == dict.fromkeys(("lock", "holder.json", "state.json"), 0o600)
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "new" / ".tula").stat().st_mode) == 0o700


def test_a_specification_with_a_byte_order_mark_is_read_and_another_encoding_is_named(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(SPEC, encoding="utf-8-sig")
    assert load_spec(path).name == "j"
    path.write_text(SPEC, encoding="utf-16")
    with pytest.raises(UsageError, match="is not UTF-8 text: save it as UTF-8"):
        load_spec(path)
