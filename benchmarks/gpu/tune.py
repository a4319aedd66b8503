"""Runs `tula tune` and then `tula run` for a script without any of Tula's lines, and compares their step times."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.store import Results, Row
from benchmarks.gpu.tables import free_memory
from benchmarks.support import PYTHON

NAME = "resnet50 tf32, one device"
SCRIPT = Path(__file__).with_name("train.py")
STARTUP = Path(__file__).with_name("startup")
BATCHES, SMOKE_BATCHES = (32, 1024), (2, 8)
SPEC = """\
name = "gpu"
epochs = 90
model = {{ name = "resnet50", parameters = 25_557_032, precision = "{precision}" }}
dataset = {{ size = 1_281_167 }}
cluster = {{ min_nodes = 1, max_nodes = 1, price = {{ usd_per_node_hour = 3.0 }} }}
batch = {{ min_local_batch_size = {least}, max_local_batch_size = {most} }}
profiling = {{ profiling_warmup_steps = 3, measuring_steps = 12 }}
"""


def measure(seconds: float, smoke: bool) -> Row:
    """Start a service, tune, and train one short epoch as recommended; return step times in seconds by local batch."""
    from benchmarks.support.server import Server
    from tula_client import Client

    ends = time.monotonic() + seconds
    least, most = SMOKE_BATCHES if smoke else BATCHES
    script = [str(SCRIPT), "--batch-size", "{local_batch_size}", *(["--smoke"] if smoke else [])]
    with tempfile.TemporaryDirectory() as name, Server(str(Path(name) / "tula.db")) as server:
        folder = Path(name)
        tula = partial(_tula, folder, server.url, ends)
        spec = folder / "job.toml"
        spec.write_text(SPEC.format(least=least, most=most, precision="fp32" if smoke else "tf32"))
        began = time.monotonic()
        tuned = tula("tune", str(spec), "--launcher", "torchrun", "--json", "--", *script)
        tuned_s = time.monotonic() - began
        with Client(server.url) as client:
            job = client.handle("gpu")
            before = job.recommendation()
            examples = ["--examples", str(64 if smoke else 40_000)]
            tula("run", "gpu", "--launcher", "torchrun", "--json", "--", *script, *examples)
            runs = job.runs()
        trained = next(run for run in runs if run.kind == "train")
        if trained.step_time_s is None:
            raise RuntimeError(f"run {trained.id} has no step time: {trained.message}")
        chosen = next(
            one for one in before.candidates if one.configuration == trained.configuration and one.excluded_by is None
        )
        return {
            "tune_s": tuned_s,
            "runs": [
                {"local_batch_size": run.configuration.local_batch_size, "state": run.state, "step_s": run.step_time_s}
                for run in runs
                if run.kind == "profile"
            ],
            "why": tuned["recommendation"]["why"],
            "candidates": [
                {"local_batch_size": one.configuration.local_batch_size, "excluded_by": one.excluded_by}
                | {"step_s": [one.step_time_s.value, one.step_time_s.low, one.step_time_s.high]}
                | {"profiled": one.profiled}
                for one in before.candidates
            ],
            "chosen": chosen.configuration.local_batch_size,
            "predicted_s": [chosen.step_time_s.value, chosen.step_time_s.low, chosen.step_time_s.high],
            "trained_s": trained.step_time_s,
        }


def _tula(folder: Path, url: str, ends: float, *arguments: str) -> dict[str, Any]:
    """Return the output of a `tula` command.

    Raises RuntimeError with the output if the command fails, and TimeoutError if it is still running at `ends`.
    """
    path = f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}"
    sources = f"{STARTUP}{os.pathsep}{os.environ['PYTHONPATH']}"
    try:
        done = subprocess.run(
            [PYTHON, "-m", "tula_client.cli", *arguments],
            cwd=folder,
            env=os.environ | {"PATH": path, "PYTHONPATH": sources, "TULA_URL": url},
            capture_output=True,
            text=True,
            timeout=max(0.0, ends - time.monotonic()),
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"tula {arguments[0]} did not end within this part's time limit") from None
    if done.returncode:
        logs = [path.read_text(errors="replace")[-2000:] for path in folder.glob(".tula/*/logs/*.log")]
        raise RuntimeError(f"tula {arguments[0]}: {done.stdout[-1500:]}{done.stderr[-1500:]}{''.join(logs)}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run(results: Results, device: torch.device, seconds: float, smoke: bool) -> None:
    """Add one row with the step times of both commands."""
    for name in results.missing([NAME]):
        free_memory(device)
        try:
            results.add(name, measure(seconds, smoke))
        except TimeoutError as error:
            results.end_row(None)  # the next session measures this row
            print(error, flush=True)
        except RuntimeError as error:
            results.add(name, {"failed": str(error)})
