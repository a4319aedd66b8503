"""Runs each script in a folder against a real service, with the command in its first line, and prints the outcomes.

    python -m experiments.cases FOLDER [--only 21 48] [--limit 600] [--logs FOLDER]

The first line of a script, or the second line of a shell script, must be `# run: COMMAND     (what it shows)`; scripts
without such a line are skipped. COMMAND runs in FOLDER, with TULA_URL set to a service that runs until this program
ends. Words in square brackets are optional, and are left out. For each script, the program prints the script's name,
the exit status, the duration in seconds, and the last measurements, failures and notes that `tula` printed. The reader
must judge whether this output is correct.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support import clean_environment
from benchmarks.support.server import Server

_COMMAND = re.compile(r"^# run: (.+?)\s{3,}\(", re.MULTILINE)
_LEFT_OUT = re.compile(r"TULA_URL=\S+ |\s\[[^\]]*\]")
_TELLING = re.compile(r"^(?:measured|failed|out of memory|note|tula:|== rc|\w*Error\b|complete\b)")
_MOST_LINES, _MOST_CHARACTERS = 4, 160


def find_command(script: Path) -> str | None:
    """Return the command in the first two lines of `script`, or None if there is none."""
    head = "\n".join(script.read_text(errors="replace").splitlines()[:2])
    found = _COMMAND.search(head)
    return None if found is None else _LEFT_OUT.sub("", found[1])


def run(command: str, folder: Path, environment: dict[str, str], log: Path, limit_s: float) -> tuple[int | None, float]:
    """Run a command, and write its output to `log`; return the exit status (None at the time limit) and the seconds."""
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = None
    return status, time.monotonic() - began


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; return the number of cases that reached the time limit."""
    parser = argparse.ArgumentParser(prog="python -m experiments.cases", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="run only scripts whose names have one of these prefixes")
    parser.add_argument("--limit", type=float, default=600.0, help="time limit for each script in seconds (600)")
    parser.add_argument("--logs", type=Path, help="folder for the output of each script")
    options = parser.parse_args(arguments)
    hung = 0
    with tempfile.TemporaryDirectory() as name, Server(f"sqlite:///{name}/tula.db") as server:
        logs = options.logs or Path(name)
        logs.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        environment = clean_environment(TULA_URL=server.url, PATH=path)
        for script in sorted(options.folder.iterdir()):
            chosen = not options.only or script.name.startswith(tuple(options.only))
            if not (chosen and script.is_file() and (command := find_command(script))):
                continue
            log = logs / f"{script.name}.log"
            status, seconds = run(command, options.folder, environment, log, options.limit)
            hung += status is None
            told = [line for line in log.read_text(errors="replace").splitlines() if _TELLING.search(line)]
            said = " | ".join(line[:_MOST_CHARACTERS] for line in told[-_MOST_LINES:])
            print(f"{script.name}: {'limit' if status is None else status}, {seconds:.0f} s: {said}", flush=True)
    return hung


if __name__ == "__main__":
    raise SystemExit(main())
