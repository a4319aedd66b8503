"""A rank that hangs dumps its stacks near the time limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HANG = """
import os, sys, time
import tula_agent
def stuck_on_purpose():
    tula_agent.init()
    time.sleep(600)
os.environ["TULA_STACKS_AT"] = str(time.time() + 0.1)
sys.stderr = None  # as some frameworks do
stuck_on_purpose()
"""


def test_a_time_too_far_away_for_a_timer_prints_nothing() -> None:
    program = "import time; from tula_agent.process_exit import dump_stacks_at as d; d(1e300, 0); time.sleep(0.2)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""


def test_a_rank_that_hangs_dumps_its_stack_at_the_given_time(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "TULA_URL": "http://127.0.0.1:9",
        "TULA_RUN_ID": "r",
        "TULA_SPOOL_DIR": str(tmp_path),
        "RANK": "3",
    }
    with subprocess.Popen([sys.executable, "-c", HANG], env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        printed = ""
        for line in process.stderr:
            printed += line
            if "in <module>" in line:  # the last of the main thread, which comes last
                break
        process.kill()
    assert f"tula: stack of rank 3 (process {process.pid} on " in printed
    assert "in stuck_on_purpose" in printed
