"""Everything that only a GPU can show, in order of value, each part in a process with its own time limit.

    python -m benchmarks.gpu [--minutes 9] [--out DIR] [--resume [DIR]]
    python -m benchmarks.gpu --device cpu --smoke      rehearses it without a GPU; its figures are worth nothing
    python -m benchmarks.gpu --archive FILE.tar.gz     packs the sources that this needs, for another machine

Needs torch, and torchvision for all networks; `tune` needs the service, nothing needs a network. `tables` is step time
and memory of networks up to out-of-memory, `tune` what a user does, `ranks` several ranks, `scaling` the cost of
gradient scaling; `make test-gpu` tests what the agent relies on. DIR has a JSON file a part, written row by row,
`report.md`, three tables and a log. `--resume` measures what an earlier run left out; from another DIR, its results are
copied first.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.report import write_report
from benchmarks.gpu.standalone import ROOT
from benchmarks.gpu.store import Results, machine_of
from benchmarks.gpu.tables import write_tables
from benchmarks.support import PYTHON

PARTS = {"tables": 0.6, "tune": 0.2, "ranks": 0.05, "scaling": 0.15}
"""In order of value, with each one's share of the time; what one leaves is the others'."""
GRACE_S, MAX_CRASHES = 10.0, 3
SOURCES = (
    "LICENSE",
    "agent/tula_agent",
    "client/tula_wire",
    "benchmarks/__init__.py",
    "benchmarks/gpu",
    *(f"benchmarks/support/{name}.py" for name in ("__init__", "cluster", "gloo", "resnet", "server")),
)


def run_part(part: str, options: argparse.Namespace, seconds: float) -> str:
    """Measure `part` in another process, again after a crash, for `seconds` at most; answers what became of it."""
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
                return "ended by its time limit"
        if code == 0:
            return "measured" if time.monotonic() < ends else "the time was over: --resume measures the rest"
        Results(options.out, part).end_row(f"the process ended with status {code}; see log.txt")
    return f"gave up after {MAX_CRASHES} crashes: see log.txt"


def measure(options: argparse.Namespace) -> int:
    """All parts; the number that did not run to their end."""
    options.out.mkdir(parents=True, exist_ok=True)
    failed, ends = 0, time.monotonic() + 60.0 * options.minutes
    left = sum(PARTS.values())
    for part, share in PARTS.items():
        print(f"{part}: ", end="", flush=True)
        outcome = run_part(part, options, (ends - time.monotonic()) * share / left)
        left -= share
        failed += outcome != "measured"
        write_tables(Results(options.out, "tables"), options.out)
        write_report(options.out, PARTS)
        print(outcome, flush=True)
    print((options.out / "report.md").read_text(encoding="utf-8"))
    return failed


def archive(path: Path) -> None:
    """Write the sources to `path` (tar.gz)."""

    def sources_only(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if "__pycache__" in member.name or member.name.endswith(".pyc") else member

    with tarfile.open(path, "w:gz") as packed:
        for name in SOURCES:
            packed.add(ROOT / name, name, filter=sources_only)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; ends the process with a sentence where they cannot be followed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="time for all parts (9)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu" / "new")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--smoke", action="store_true", help="small networks, few steps")
    parser.add_argument("--resume", nargs="?", type=Path, const=Path(), metavar="DIR", help="continue (from DIR)")
    parser.add_argument("--archive", type=Path, metavar="FILE", help="only pack the sources (tar.gz)")
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=60.0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.out = options.out.absolute()
    if options.archive is None and options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device: give --device cpu --smoke to rehearse without one.")
    if options.device == "cpu" and not options.smoke and options.archive is None:
        parser.error("--device cpu would exhaust this machine's memory: add --smoke.")
    if options.part or options.archive is not None:
        return options
    if options.resume is None and any((options.out / f"{part}.json").exists() for part in PARTS):
        parser.error(f"{options.out} has results: add --resume to continue them, or give another --out.")
    if options.resume is not None and options.resume != Path():
        if not options.resume.is_dir():
            parser.error(f"--resume {options.resume} is no folder: give the --out of the earlier run.")
        shutil.copytree(options.resume, options.out, dirs_exist_ok=True)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; answers the exit status."""
    options = parse(arguments)
    if options.archive is not None:
        archive(options.archive)
        return 0
    if options.part:
        device = torch.device(options.device)
        options.out.mkdir(parents=True, exist_ok=True)
        results = Results(options.out, options.part, machine_of(device))
        importlib.import_module(f"benchmarks.gpu.{options.part}").run(results, device, options.seconds, options.smoke)
        return 0
    return 1 if measure(options) else 0


if __name__ == "__main__":
    sys.exit(main())
