"""Measures accuracy at large batches on cases that are too large for a CPU, with `experiments.generalization --gpu`.

Each training run is stored in `generalization.jsonl` when it ends; a later session trains only the missing runs.
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
"""Number of concurrent training runs; in each run, the device waits for the host to launch operations."""
METHODS = ("Tula default", "linear, cut", "linear", "Muon")


def tests_of(runs: Path) -> Row:
    """Return the test accuracies in percent, by method, of the training runs stored in the file `runs`."""
    tests: dict[str, list[float]] = defaultdict(list)
    for line in runs.read_text(encoding="utf-8").splitlines() if runs.exists() else []:
        run = json.loads(line)
        tests[f"{run['case']}: {run['method']}"].append(run["test"])
    return {"tests": dict(tests)}


def run(results: Results, device: torch.device, seconds: float, smoke: bool) -> None:
    """Train the missing runs, and add a row with the accuracies of all runs; a smoke run trains the two tiny cases."""
    del device  # the experiment's mode determines the device
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
                os.killpg(process.pid, signal.SIGKILL)  # including the processes that train
                process.wait()
                results.end_row(None)  # the next session trains the missing runs
                return
            log.seek(0)
            results.add(name, {"failed": log.read().decode()[-1000:]} if code else tests_of(runs))
