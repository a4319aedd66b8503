"""The benchmark for GPUs, rehearsed on the CPU: complete, resumable, and packed with its sources alone."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cold_start, memory
from benchmarks.gpu import estimates
from benchmarks.gpu.__main__ import PARTS, archive, main
from benchmarks.gpu.networks import Network
from benchmarks.gpu.store import Results
from benchmarks.gpu.tables import measure_network, write_tables
from benchmarks.support import clean_environment
from tests.support.forked_commands import launchers

ROOT = Path(__file__).parents[1]
TORCH = (
    "torch", "torchgen", "functorch", "numpy", "numpy.libs", "sympy", "mpmath", "networkx", "jinja2", "markupsafe",
    "filelock", "fsspec", "typing_extensions.py", "setuptools",
)  # fmt: skip
"""What a wheel of torch needs: all that is on the path beside the archive."""
SMOKE = ("--device", "cpu", "--smoke")
MACHINE = {"device": "NVIDIA H100 80GB HBM3", "torch": torch.__version__}


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of part 1, from the unpacked archive in a folder with torch alone on the path."""
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
    command = [sys.executable, "-S", "-m", "benchmarks.gpu", "--part", "checks", *SMOKE, "--out", str(folder / "out")]
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
    log = subprocess.run(command, cwd=ROOT, env=forked, capture_output=True, text=True, timeout=280, check=False)
    assert log.returncode == 0, log.stdout + log.stderr + (out / "log.txt").read_text()
    return out


def rows(folder: Path, part: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{part}.json").read_text())["rows"]
    return found


def test_the_archive_checks_a_machine_that_has_torch_alone(checked: Path) -> None:
    """No Pydantic, no httpx, no Tula: the agent still trains, ships and reports."""
    states = {one["name"]: one["state"] for row in rows(checked, "checks").values() for one in row["verdicts"]}
    agent = ("out of memory", "mixed precision", "same weights", "torch.compile")
    assert {name: states[name] for name in agent} == dict.fromkeys(agent, "pass")


def test_a_resumed_run_keeps_what_was_measured_and_adds_the_rest(checked: Path, measured: Path) -> None:
    assert rows(measured, "checks") == rows(checked, "checks")
    assert all(rows(measured, part) for part in PARTS)
    assert not [name for part in PARTS for name, row in rows(measured, part).items() if "failed" in row]
    assert "equal weights" in rows(measured, "ranks")["2 ranks"]["verdict"]


def test_the_results_are_flat_files_with_a_page_that_names_machine_and_figures(measured: Path) -> None:
    assert all(path.is_file() for path in measured.iterdir())
    page = (measured / "report.md").read_text()
    assert f"torch: {torch.__version__}" in page
    assert all(name in page for part in PARTS for name in rows(measured, part) if part not in ("checks",))


def test_other_benchmarks_read_the_tables(measured: Path) -> None:
    """By the name of the device: here it is one that a data sheet is kept of."""
    for name, program, option in (("gpu_steps", cold_start, "--steps"), ("gpu_memory", memory, "--grids")):
        with (measured / f"{name}.csv").open(newline="") as file:
            found = list(csv.DictReader(file))
        table = measured.parent / f"{name}.csv"
        with table.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(found[0]))
            writer.writeheader()
            writer.writerows(row | {"gpu": MACHINE["device"]} for row in found)
        assert program.main([option, str(table), "--smoke"]) == 0


def test_a_network_of_which_one_batch_fits_is_in_the_tables(tmp_path: Path) -> None:
    results = Results(tmp_path, "tables", MACHINE)
    read = {"step_time_s": 0.1, "peak_bytes": 10**9, "estimated_bytes": 10**9}
    results.add("gpt2 bf16", {"parameters": 10**6, "flops_per_sample": 1e9, "batches": {"8": read}})
    write_tables(results, tmp_path)
    for name in ("gpu_steps", "gpu_memory", "gpu_grid"):
        with (tmp_path / f"{name}.csv").open(newline="") as file:
            assert [row["local_batch_size"] for row in csv.DictReader(file)] == ["8"]


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


def test_results_of_another_device_are_not_mixed(tmp_path: Path) -> None:
    Results(tmp_path, "tables", MACHINE).add("resnet50 fp32", {"batches": {}})
    with pytest.raises(ValueError, match="give another folder as --out"):
        Results(tmp_path, "tables", {**MACHINE, "device": "NVIDIA H200"})


def test_a_row_that_ended_its_process_is_not_measured_again_and_one_out_of_time_is(tmp_path: Path) -> None:
    names = ["a", "b"]
    next(Results(tmp_path, "tables", MACHINE).missing(names))
    Results(tmp_path, "tables").end_row(None)
    assert next(Results(tmp_path, "tables", MACHINE).missing(names)) == "a"
    Results(tmp_path, "tables").end_row("the process ended with status -9")
    assert next(Results(tmp_path, "tables", MACHINE).missing(names)) == "b"
    assert rows(tmp_path, "tables")["a"] == {"failed": "the process ended with status -9"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "torch sees no CUDA device: give --device cpu --smoke"),
        (["--device", "cpu"], "add --smoke"),
        ([*SMOKE, "--resume", "/nowhere"], "--resume /nowhere is no folder"),
    ],
)
def test_a_run_that_cannot_measure_is_refused_with_the_remedy(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main([*arguments, "--out", str(tmp_path)])
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_earlier_results_are_never_overwritten(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*SMOKE, "--out", str(measured)])
    assert "add --resume to continue them" in capsys.readouterr().err
