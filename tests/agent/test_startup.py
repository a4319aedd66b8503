"""Tests that the start-up hook notes an out-of-memory error after which accelerate lowers the batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MEMORY = """
def should_reduce_batch_size(exception):
    return "out of memory" in str(exception)
"""
SCRIPT = """
import sys, tula_startup
from accelerate.utils.memory import should_reduce_batch_size as lowers
print(lowers(ValueError("wrong shape")), tula_startup.lowered_for)
print(lowers(RuntimeError("CUDA out of memory.")), tula_startup.lowered_for)
print(lowers.__name__, "torch" in sys.modules)
"""


def test_an_out_of_memory_for_which_accelerate_lowers_the_batch_is_noted(tmp_path: Path) -> None:
    folder = tmp_path / "accelerate" / "utils"
    folder.mkdir(parents=True)
    (folder / "memory.py").write_text(MEMORY)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    path = os.pathsep.join([str(tmp_path), *sys.path])
    launched = os.environ | {"PYTHONPATH": path, "TULA_RUN_ID": "run1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=launched, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "False []",
        "True ['RuntimeError: CUDA out of memory.']",
        "should_reduce_batch_size False",
    ]
