"""Tests that the demonstration runs until it draws its curve, and that Ctrl-C leaves no process and no file behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.support.forked import spawns
from tests.e2e.command import obey_ctrl_c
from tests.support.forked_commands import launchers

ROOT = Path(__file__).parents[2]
FORKING = """#!/bin/sh
case "$*" in
    "-I "*) exec {python} "$@" ;;
    *" serve "*) exec {service} "$@" ;;
    *) exec {other} "$@" ;;
esac
"""
"""An interpreter that is forked from one that has imported the service or torch, unless it needs nothing of these."""
DEMO = """
import sys
sys.executable = {python!r}
from examples import demo
demo.SPEC = demo.SPEC.replace("measuring_steps = 60", "measuring_steps = 12\\nprecision = 0.0")
sys.exit(demo.main())
"""


def commands_holding(text: str) -> list[str]:
    """Return the command line of each process that contains `text`."""
    ps = ["ps", "-ww", "-eo", "args"]  # without -ww, a narrow terminal's COLUMNS would cut the lines
    lines = subprocess.run(ps, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if text in line]


def test_an_interrupted_demonstration_cleans_up(tmp_path: Path) -> None:
    output = tmp_path / "curve"
    demo = subprocess.Popen(
        [sys.executable, "-m", "examples.demo", "--output", str(output)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        preexec_fn=obey_ctrl_c,
    )
    try:
        assert demo.stdout is not None
        printed = ""
        for line in demo.stdout:
            printed += line
            if line.startswith("start "):
                break
        folder = re.search(r"its database is (\S+)/tula\.db", printed)
        assert folder is not None, printed
        assert commands_holding(folder[1])
        os.killpg(demo.pid, signal.SIGINT)  # as a terminal does on Ctrl-C
        rest, _ = demo.communicate(timeout=120)
    finally:
        if demo.poll() is None:
            os.killpg(demo.pid, signal.SIGKILL)
            demo.communicate()
    assert demo.returncode == 130, printed + rest
    assert "every process" in rest
    assert not commands_holding(folder[1])
    assert not Path(folder[1]).exists()
    assert not output.exists()


@pytest.mark.timeout(600)
def test_the_whole_demonstration_trains_what_it_recommends_and_draws_the_curve(tmp_path: Path) -> None:
    # This is `make demo` with one rank at each batch and with fewer steps and epochs; test_one_line.py trains with two
    # ranks. All its processes are forked, unlike those of the interrupted demonstration above.
    python = tmp_path / "python"
    python.write_text(FORKING.format(python=sys.executable, service=spawns(), other=launchers() / "python"))
    python.chmod(0o755)
    forked = os.environ | {
        "PATH": os.pathsep.join((str(launchers()), os.environ["PATH"])),
        "PYTHON_EXEC": str(launchers() / "python"),  # torchrun starts the ranks with it
    }
    command = [python, "-c", DEMO.format(python=str(python)), "--max-nodes=1", "--epochs=2", f"--output={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=forked, timeout=590, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    predicted_and_measured = re.findall(r"^\d nodes?, global batch .* (?:yes|no) *$", done.stdout, re.MULTILINE)
    assert len(predicted_and_measured) == 2
    assert re.search(r"^epoch 2: global batch \d+, test accuracy 0\.\d+$", done.stdout, re.MULTILINE)
    assert "Measured over the training" in done.stdout
    assert (tmp_path / "tradeoff.png").read_bytes().startswith(b"\x89PNG")
