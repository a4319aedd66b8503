"""Tests on a CPU that the GPU benchmark runs all of its parts and can be resumed."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import memory
from benchmarks.gpu import estimates
from benchmarks.gpu.__main__ import PARTS, lacking
from benchmarks.gpu.networks import Network
from benchmarks.gpu.store import H100
from benchmarks.gpu.switches import predictions
from benchmarks.gpu.tables import measure_network
from benchmarks.support import clean_environment
from tests.support.forked_commands import launchers

ROOT = Path(__file__).parents[1]
SMOKE = ("--device", "cpu", "--smoke")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the results of an earlier run that measured one part."""
    out = tmp_path_factory.mktemp("gpu") / "begun"
    benchmark("--part", "overhead", *SMOKE, "--out", str(out))
    return out


@pytest.fixture(scope="module")
def measured(begun: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the results of all parts, continued from `begun` in another folder."""
    out = tmp_path_factory.mktemp("gpu") / "out"
    benchmark(*SMOKE, "--minutes", "40", "--out", str(out), "--resume", str(begun))
    return out


def benchmark(*arguments: str) -> None:
    """Run the command to its end, with parts that are forked from a process with all imports."""
    python = str(launchers() / "python")
    command = [python, "-m", "benchmarks.gpu", *arguments]
    forked = clean_environment(BENCHMARK_PYTHON=python)
    done = subprocess.run(command, cwd=ROOT, env=forked, capture_output=True, text=True, timeout=560, check=False)
    logs = [path.read_text() for path in Path(arguments[arguments.index("--out") + 1]).glob("log.txt")]
    assert done.returncode == 0, done.stdout + done.stderr + "".join(logs)


def rows(folder: Path, part: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{part}.json").read_text())["rows"]
    return found


def test_a_resumed_run_keeps_what_was_measured_and_measures_all_parts(begun: Path, measured: Path) -> None:
    assert rows(measured, "overhead") == rows(begun, "overhead")
    assert all(rows(measured, part) for part in PARTS)
    assert not [name for part in PARTS for name, row in rows(measured, part).items() if "failed" in row]
    assert "equal weights" in rows(measured, "ranks")["2 ranks"]["verdict"]
    report = (measured / "report.md").read_text()
    assert f"torch: {torch.__version__}" in report
    assert [line[3:] for line in report.splitlines() if line.startswith("## ")] == list(PARTS)


def test_the_packages_that_a_part_lacks_are_named() -> None:
    assert not any(lacking(part) for part in PARTS)
    hidden = (
        "import sys; sys.modules['kneed'] = None\nfrom benchmarks.gpu.__main__ import lacking\nprint(lacking('tune'))"
    )
    python = str(launchers() / "python")
    done = subprocess.run([python, "-c", hidden], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['kneed']"


def test_switches_are_predicted_from_the_base_and_single_launches() -> None:
    def row(precision: str, checkpointing: str, seconds: float) -> dict[str, Any]:
        words = {"precision": precision, "checkpointing": checkpointing, "compile": "off"}
        return {"words": words, "batches": {"8": {"step_time_s": seconds}}}

    measured = {
        "gpt2 base": row("tf32", "off", 4.0),
        "gpt2 half": row("bf16", "off", 2.0),
        "gpt2 checkpointed": row("tf32", "on", 6.0),
        "gpt2 both": row("bf16", "on", 3.5),
        "resnet50 alone": row("tf32", "on", 1.0),
    }
    predicted = predictions(measured)
    assert predicted["gpt2 both"]["8"] == pytest.approx(3.0)
    assert "resnet50 alone" not in predicted  # without its base


def test_peaks_measured_on_an_h100_are_predicted_from_the_three_smallest_batches(tmp_path: Path) -> None:
    table, figures = ROOT / "benchmarks/results/gpu/nvidia-h100-80gb-hbm3/gpu_memory.csv", tmp_path / "memory.json"
    assert memory.main(["--grids", str(table), "--json", str(figures)]) == 0
    found = json.loads(figures.read_text())
    assert found["memory.three.workloads"] >= 12
    assert found["memory.three.largest.median"] < 0.03
    assert found["memory.three.largest.p90"] < 0.095


@pytest.mark.parametrize("name", ["resnet50 tf32", "vit_b+checkpointing bf16"])
def test_peaks_measured_on_an_h100_are_those_that_are_counted_without_a_device(name: str) -> None:
    (row,) = estimates.errors(H100, name).values()
    assert abs(row.peak) < 0.01
    assert abs(row.peak_read) < 0.025
    for ceiling in (row.read, row.launch, row.counted):
        assert abs(ceiling.expected - 1.0) < 0.1
        assert 0.7 < ceiling.promised < ceiling.failed


class LargestIsTwenty(torch.nn.Linear):
    """A layer that runs out of memory, as CUDA does, with more than 20 examples."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) > 20 and type(inputs) is torch.Tensor:  # one without data takes no memory
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().forward(inputs)


def test_the_largest_batch_is_found_by_running_out_of_memory() -> None:
    network = Network(
        lambda: LargestIsTwenty(4, 3), lambda size, _: (torch.ones(size, 4), torch.zeros(size, dtype=torch.int64))
    )
    row = measure_network(network, "fp32", torch.device("cpu"), time.monotonic() + 60, smoke=False)
    assert row["complete"]
    assert row["largest_measured"] == 20
    assert list(row["batches"]) == ["8", "16"]
    assert row["flops_per_sample"] > 0
