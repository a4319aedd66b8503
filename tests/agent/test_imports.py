"""What importing the agent brings along, seen in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import tula_agent

FORBIDDEN = ("pandas", "sklearn", "fastapi", "sqlalchemy", "tula_service", "lightning", "transformers", "accelerate")


def modules(code: str, spool: Path) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; import sys, json; print(json.dumps(sorted(sys.modules)))"],
        capture_output=True,
        text=True,
        check=True,
        env={"TULA_URL": "http://127.0.0.1:9", "TULA_RUN_ID": "r", "TULA_SPOOL_DIR": str(spool), "PATH": ""},
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_neither_import_nor_use_brings_what_a_training_job_should_not_carry(tmp_path: Path) -> None:
    loaded = modules("import tula_agent; run = tula_agent.init(); list(run.steps([1, 2]))", tmp_path)
    assert "tula_agent.recorder" in loaded
    assert not {name for name in loaded if name.split(".")[0] in FORBIDDEN}


def test_a_listing_of_the_agent_has_what_scripts_use_and_no_more() -> None:
    assert dir(tula_agent) == sorted(tula_agent.__all__)


def test_importing_alone_brings_no_web_client_and_no_models(tmp_path: Path) -> None:
    loaded = modules("import torch, tula_agent", tmp_path)
    assert not loaded & {"httpx", "pydantic", "tula_wire", "tula_agent.scaling"}
