"""Tests that a script that does not use Tula is launched and measured without an edit.

`tests/agent/test_unedited_scripts.py` measures many kinds of scripts and frameworks, with two ranks each.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.support.forked import Server
from tests.e2e.command import BATCH, Tula

PLAIN = str(Path(__file__).parent / "scripts" / "unedited" / "plain_ddp.py")
START = ["--", "torchrun", "--standalone", "--nproc-per-node={world_size}", PLAIN]


def test_one_launch_of_a_plain_script_measures_every_batch_and_ends_when_there_is_enough(
    server: Server, tmp_path: Path
) -> None:
    tula = Tula(server, tmp_path)
    tuned, _ = tula("tune", tula.spec("unedited", nodes=1, least_batch=2), *START, *BATCH)
    runs = tula.runs("unedited")
    assert {(run.state, run.configuration_mismatch) for run in runs} == {("succeeded", None)}, tula.logs()
    assert {run.configuration.local_batch_size for run in runs} == {2, 8}  # the batches of the plan
    assert tuned["recommendation"]["basis"] == "profiled"
    assert all(run.num_samples >= 8 for run in runs)
    assert len(list(tmp_path.glob(".tula/*/logs/*.log"))) == 1
    assert "complete" not in tula.logs()  # the script ended before its last epoch
    assert "tula:" not in tula.logs()  # it found DDP and the batches of 8, and ignored the evaluation
    assert not tula.processes(PLAIN)
