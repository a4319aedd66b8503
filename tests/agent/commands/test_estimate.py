"""Tests that `tula estimate` measures a user's model and prints the values that its job.toml needs."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tula_agent.commands.estimate import estimate
from tula_wire import ModelSpec

MODULE = """
import torch
from torch import nn

def mlp(batch):
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    return model, torch.randn(batch, 64), torch.optim.AdamW(model.parameters())

def bare(batch):
    return mlp(batch)[:2]

def model_only(batch):
    return mlp(batch)[0]

def mismatched(batch):
    return mlp(batch)[0], torch.randn(batch, 65)
"""
PARAMETERS = 64 * 256 + 256 + 256 * 10 + 10


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Return a function that runs the command in a folder with the user's module."""
    (tmp_path / "their_model.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    app = typer.Typer()
    app.command()(estimate)
    return lambda *words: CliRunner().invoke(app, list(words))


def test_it_counts_a_model_and_prints_what_a_job_needs(call) -> None:  # type: ignore[no-untyped-def]
    done = call("their_model:mlp", "--batch", "8", "--device", "A100")
    assert done.exit_code == 0, done.output
    assert f"parameters: {PARAMETERS:,}" in done.stdout
    assert "largest batch on A100 40 GiB: " in done.stdout
    assert "largest batch on A100 80 GiB: " in done.stdout
    model = ModelSpec.model_validate(tomllib.loads(done.stdout[done.stdout.index("[model]") :])["model"])
    assert (model.name, model.parameters, model.optimizer, model.precision) == ("mlp", PARAMETERS, "adam", "fp32")
    assert model.flops_per_sample == pytest.approx(2 * 3 * (64 * 256 + 256 * 10) - 2 * 64 * 256, rel=1e-3)
    plain = json.loads(call("their_model:mlp", "--batch", "8", "--device", "A100-80GB", "--json").stdout)
    (most,) = plain["largest_local_batch_size"].values()
    per_example = plain["activation_bytes_per_sample"] + plain["batch_bytes_per_sample"]
    assert plain["total_bytes"] == pytest.approx(PARAMETERS * 4 * 4 + 8 * per_example, rel=0.01)
    assert most * per_example < 80 * 2**30 < 1.3 * most * per_example  # a few huge tensors leave gaps that none fits


JOB = """# tuned every week
name = "digits"
[model] # the network
name = "theirs" # jobs of one network learn from each other
# parameters = 25_600_000 # tula estimate prints these
flops_per_sample = 1.0

[dataset]
size = 50_000
[cluster]
max_nodes = 1
[batch]
max_local_batch_size = 64
"""


def test_facts_are_written_into_the_job_and_all_else_stays(call, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    printed = call("their_model:mlp", "--batch", "8").stdout
    expected = tomllib.loads(printed[printed.index("[model]") :])["model"]
    for _ in range(2):  # the second time changes nothing
        done = call("their_model:mlp", "--batch", "8", "--write", str(path))
        assert done.exit_code == 0, done.output
        assert f"written into the [model] table of {path}" in done.stdout
        text = path.read_text()
        found = tomllib.loads(text)
        assert found["model"] == expected | {"name": "theirs"}
        assert found | {"model": None} == tomllib.loads(JOB) | {"model": None}
        assert text.startswith('# tuned every week\nname = "digits"\n[model] # the network\nname = "theirs" # jobs')
        assert text.count("parameters =") == 1
    assert [each.name for each in tmp_path.glob("*job.toml*")] == ["job.toml"]


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ('name = "digits"\nmodel = { name = "inline" }\n' + JOB[JOB.index("[dataset]") :], "no [model] line"),
        (JOB.replace("size =", "sise ="), "sise"),
    ],
)
def test_a_job_that_cannot_be_written_is_left_as_it_was(call, tmp_path: Path, job: str, said: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(job)
    done = call("their_model:mlp", "--batch", "8", "--write", str(path))
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("│", " ").split())
    assert path.read_text() == job


def test_state_of_an_optimizer_counts_where_one_is_returned(call) -> None:  # type: ignore[no-untyped-def]
    done = call("their_model:bare", "--batch", "8")
    assert "no optimizer given" in done.stdout
    assert "largest batch" not in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["their_model:nothing", "--batch", "8"], "MODULE:FACTORY"),
        (["no_such_module:f", "--batch", "8"], "no_such_module"),
        (["their_model:model_only", "--batch", "8"], "model, batch"),
        (["their_model:mismatched", "--batch", "8"], "cannot be called with"),
        (["their_model:mlp", "--batch", "8", "--device", "abacus"], "H100"),
    ],
)
def test_a_model_that_cannot_be_estimated_is_refused_in_one_sentence(call, words: list[str], said: str) -> None:
    done = call(*words)
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("│", " ").split())
    assert "Traceback" not in done.output
