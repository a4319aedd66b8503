"""Tests that `tula init` writes a job.toml that `tula tune` accepts with the command that `tula init` prints."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tula_client import Client
from tula_client._spec import load_spec
from tula_client.cli.app import run
from tula_client.launch.template import Template
from tula_wire import JobSpec

Out = pytest.CaptureFixture[str]

CSV = """NVIDIA A100-SXM4-40GB, 40960
NVIDIA A100-SXM4-40GB, 40960
NVIDIA A100-SXM4-40GB, 40960
NVIDIA A100-SXM4-40GB, 40960
"""


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create an empty working folder and hide all device drivers."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def four_devices(machine: Path) -> None:
    driver = machine / "bin" / "nvidia-smi"
    driver.write_text(f"#!/bin/sh\necho '{CSV}'\n")
    driver.chmod(0o755)


def written(capfd: Out, *command: str) -> tuple[JobSpec, list[str]]:
    """Return the job that `tula init` writes and the command that it prints, after checking that they match."""
    assert run(["init", "--", *command]) == 0
    words = shlex.split(capfd.readouterr().out.splitlines()[-1])
    assert words[:4] == ["tula", "tune", "job.toml", "--"]
    spec = load_spec(Path("job.toml"))
    Template(tuple(words[4:])).check(spec)
    assert shlex.split(Path("job.toml").read_text().splitlines()[0].removeprefix("# ")) == words
    return spec, words[4:]


def test_a_command_and_the_devices_become_a_job(capfd: Out, machine: Path, address: str) -> None:
    four_devices(machine)
    command = "torchrun --standalone --nproc-per-node=2 src/train_net.py --epochs 90 --batch-size 64 --lr 0.1"
    spec, words = written(capfd, *command.split())
    assert " ".join(words) == (
        "torchrun --standalone --nproc-per-node={ranks_per_node} src/train_net.py --epochs 90 "
        "--batch-size {local_batch_size} --lr 0.1"
    )
    assert (spec.name, spec.model.name, spec.epochs) == ("train_net", "train_net", 90)
    (cluster,) = spec.cluster
    assert (cluster.max_nodes, cluster.ranks_per_node) == (1, 4)
    assert (cluster.accelerator, cluster.memory_bytes_per_rank) == ("NVIDIA A100-SXM4-40GB", 40 * 2**30)
    assert (spec.batch.min_local_batch_size, spec.batch.max_local_batch_size) == (16, 256)
    with Client(address, token="") as client:
        assert client.register(spec).recommendation.candidates


@pytest.mark.parametrize(
    ("command", "batch", "ranks", "placeholder"),
    [
        ("python train.py -b 32", (8, 128), 1, "-b {local_batch_size}"),
        ("python -m pkg.train data.batch_size=12", (3, 48), 1, "data.batch_size={local_batch_size}"),
        ("accelerate launch --num_processes 2 t.py --per_device_train_batch_size=2", (1, 8), 2, "{local_batch_size}"),
        ("torchrun --nproc_per_node 2 t.py --global-batch-size 64", (8, 128), 2, "{global_batch_size}"),
        ("torchrun --nproc-per-node auto t.py --eval-batch-size 7 --bs 8", (2, 32), 1, "7 --bs {local_batch_size}"),
        ("sh -c 'python train.py {local_batch_size}'", (16, 256), 1, "{local_batch_size}"),
    ],
)
def test_the_batch_is_found_by_the_names_that_scripts_use(
    capfd: Out, command: str, batch: tuple[int, int], ranks: int, placeholder: str
) -> None:
    spec, words = written(capfd, *shlex.split(command))
    assert (spec.batch.min_local_batch_size, spec.batch.max_local_batch_size) == batch
    assert spec.cluster[0].ranks_per_node == ranks
    assert placeholder in " ".join(words)


def test_devices_that_are_hidden_do_not_count(capfd: Out, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    four_devices(machine)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert written(capfd, "train.py", "--batch-size", "8")[0].cluster[0].ranks_per_node == 2


def test_an_existing_file_is_kept(capfd: Out) -> None:
    Path("job.toml").write_text("mine")
    assert run(["init", "--", "train.py", "--batch-size", "8"]) == 2
    assert "job.toml already exists" in capfd.readouterr().err
    assert Path("job.toml").read_text() == "mine"
    assert run(["init", "--json", "--output", "other.toml", "--", "train.py", "--batch-size", "8"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert answer == {"written": "other.toml", "command": ["train.py", "--batch-size", "{local_batch_size}"]}


def test_a_command_without_a_batch_is_refused_before_anything_is_written(capfd: Out) -> None:
    assert run(["init", "--", "torchrun", "train.py", "--batch-size"]) == 2
    assert "write {local_batch_size}" in capfd.readouterr().err
    assert not Path("job.toml").exists()


@pytest.mark.parametrize("option", ["--batchSize", "--micro-batch", "-b", "--per-gpu-batch-size"])
def test_a_batch_of_any_usual_spelling_is_found_and_may_be_that_of_all_ranks(capfd: Out, option: str) -> None:
    written(capfd, "torchrun", "--nproc-per-node=4", "train.py", option, "8")
    text = Path("job.toml").read_text()
    assert "the total over all ranks, write {global_batch_size} in the command" in text
    assert "# max_nodes = 4\n# ranks_per_node = 1\n" in text
