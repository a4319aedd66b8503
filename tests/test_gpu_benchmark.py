"""The benchmark for GPUs, rehearsed on the CPU: complete, resumable, and packed with its sources alone."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import memory
from benchmarks.gpu import estimates
from benchmarks.gpu.__main__ import PARTS, archive
from benchmarks.gpu.networks import Network
from benchmarks.gpu.tables import measure_network
from benchmarks.support import clean_environment
from tests.support.forked_commands import launchers

ROOT = Path(__file__).parents[1]
TORCH = (
    "torch", "torchgen", "functorch", "numpy", "numpy.libs", "sympy", "mpmath", "networkx", "jinja2", "markupsafe",
    "filelock", "fsspec", "typing_extensions.py", "setuptools",
)  # fmt: skip
"""What a wheel of torch needs: all that is on the path beside the archive."""
SMOKE = ("--device", "cpu", "--smoke")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of one part, from the unpacked archive in a folder with torch alone on the path."""
    folder = tmp_path_factory.mktemp("unpacked")
    packed, sources, site = folder / "pack.tar.gz", folder / "sources", folder / "site"
    archive(packed)
    assert packed.stat().st_size < 2_000_000
    with tarfile.open(packed) as file:
        file.extractall(sources)
    site.mkdir()
    found = Path(torch.__file__).parents[1]
    for name in TORCH:
        if (found / name).exists():
            (site / name).symlink_to(found / name)
    command = [sys.executable, "-S", "-m", "benchmarks.gpu", "--part", "scaling", *SMOKE, "--out", str(folder / "out")]
    done = subprocess.run(
        command,
        cwd=sources,
        env=clean_environment(PYTHONPATH=str(site)),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "out"


@pytest.fixture(scope="module")
def measured(checked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of all parts: continued from `checked` in another folder."""
    out = tmp_path_factory.mktemp("gpu") / "out"
    python = str(launchers() / "python")  # forks the parts, which `checked` has started
    command = [python, "-m", "benchmarks.gpu", *SMOKE, "--out", str(out), "--resume", str(checked)]
    forked = clean_environment(BENCHMARK_PYTHON=python)
    log = subprocess.run(command, cwd=ROOT, env=forked, capture_output=True, text=True, timeout=560, check=False)
    assert log.returncode == 0, log.stdout + log.stderr + (out / "log.txt").read_text()
    return out


def rows(folder: Path, part: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{part}.json").read_text())["rows"]
    return found


def test_the_archive_measures_on_a_machine_that_has_torch_alone(checked: Path) -> None:
    """No Pydantic, no httpx, no Tula."""
    assert rows(checked, "scaling")
    assert not [row for row in rows(checked, "scaling").values() if "failed" in row]


def test_a_resumed_run_keeps_what_was_measured_and_measures_all_parts(checked: Path, measured: Path) -> None:
    assert rows(measured, "scaling") == rows(checked, "scaling")
    assert all(rows(measured, part) for part in PARTS)
    assert not [name for part in PARTS for name, row in rows(measured, part).items() if "failed" in row]
    assert "equal weights" in rows(measured, "ranks")["2 ranks"]["verdict"]
    assert f"torch: {torch.__version__}" in (measured / "report.md").read_text()


def test_peaks_measured_on_an_h100_are_predicted_from_the_three_smallest_batches(tmp_path: Path) -> None:
    table, figures = ROOT / "benchmarks/results/gpu/nvidia-h100-80gb-hbm3/gpu_memory.csv", tmp_path / "memory.json"
    assert memory.main(["--grids", str(table), "--json", str(figures)]) == 0
    found = json.loads(figures.read_text())
    assert found["memory.three.workloads"] >= 12
    assert found["memory.three.largest.median"] < 0.03
    assert found["memory.three.largest.p90"] < 0.095


@pytest.mark.parametrize("name", ["resnet50 tf32", "vit_b+checkpointing bf16"])
def test_peaks_measured_on_an_h100_are_those_that_are_counted_without_a_device(name: str) -> None:
    ((peak, largest),) = estimates.errors(estimates.STORED, name).values()
    assert abs(peak) < 0.01
    assert abs(largest) < 0.1


class LargestIsTwenty(torch.nn.Linear):
    """Runs out of memory as CUDA does, with more than 20 examples."""

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
