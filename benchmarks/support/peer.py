"""The peers of `python -m benchmarks.peers`: an environment for each, and its answer to a job."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support import clean_environment

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "benchmarks" / "support" / "peers"
TORCH = ("torch==2.13.0", "scikit-learn==1.9.1")


@dataclass(frozen=True)
class Peer:
    """What its environment gets, how its program is asked, and why it is not asked for a table."""

    requirements: tuple[str, ...]
    asked: str
    no_table: str = ""


PEERS = {
    "optuna": Peer(("optuna==5.0.0",), "black_box"),
    "ray": Peer(("ray[tune]==2.60.0", "bayesian-optimization==1.4.3"), "black_box"),
    "accelerate": Peer(("accelerate==1.15.0", *TORCH), "largest"),
    "lightning": Peer(("lightning==2.6.6", *TORCH), "largest"),
    "deepspeed": Peer(("deepspeed[autotuning]==0.19.8", *TORCH), "largest", "launches its own trials of a model"),
    "ado": Peer(("ado-core==2.3.0", "ado-autoconf==2.1.2", TORCH[0]), "refuses"),
    "coastline": Peer(("coastline-recommender==0.3.0", TORCH[0]), "refuses"),
}
_PATIENCE_S = 1200.0


class Refused(Exception):
    """A peer did not install, did not run, or does not take the job."""


def python_of(name: str, folder: Path) -> str:
    """The interpreter of a peer's environment, made if it is not there; raises `Refused` where pip fails."""
    place, python = folder / name, folder / name / "bin" / "python"
    if not (place / "complete").exists():
        venv.create(place, clear=True, with_pip=True)  # one whose installation was cut off is made again
        command = [str(python), "-m", "pip", "install", "--quiet", *PEERS[name].requirements]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Refused(f"pip: {last_line(done.stderr)}")
        (place / "complete").touch()
    return str(python)


def ask(name: str, python: str, job: dict[str, Any]) -> Any:
    """A peer's answer to a job; raises `Refused` with the last line that it printed."""
    with tempfile.TemporaryDirectory(prefix=f"peer-{name}-") as at:
        folder = Path(at)
        (folder / "digits.py").write_text(plain_digits())
        (folder / "job.json").write_text(json.dumps(job))
        quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AIR_NEW_OUTPUT": "0", "OMP_NUM_THREADS": "1"}
        environment = clean_environment(**quiet, PYTHONPATH=os.pathsep.join((at, str(PROGRAMS))))
        command = [python, str(PROGRAMS / f"with_{name}.py"), "job.json", "answer.json"]
        done = subprocess.run(
            command, cwd=at, env=environment, capture_output=True, text=True, check=False, timeout=_PATIENCE_S
        )
        if done.returncode or not (folder / "answer.json").exists():
            raise Refused(last_line(done.stderr))
        return json.loads((folder / "answer.json").read_text())


def last_line(text: str) -> str:
    """What a program said last, in 300 characters."""
    return ([line.strip() for line in text.splitlines() if line.strip()] or ["it said nothing"])[-1][:300]


def plain_digits() -> str:
    """The example as it is without Tula."""
    lines = (ROOT / "examples" / "digits_ddp.py").read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not line.endswith("# tula\n"))


def lines_of(name: str) -> int:
    """Lines between `# user` and `# end` in a peer's programs, without docstrings."""
    count, inside = 0, False
    shared = ["black_box.py"] if PEERS[name].asked == "black_box" else []
    for file in (f"with_{name}.py", *shared):
        for line in map(str.strip, (PROGRAMS / file).read_text().splitlines()):
            inside = line == "# user" or (inside and line != "# end")
            count += inside and bool(line) and not line.startswith(("# ", '"""'))
    return count
