"""Tests several concurrent runs of a plan, each of which is a process on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.support.forked import Server
from tests.e2e.command import STAND_IN, Tula

RUN = ["--", "sh", "-c", f"sleep 1; exec {sys.executable} {STAND_IN} {{world_size}} {{local_batch_size}}"]


def test_two_runs_share_the_nodes_and_never_exceed_them(server: Server, tmp_path: Path) -> None:
    tula = Tula(server, tmp_path)
    spec = tula.spec("side-by-side", least_nodes=1, nodes=2, least_batch=8, batch=16)
    tuned, _ = tula("tune", spec, "--max-parallel=2", "--nodes=2", *RUN)
    runs = tula.runs("side-by-side")
    assert {(run.configuration.num_nodes, run.configuration.local_batch_size) for run in runs} == {
        (nodes, batch) for nodes in (1, 2) for batch in (8, 16)
    }
    assert {run.state for run in runs} == {"succeeded"}
    assert tuned["job"]["state"] == "ready"
    assert tuned["recommendation"]["basis"] == "profiled"

    small, other = (run for run in runs if run.configuration.num_nodes == 1)
    assert small.started_at
    assert small.finished_at
    assert other.started_at
    assert other.finished_at
    assert max(small.started_at, other.started_at) < min(small.finished_at, other.finished_at)
    for moment in (run.started_at for run in runs):
        assert moment is not None
        busy = [
            run for run in runs if run.started_at and run.finished_at and run.started_at <= moment < run.finished_at
        ]
        assert sum(run.configuration.num_nodes for run in busy) <= 2
    assert not tula.processes(STAND_IN)
