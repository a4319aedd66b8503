"""Runs all measurements that need a GPU. Each part is a process with a time limit; the most valuable parts run first.

    python -m benchmarks.gpu [--minutes 9] [--out DIR] [--resume [DIR]]
    python -m benchmarks.gpu --device cpu --smoke      rehearses all parts without a GPU; the figures are meaningless
    python -m benchmarks.gpu --packages 3.12           packs the packages for a machine with Python 3.12 and no index

The command needs this checkout, torch, and (for all networks) torchvision. It first lists the other packages that are
missing, and skips the parts that need them. `make test-gpu` tests the GPU features on which the agent depends. The
command writes to DIR a JSON file for each part (row by row), `report.md`, three tables and a log. `--resume` makes the
measurements that are missing from an earlier run; if that run used another DIR, its results are copied first.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu import PACKAGES, ROOT, memory
from benchmarks.gpu.report import write_report
from benchmarks.gpu.store import Results, machine_of
from benchmarks.gpu.tables import write_tables
from benchmarks.support import PYTHON

PARTS = {
    "tune": 0.25, "memory": 0.15, "first_guess": 0.08, "tables": 0.12, "switches": 0.14, "overhead": 0.06,
    "scaling": 0.08, "accuracy": 0.1, "ranks": 0.04,
}  # fmt: skip
"""The parts, the most valuable first, and each part's share of the time; unused time is available to later parts."""
AGENT = ("numpy", "pydantic", "httpx", "pynvml")
SERVICE = (
    "platformdirs", "rich", "typer", "fastapi", "fastapi_offline", "pydantic_settings", "uvicorn", "httptools",
    "uvloop", "sqlalchemy", "alembic", "jinja2", "scipy", "sklearn", "kneed", "tsdownsample", "cachetools", "zstandard",
    "prometheus_client", "psutil",
)  # fmt: skip
NEEDS = {"tune": (*AGENT, *SERVICE), "accuracy": (*AGENT, "sklearn", "PIL", "pytorch_optimizer")}
"""Modules that a part needs in addition to torch; a part that is not listed needs the agent's modules."""
DISTRIBUTIONS = {"pynvml": "nvidia-ml-py", "sklearn": "scikit-learn", "PIL": "pillow"}
"""The names of distributions that differ from the names of their modules."""
WITHOUT_DEPENDENCIES = {"pytorch_optimizer"}
"""Modules that are packed without their dependencies, since they need only torch."""
WITH_TORCH = ("numpy", "PIL", "pillow")
"""Packages that are present on every machine with torch and torchvision."""
GRACE_S, MAX_CRASHES = 10.0, 3


def lacking(part: str) -> list[str]:
    """Return the modules that `part` needs but that this machine lacks."""
    return [name for name in NEEDS.get(part, AGENT) if importlib.util.find_spec(name) is None]


def download_packages(python: str) -> int:
    """Pack all packages that the parts need on Linux with this Python version into a file; return pip's exit status.

    The file is named PACKAGES plus `.tar.xz`. It must be small enough to transfer, so it does not contain torch,
    torch's dependencies, or tests.
    """
    modules = {name for needs in NEEDS.values() for name in needs} - WITHOUT_DEPENDENCIES
    names = sorted(DISTRIBUTIONS.get(name, name) for name in modules)
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", folder]
        pip += ["--python-version", python, "--platform", "manylinux_2_28_x86_64", "--platform", "manylinux2014_x86_64"]
        pip += ["--only-binary=:all:", "--constraint", str(ROOT / "constraints.txt")]
        for arguments in (names, ["--no-deps", *WITHOUT_DEPENDENCIES]):
            if status := subprocess.call([*pip, *arguments]):
                return status

        def carried(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
            parts = Path(member.name).parts
            left_out = parts[1:2] and parts[1].partition(".")[0].partition("-")[0] in WITH_TORCH
            return None if left_out or {"tests", "__pycache__"} & set(parts) else member

        PACKAGES.parent.mkdir(exist_ok=True)
        with tarfile.open(f"{PACKAGES}.tar.xz", "w:xz", preset=3) as packed:
            packed.add(folder, PACKAGES.name, filter=carried)
    return 0


def run_part(part: str, options: argparse.Namespace, seconds: float) -> str:
    """Measure `part` in another process for at most `seconds`, restart it after a crash, and return the outcome."""
    ends = time.monotonic() + seconds
    for _ in range(MAX_CRASHES):
        left = ends - time.monotonic()
        command = [PYTHON, "-m", "benchmarks.gpu", "--part", part, "--out", str(options.out)]
        command += ["--device", options.device, "--seconds", str(left), *(["--smoke"] if options.smoke else [])]
        with (options.out / "log.txt").open("ab") as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
            try:
                code = process.wait(left + GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                Results(options.out, part).end_row(None)
                return "stopped at its time limit"
        if code == 0:
            return "measured" if time.monotonic() < ends else "ran out of time: --resume measures the missing rows"
        Results(options.out, part).end_row(f"the process ended with status {code}; see log.txt")
    return f"gave up after {MAX_CRASHES} crashes: see log.txt"


def measure(options: argparse.Namespace) -> int:
    """Measure all parts; return the number of parts that did not finish."""
    options.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60.0 * options.minutes
    lack = {part: missing for part in options.parts if (missing := lacking(part))}
    for part, missing in lack.items():
        print(f"{part} is skipped because {', '.join(missing)} is missing on this machine (see --packages)", flush=True)
    parts = {part: PARTS[part] for part in options.parts if part not in lack}
    failed, left = len(lack), sum(parts.values())
    for part, share in parts.items():
        print(f"{part}: ", end="", flush=True)
        outcome = run_part(part, options, (ends - time.monotonic()) * share / left)
        left -= share
        failed += outcome != "measured"
        write_tables(Results(options.out, "tables"), options.out)
        write_report(options.out, PARTS)
        print(outcome, flush=True)
    print((options.out / "report.md").read_text(encoding="utf-8"))
    return failed


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options; end the process with a message if they are invalid."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="minutes for all parts together (9)")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=tuple(PARTS), help="parts to measure (all)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu" / "new")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--smoke", action="store_true", help="use small networks and few steps")
    parser.add_argument("--resume", nargs="?", type=Path, const=Path(), metavar="DIR", help="continue the run in DIR")
    parser.add_argument("--packages", metavar="PYTHON", help="only pack the packages for this Python version")
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=60.0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.out = options.out.absolute()
    if options.packages is None and options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device: use --device cpu --smoke to rehearse without one.")
    if options.device == "cpu" and not options.smoke and options.packages is None:
        parser.error("--device cpu would exhaust this machine's memory without --smoke: add --smoke.")
    if options.part or options.packages is not None:
        return options
    if options.resume is None and any((options.out / f"{part}.json").exists() for part in PARTS):
        parser.error(f"{options.out} already contains results: add --resume to continue them, or use another --out.")
    if options.resume is not None and options.resume != Path():
        if not options.resume.is_dir():
            parser.error(f"--resume {options.resume} is not a folder: use the --out of the earlier run.")
        shutil.copytree(options.resume, options.out, dirs_exist_ok=True)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    options = parse(arguments)
    if options.packages is not None:
        return download_packages(options.packages)
    if options.part:
        device = torch.device(options.device)
        options.out.mkdir(parents=True, exist_ok=True)
        # A CUDA context in this process would take memory from the processes that these parts start.
        alone = options.part in ("memory", "tune")
        machine = memory.in_fresh_process(machine_of, device) if alone else machine_of(device)
        results = Results(options.out, options.part, machine)
        importlib.import_module(f"benchmarks.gpu.{options.part}").run(results, device, options.seconds, options.smoke)
        return 0
    return 1 if measure(options) else 0


if __name__ == "__main__":
    sys.exit(main())
