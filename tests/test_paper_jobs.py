"""The jobs of the paper's four networks, and the script that trains them."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from benchmarks.paper_answers import PAPER
from tula_client.launch.spec import load_spec
from tula_service.analysis.answer import Answer, analyse
from tula_service.analysis.job_data import JobData
from tula_service.analysis.priors import guesses_of

EXAMPLES = Path(__file__).parents[1] / "examples"


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
