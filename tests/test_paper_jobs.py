"""The jobs of the paper's four networks, and the script that trains them."""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks.paper_answers import PAPER
from tula_client.launch.spec import load_spec
from tula_service.analysis.answer import Answer, analyse
from tula_service.analysis.job_data import JobData
from tula_service.analysis.priors import guesses_of

EXAMPLES = Path(__file__).parents[1] / "examples"
PROGRAM = """
import runpy, sys, torch
try:
    import torchvision
except RuntimeError:  # built for a torch with CUDA: its operators are missing beside one without; no network uses them
    for name in [name for name in sys.modules if name.startswith("torchvision")]:
        del sys.modules[name]
    operators = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
needs_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="torchvision (the extra `examples`) is not installed"
)


@pytest.mark.parametrize("path", sorted((EXAMPLES / "paper").glob("*.toml")), ids=lambda path: path.stem)
def test_a_job_is_on_the_papers_testbed_and_leaves_nothing_to_guess(path: Path) -> None:
    spec = load_spec(path)
    found = analyse(JobData(spec, spec.objective, data_version=0))
    assert isinstance(found, Answer)
    candidates = [each.configuration for each in found.estimates]
    assert {c.num_nodes for c in candidates} == {2, 4, 8, 16}
    assert min(c.local_batch_size for c in candidates) == 32
    assert {c.ranks_per_node for c in candidates} == {1}
    assert spec.cluster[0].price.usd_per_node_hour == 2.48
    assert guesses_of(spec) == []


def test_every_network_of_the_paper_has_its_job() -> None:
    assert {path.stem for path in (EXAMPLES / "paper").glob("*.toml")} == set(PAPER)


def test_without_torchvision_the_script_says_in_one_sentence_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / "cnn_ddp.py"), run_name="__main__")
    said = str(ended.value.code)
    assert "pip install 'tula[examples]'" in said
    assert said.count(". ") == 0
    assert said.endswith(".")


def run_script(*arguments: str) -> str:
    """The output of examples/cnn_ddp.py as the only rank and without a service."""
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TULA_")}
    command = [sys.executable, "-c", PROGRAM, str(EXAMPLES / "cnn_ddp.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=kept | ranks, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_torchvision
@pytest.mark.parametrize("name", sorted(PAPER))
def test_the_facts_in_a_job_are_those_that_the_script_counts_on_the_network(name: str) -> None:
    job = tomllib.loads((EXAMPLES / "paper" / f"{name}.toml").read_text(encoding="utf-8"))["model"]
    facts = tomllib.loads(run_script("--model", name, "--facts"))
    assert facts == {key: job[key] for key in facts}
    assert set(facts) == {"name", "parameters", "flops_per_sample", "activation_bytes_per_sample", "precision"}


@needs_torchvision
def test_the_script_trains_one_of_the_networks() -> None:
    said = run_script("--model", "mobilenet_v3_large", "--batch-size", "2", "--size", "4")
    assert "epoch 1: global batch 2, loss" in said
