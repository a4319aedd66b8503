"""Tests that every example trains without a service, and that the first one also trains without Tula's lines."""

from __future__ import annotations

import importlib.util
import os
import runpy
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.forked_commands import launchers

EXAMPLES = Path(__file__).parents[2] / "examples"


def train(folder: Path, script: Path, *arguments: str, block: str = "", **variables: str) -> str:
    """Run a script as the only rank, with these variables and with the module `block` hidden; return its output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TULA_")}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    program = folder / "program.py"
    program.write_text(
        f"import runpy, sys; sys.modules.update(dict.fromkeys({[block] if block else []}))\n"
        f"sys.path.insert(0, {str(EXAMPLES)!r}); sys.argv[0] = {str(script)!r}\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [str(launchers() / "python"), str(program), *arguments],
        capture_output=True,
        text=True,
        env=kept | ranks | {"OMP_NUM_THREADS": "1"} | variables,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_its_marked_lines_the_example_is_an_ordinary_script_that_learns_as_well(tmp_path: Path) -> None:
    example = EXAMPLES / "digits_ddp.py"
    plain = tmp_path / "plain.py"
    lines = example.read_text().splitlines(keepends=True)
    plain.write_text("".join(line for line in lines if not line.rstrip().endswith("# tula")))
    arguments = ["--batch-size", "32", "--epochs", "2"]
    without = train(tmp_path, plain, *arguments, block="tula_agent")
    # With the policy `none`, Tula's lines change no weight, so the printed digits must be exactly the same.
    with_tula = train(tmp_path, example, *arguments, "--policy", "none")
    assert without == with_tula
    assert float(without.split()[-1]) > 0.5


def test_the_example_continues_from_its_checkpoint_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    example, arguments = EXAMPLES / "digits_ddp.py", ["--batch-size", "64", "--epochs"]
    whole = train(tmp_path, example, *arguments, "2").splitlines()
    saved = {"TULA_CHECKPOINT_DIR": str(tmp_path / "checkpoints")}
    first = train(tmp_path, example, *arguments, "1", **saved)
    second = train(tmp_path, example, *arguments, "2", **saved)
    assert [first.strip(), second.strip()] == whole


@pytest.mark.parametrize("name", ["accumulation.py", "amp.py"])
def test_an_example_trains_without_a_service(tmp_path: Path, name: str) -> None:
    assert "epoch 2: loss" in train(tmp_path, EXAMPLES / name, "--batch-size", "64")


def test_without_torchvision_the_script_of_the_paper_says_in_one_sentence_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(SystemExit, match=r"pip install 'tula\[examples\]'.*\.$"):
        runpy.run_path(str(EXAMPLES / "cnn_ddp.py"), run_name="__main__")


@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="torchvision (the extra `examples`) is not installed"
)
@pytest.mark.parametrize("path", sorted((EXAMPLES / "paper").glob("*.toml")), ids=lambda path: path.stem)
def test_the_facts_in_a_job_of_the_paper_are_those_that_the_script_counts(path: Path, tmp_path: Path) -> None:
    job = tomllib.loads(path.read_text(encoding="utf-8"))["model"]
    facts = tomllib.loads(train(tmp_path, EXAMPLES / "cnn_ddp.py", "--model", path.stem, "--facts"))
    assert facts == {key: job[key] for key in facts}
