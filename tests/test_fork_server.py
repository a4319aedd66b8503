"""What tests fork ends as a program that Python started would, and never outlives the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.support.fork_server import ForkServer

ROOT = Path(__file__).parents[1]
KILLED = """
import sys, time
from benchmarks.support.fork_server import ForkServer
print(ForkServer([]).start([sys.argv[1]], {}, sys.argv[2]).pid, flush=True)
time.sleep(60)
"""


def test_a_script_and_a_module_end_with_their_status_and_output(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print(sys.argv[1:], os.environ['WORD']); sys.exit(3)")
    forks = ForkServer([])
    try:
        ended = [
            forks.start(argv, {"WORD": "said"}, tmp_path / name)
            for name, argv in (("script", [str(script), "a"]), ("module", ["-m", "json.tool", "--help"]))
        ]
        assert [process.wait(30) for process in ended] == [3, 0]
    finally:
        forks.close()
    assert (tmp_path / "script").read_text() == "['a'] said\n"
    assert "usage" in (tmp_path / "module").read_text()


def test_a_child_ends_when_the_tests_are_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import signal, time; signal.signal(signal.SIGTERM, lambda *_: None); time.sleep(60)")
    words = [sys.executable, "-c", KILLED, str(script), str(tmp_path / "out")]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        child = Path("/proc") / tests.stdout.readline().strip()
        assert child.exists()
        os.kill(tests.pid, signal.SIGKILL)
    ends = time.monotonic() + 30
    while child.exists() and time.monotonic() < ends:
        time.sleep(0.05)
    assert not child.exists()
