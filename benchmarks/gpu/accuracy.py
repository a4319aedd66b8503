"""Accuracy at large batches on cases that no CPU can train: `experiments.generalization --gpu` while minutes are left.

Each run is kept in `generalization.jsonl` as it ends; a later lease goes on there.
"""

from __future__ import annotations

import subprocess

import torch

from benchmarks.gpu import ROOT
from benchmarks.gpu.store import Results
from benchmarks.support import PYTHON

NAME = "runs"


def run(results: Results, device: torch.device, seconds: float, smoke: bool) -> None:
    """Train the missing runs, and add a row with the number of runs; a rehearsal trains the two tiny cases."""
    del device  # the mode decides on it
    mode = ["--quick", "--smoke"] if smoke else ["--gpu"]
    runs = results.folder / "generalization.jsonl"
    command = [PYTHON, "-m", "experiments.generalization", *mode, "--runs", str(runs)]
    if smoke:
        command += ["--only", "Tula default"]
    for name in results.missing([NAME]):
        try:
            done = subprocess.run(command, cwd=ROOT, timeout=seconds, capture_output=True, text=True)
            ended = "all" if done.returncode == 0 else done.stderr[-1000:]
        except subprocess.TimeoutExpired:
            ended = None
        count = len(runs.read_text(encoding="utf-8").splitlines()) if runs.exists() else 0
        if ended is None:
            results.end_row(None)  # the next lease trains the rest
            print(f"{count} runs so far", flush=True)
            return
        results.add(name, {"count": count} if ended == "all" else {"failed": ended})
