"""Code that benchmarks, experiments and tests share: a service, a database, a cluster of namespaces, a browser,
figures.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

PYTHON = os.environ.get("BENCHMARK_PYTHON", sys.executable)
"""The interpreter for services and training; in the tests' smoke runs, a program that forks a process with all
imports.
"""


def clean_environment(**more: str) -> dict[str, str]:
    """Return this process's environment without Tula's variables, with one thread for numerics, and `more`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TULA_")}
    return kept | {"OMP_NUM_THREADS": "1"} | more


def tune_words(spec: Path, work_dir: Path) -> list[str]:
    """Return the words of `tula tune` on a job.toml, before its launcher and the command; it prints JSON."""
    return [PYTHON, "-m", "tula_client.cli", "tune", str(spec), "--json", "--work-dir", str(work_dir)]
