"""Scripts that have never heard of Tula, launched and measured without an edit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.support.forked import Server
from tests.e2e.command import BATCH, Tula

PLAIN = str(Path(__file__).parent / "scripts" / "unedited" / "plain_ddp.py")
START = ["--", "torchrun", "--standalone", "--nproc-per-node={world_size}", PLAIN]


def forked_torchrun(server: Server, folder: Path) -> Tula:
    """The command, whose torchrun is forked; it starts the interpreters of ranks, into which the start-up hook gets."""
    return Tula(server, folder, forked=True, PYTHON_EXEC=sys.executable)


def test_one_launch_of_a_plain_script_measures_every_batch_and_ends_when_there_is_enough(
    server: Server, tmp_path: Path
) -> None:
    tula = Tula(server, tmp_path)
    tuned, _ = tula("tune", tula.spec("unedited", least_batch=2), *START, *BATCH)
    runs = tula.runs("unedited")
    assert {(run.state, run.configuration_mismatch) for run in runs} == {("succeeded", None)}, tula.logs()
    assert {run.configuration.local_batch_size for run in runs} == {2, 8}  # what the plan wants
    assert tuned["recommendation"]["basis"] == "profiled"
    assert all(run.num_samples >= 8 for run in runs)
    assert len(list(tmp_path.glob(".tula/*/logs/*.log"))) == 1
    assert "complete" not in tula.logs()  # left before its last epoch
    assert "tula:" not in tula.logs()  # all is seen: DDP and its batches of 8, not those of the evaluation
    assert not tula.processes(PLAIN)


@pytest.mark.parametrize("script", ["accelerate_loop.py", "lightning_trainer.py"])
def test_tune_measures_a_script_of_a_framework(server: Server, tmp_path: Path, script: str) -> None:
    """One rank; `tests/agent/test_unedited_scripts.py` runs them with two."""
    tula, name = forked_torchrun(server, tmp_path), script.removesuffix(".py")
    path = str(Path(PLAIN).with_name(script))
    tuned, _ = tula("tune", tula.spec(name, nodes=1), *START[:-1], path, *BATCH)
    (run,) = tula.runs(name)
    assert (run.state, tuned["recommendation"]["basis"]) == ("succeeded", "profiled"), tula.logs()
    assert run.configuration_mismatch is None
