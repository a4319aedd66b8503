"""The folder of a job is held by one tula at a time; a specification that is wrong is refused by its field."""

from __future__ import annotations

import pytest

from tula_client.launch import SpecError, WorkDir, WorkDirBusyError, idempotency_key, load_spec

SPEC = """
name = "j"
model = { name = "m" }
dataset = { size = 10 }
cluster = { max_nodes = 4 }
"""


def test_a_second_tula_is_refused_and_a_later_one_has_the_same_name(tmp_path):
    with (
        WorkDir(tmp_path, "job-1").held() as first,
        pytest.raises(WorkDirBusyError, match="another tula is at work"),
        WorkDir(tmp_path, "job-1").held(),
    ):
        pass
    with WorkDir(tmp_path, "job-1").held() as later:
        assert later == first


def test_saved_state_is_read_back_and_rubbish_is_nothing(tmp_path):
    work = WorkDir(tmp_path, "job-1")
    work.save("training", {"restart": 2})
    assert work.load("training") == {"restart": 2}
    (work.path / "training.json").write_text("{torn")
    assert work.load("training") is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("max_nodes = 4", "max_nodes = 0"), r"cluster\.max_nodes: input should be greater than or equal to 1"),
        (("max_nodes = 4", "max_nodes = 4, min_nodes = 9"), "swap them"),
        (("size = 10", "size = nan"), r"dataset\.size"),
        (('name = "j"', 'name = "j"\nobjective = "fame"'), "objective: input should be 'time'"),
        (('name = "j"', 'name = "j"\nepochs = inf'), "epochs"),
        (('name = "j"', 'name = "j"\nepoch = 1'), "epoch: extra inputs are not permitted"),
        (('name = "j"', 'name = "j'), "is not valid TOML"),
    ],
)
def test_what_is_wrong_in_a_spec_is_named(tmp_path, change, said):
    path = tmp_path / "job.toml"
    path.write_text(SPEC.replace(*change))
    with pytest.raises(SpecError, match=said) as error:
        load_spec(path)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(SpecError, match=r"job\.toml cannot be read \(No such file"):
        load_spec(tmp_path / "job.toml")


def test_only_the_same_specification_has_the_same_key(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(SPEC)
    first = load_spec(path)
    assert idempotency_key(load_spec(path)) == idempotency_key(first)
    path.write_text(SPEC.replace("10", "11"))
    assert idempotency_key(load_spec(path)) != idempotency_key(first)
