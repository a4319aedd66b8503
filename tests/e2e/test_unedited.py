"""Scripts that have never heard of Tula, launched and measured without an edit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.support.forked import Server
from tests.e2e.command import BATCH, Tula
from tula_client.launch.environment import startup_folder

PLAIN = str(Path(__file__).parent / "scripts" / "unedited" / "plain_ddp.py")
START = ["--", "torchrun", "--standalone", "--nproc-per-node={world_size}", PLAIN]


def test_a_plain_ddp_script_is_measured_and_ends_when_there_is_enough(server: Server, tmp_path: Path) -> None:
    tula = Tula(server, tmp_path)
    tuned, _ = tula("tune", tula.spec("unedited"), *START, *BATCH)
    (run,) = tula.runs("unedited")
    assert (run.state, tuned["recommendation"]["basis"]) == ("succeeded", "profiled"), tula.logs()
    assert run.num_samples >= 8
    assert "complete" not in tula.logs()  # left before its last epoch
    assert "tula:" not in tula.logs()  # all is seen: DDP and its batches of 8, not those of the evaluation
    assert not tula.processes(PLAIN)


def test_the_hook_runs_the_start_up_file_that_it_hides(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('of the site')")
    hook = startup_folder()
    assert hook is not None
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{hook}{os.pathsep}{tmp_path}", "TULA_RUN_ID": "r"}
    program = "import sys; print(type(sys.meta_path[0]).__name__, 'tula_agent' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["of the site", "_WhenTorchLoads False False"]
    assert done.stderr == ""
