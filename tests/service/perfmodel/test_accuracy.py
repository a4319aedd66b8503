"""Tests that the model does no I/O and is accurate on measured grids that benchmarks replay through the planner."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import memory, step_time
from benchmarks.support.grids import (
    Workload,
    over_workloads,
    read_memory,
    read_step_time,
    workloads_parser,
)
from tula_service import perfmodel

GRIDS = Path(__file__).parents[2] / "data" / "grids"


@pytest.fixture(scope="module")
def workloads() -> list[Workload]:
    return read_step_time(GRIDS / "step_time.csv")


def errors_after(workloads: list[Workload], runs: int) -> tuple[list[float], list[float]]:
    errors, coverage = [], []
    for workload in workloads:
        missed, inside, _ = step_time.held_out(workload, step_time.designed(workload, runs))
        errors.append(float(np.median(missed)))
        coverage.append(float(np.mean(inside)))
    return errors, coverage


def test_four_and_six_planned_runs_reach_the_stated_accuracy(workloads):
    regular = [w for w in workloads if w.grid == "regular"]
    four, coverage_four = errors_after(regular, 4)
    six, coverage_six = errors_after(regular, 6)
    assert np.median(four) <= 0.05
    assert np.median(six) <= 0.04
    assert np.quantile(six, 0.9) <= 0.12
    assert np.mean([*coverage_four, *coverage_six]) >= 0.85


def test_the_physical_form_beats_the_papers_at_the_same_corners(workloads):
    for grid in ("regular", "hard"):
        ours, ring = [], []
        for workload in (w for w in workloads if w.grid == grid):
            corners = step_time.corners(workload)
            ours.append(float(np.median(step_time.held_out(workload, corners)[0])))
            ring.append(float(np.median(step_time.held_out(workload, corners, "ring")[0])))
        assert np.median(ours) < 0.9 * np.median(ring)


@pytest.mark.parametrize("campaign", ["", " (first campaign)"])
def test_waits_of_a_source_join_its_own_campaign_and_a_table_that_joins_nothing_is_refused(tmp_path, capsys, campaign):
    """Repeats of other runs also have waits, but their step times are not in the grids."""
    grids, sync = tmp_path / "grids.csv", tmp_path / "sync.csv"
    grids.write_text(
        "workload,source,gpu,cluster,model,grid,num_nodes,world_size,local_batch_size,step_time_s\n"
        + "".join(f"one,lab,A100,DGX,ResNet-18,regular,{n},{8 * n},32,0.{n}\n" for n in (1, 2, 4)),
        encoding="utf-8",
    )
    row = f"A100,DGX{campaign},ResNet-18,2,16,32,0.04\n"
    sync.write_text("gpu,network,model,num_nodes,num_replicas,local_batch,sync_time_s\n" + row, encoding="utf-8")
    arguments = ["--grids", str(grids), "--sync", str(sync)]
    parser = workloads_parser("any", None)
    if campaign:
        with pytest.raises(SystemExit):
            over_workloads(parser, lambda workload: workload.sync_time_s, arguments)
        assert f"--sync {sync}: no row matches a configuration of" in capsys.readouterr().err
    else:
        _, ((workload, waits),) = over_workloads(parser, lambda workload: workload.sync_time_s, arguments)
        assert waits == {c: 0.04 for c in workload.candidates if c.num_nodes == 2}


def test_memory_of_the_largest_batch_is_predicted_from_the_two_smallest(tmp_path):
    assert memory.main(["--grids", str(GRIDS / "memory.csv"), "--json", str(tmp_path / "out.json")]) == 0
    figures = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert figures["memory.largest.median"] <= 0.05
    assert figures["memory.largest.p90"] <= 0.12
    assert figures["memory.workloads"] == len(read_memory(GRIDS / "memory.csv"))


def test_readings_after_an_out_of_memory_do_not_count():
    gib = 2.0**30
    falling = memory.MemoryWorkload("a", "s", "X-40GB", (8, 16, 32), (5 * gib, 9 * gib, 4 * gib))
    full = memory.MemoryWorkload("b", "s", "X-40GB", (8, 16, 32, 64), (5 * gib, 10 * gib, 20 * gib, 39 * gib))
    assert memory.valid_readings(falling) == 2
    assert memory.valid_readings(full) == 3


def test_the_model_imports_no_clock_no_log_no_wire_and_does_no_io():
    forbidden = {"time", "datetime", "logging", "os", "pathlib", "random", "sqlalchemy", "fastapi"}
    for path in Path(perfmodel.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & forbidden, path
