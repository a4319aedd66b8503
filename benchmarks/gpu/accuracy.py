"""Accuracy at large batches on cases that no CPU can train: runs `experiments.generalization --gpu` while time is left.

Each run is stored in `generalization.jsonl` when it ends; a later session continues from there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

import torch

from benchmarks.gpu import ROOT
from benchmarks.gpu.store import Results, Row
from benchmarks.support import PYTHON

NAME = "runs"
WORKERS = 12
"""Number of concurrent training runs, since a device waits for the host's launches in each."""
METHODS = ("Tula default", "linear, cut", "linear", "Muon")


def tests_of(runs: Path) -> Row:
    """Return the test accuracies by method, in per cent, of the runs in `runs`."""
    tests: dict[str, list[float]] = defaultdict(list)
    for line in runs.read_text(encoding="utf-8").splitlines() if runs.exists() else []:
        run = json.loads(line)
        tests[f"{run['case']}: {run['method']}"].append(run["test"])
    return {"tests": dict(tests)}


def run(results: Results, device: torch.device, seconds: float, smoke: bool) -> None:
    """Train the missing runs, and add a row with their accuracies; a rehearsal trains the two tiny cases."""
    del device  # the mode decides on it
    mode = ["--quick", "--smoke"] if smoke else ["--gpu", "--workers", str(WORKERS)]
    runs = results.folder / "generalization.jsonl"
    methods = METHODS[:1] if smoke else METHODS
    command = [PYTHON, "-m", "experiments.generalization", *mode, "--runs", str(runs), "--only", "|".join(methods)]
    for name in results.missing([NAME]):
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that train
                process.wait()
                results.end_row(None)  # the next lease trains the rest
                return
            log.seek(0)
            results.add(name, {"failed": log.read().decode()[-1000:]} if code else tests_of(runs))
