"""Scripts that have never heard of Tula, launched and measured without an edit."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.support.forked import Server
from tests.e2e.command import BATCH, Tula

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


def test_one_launch_of_a_plain_script_measures_every_batch(server: Server, tmp_path: Path) -> None:
    tula = Tula(server, tmp_path)
    tula("tune", tula.spec("unedited-column", least_batch=2), *START, *BATCH)
    runs = tula.runs("unedited-column")
    assert {(run.state, run.configuration_mismatch) for run in runs} == {("succeeded", None)}, tula.logs()
    assert {run.configuration.local_batch_size for run in runs} == {2, 8}  # what the plan wants
    assert len(list(tmp_path.glob(".tula/*/logs/*.log"))) == 1


@pytest.mark.parametrize("script", ["accelerate_loop.py", "lightning_trainer.py"])
def test_tune_measures_a_script_of_a_framework(server: Server, tmp_path: Path, script: str) -> None:
    tula, name = Tula(server, tmp_path), script.removesuffix(".py")
    path = str(Path(PLAIN).with_name(script))
    tuned, _ = tula("tune", tula.spec(name), *START[:-1], path, *BATCH)
    (run,) = tula.runs(name)
    assert (run.state, tuned["recommendation"]["basis"]) == ("succeeded", "profiled"), tula.logs()
    assert run.configuration_mismatch is None
