"""MLflow's tracking server under the load of `ingest`: batches of metrics into SQLite, from another environment."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

from benchmarks.support.load import Load, Measured, Request, drive

METRICS = 1000
"""Metrics in a request: the most that MLflow takes (REST API reference, "Log Batch")."""

_API = "/api/2.0/mlflow"
_START_S = 120.0
_GRACE_S = 60.0


@dataclass(frozen=True)
class _Batch(Request):
    """A `log-batch` body whose steps never repeat: MLflow takes a slow way for metrics that it has already."""

    metrics: tuple[bytes, ...] = ()

    def pieces(self, number: int) -> tuple[bytes, ...]:
        """One step for every four metrics, numbered in 16 digits so that every body has the same length."""
        first = 10**15 + number * len(self.metrics)
        each = b",".join(b'%s"step":%d}' % (one, first + at // 4) for at, one in enumerate(self.metrics))
        return self.head, each, self.tail


def batches(run_id: str, columns: np.ndarray) -> Request:
    """The columns' first `METRICS` values, step by step, as the body of one request; shape (4, steps)."""
    names = ("step_time_s", "loss", "grad_norm", "lr")
    values = columns.T.reshape(-1)[:METRICS].tolist()
    metrics = tuple(
        f'{{"key":"{names[at % 4]}","value":{value!r},"timestamp":{1_700_000_000_000 + at},'.encode()
        for at, value in enumerate(values)
    )
    head = f'{{"run_id":"{run_id}","metrics":['.encode()
    return _Batch(f"{_API}/runs/log-batch", "application/json", head, b"]}", metrics=metrics)


def measure_mlflow(python: str, load: Load, columns: np.ndarray) -> Measured:
    """Load a tracking server that the interpreter `python` starts on a fresh database with one worker.

    Raises RuntimeError when the server does not start or refuses a request, and ends within the load's time, two
    minutes to start and one of grace: then the server is killed, and its clients with their connections.
    """
    with _serving(python) as (process, port, log):
        with httpx.Client(base_url=f"http://127.0.0.1:{port}{_API}", timeout=30) as client:
            made = client.post("/experiments/create", json={"name": "bench"}).raise_for_status().json()
            start = {"experiment_id": made["experiment_id"], "start_time": int(time.time() * 1000)}
            run = client.post("/runs/create", json=start).raise_for_status().json()["run"]["info"]["run_id"]
        watchdog = threading.Timer(load.warmup_s + load.measure_s + _GRACE_S, _kill, [process])
        watchdog.start()
        try:
            found = drive("127.0.0.1", port, "", [batches(run, columns)], load)
        finally:
            watchdog.cancel()
        if found.failed or not found.requests:
            answer = f"{found.requests} requests and failed {found.failed}; its log ends: {_tail(log)}"
            raise RuntimeError(f"MLflow answered {answer}")
        return found


@contextmanager
def _serving(python: str) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    # its own switches: no reports home, and no job runner beside the server
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="mlflow-bench-", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "server.log"
        command = [python, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
        store = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
        artifacts = ["--default-artifact-root", f"{folder}/artifacts", "--no-serve-artifacts"]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*command, *store, *artifacts],
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**os.environ, **quiet},
                start_new_session=True,
            )
        try:
            _wait(process, port, log)
            yield process, port, log
        finally:
            _kill(process)


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    ends = time.monotonic() + _START_S
    while time.monotonic() < ends and process.poll() is None:
        with suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"MLflow's server ended or took over {_START_S:.0f} s to start; its log ends: {_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-2000:]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The whole group: its worker outlives the process that was started here otherwise."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)
