"""Contains code that benchmarks, experiments and tests share, such as a service, a database and a simulated cluster."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PYTHON = os.environ.get("BENCHMARK_PYTHON", sys.executable)
"""The interpreter for services and training; in smoke runs of the tests, a program that forks a process instead."""


def clean_environment(**more: str) -> dict[str, str]:
    """Return this process's environment without Tula's variables, with one numerical thread and with `more` added."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TULA_")}
    return kept | {"OMP_NUM_THREADS": "1"} | more


def tune_words(spec: Path, work_dir: Path) -> list[str]:
    """Return the words that precede the launcher and the user's command in a `tula tune` command that prints JSON."""
    return [PYTHON, "-m", "tula_client.cli", "tune", str(spec), "--json", "--work-dir", str(work_dir)]
