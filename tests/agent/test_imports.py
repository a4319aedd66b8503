"""Tests which modules an import of the agent loads, in a new interpreter."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import tula_agent

FORBIDDEN = ("pandas", "sklearn", "fastapi", "sqlalchemy", "tula_service", "lightning", "transformers", "accelerate")


SCRIPT = """
import json, sys
import torch, tula_agent
print(json.dumps(sorted(sys.modules)))
run = tula_agent.init()
list(run.steps([1, 2]))
print(json.dumps(sorted(sys.modules)))
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str]]:
    """Return the modules that a process has loaded after importing the agent, and after using it."""
    spool = tmp_path_factory.mktemp("spool")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=True,
        env={"TULA_URL": "http://127.0.0.1:9", "TULA_RUN_ID": "r", "TULA_SPOOL_DIR": str(spool), "PATH": ""},
    )
    before, after = (set(json.loads(line)) for line in done.stdout.splitlines())
    return before, after


def test_neither_import_nor_use_brings_what_a_training_job_should_not_carry(
    imported: tuple[set[str], set[str]],
) -> None:
    _, loaded = imported
    assert "tula_agent.recorder" in loaded
    assert not {name for name in loaded if name.split(".")[0] in FORBIDDEN}


def test_a_listing_of_the_agent_has_what_scripts_use_and_no_more() -> None:
    assert dir(tula_agent) == sorted(tula_agent.__all__)


def test_importing_alone_brings_no_web_client_and_no_models(imported: tuple[set[str], set[str]]) -> None:
    loaded, _ = imported
    assert not loaded & {"httpx", "pydantic", "tula_wire", "tula_agent.scaling"}
