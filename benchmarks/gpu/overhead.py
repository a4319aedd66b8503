"""Measures the agent's CPU time on the training thread to within 10 us, and compares two ways of measuring energy."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import threading
import time
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.gpu.store import Results, Row
from benchmarks.support.sink import Sink
from tula_agent.config import read_config
from tula_agent.measure.memory import total_energy_j
from tula_agent.run import Run

STEPS, WARMUP = 600, 5
ENOUGH_S, MIN_PAIRS, MAX_PAIRS = 10e-6, 9, 200
"""The half-width of the interval, in seconds, at which measuring ends, and the minimum and maximum numbers of pairs."""
LOAD_S, BETWEEN_SAMPLES_S = 5.0, 0.02


def thread_s(url: str | None, device: torch.device, steps: int) -> float:
    """Return the training thread's CPU seconds for one small step, with an agent if there is a `url` to report to."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    batch = torch.randn(8, 64, device=device)
    with tempfile.TemporaryDirectory() as spool:
        place = {"TULA_URL": url, "TULA_RUN_ID": "run-1", "TULA_SPOOL_DIR": spool} if url is not None else None
        run = Run(read_config(place) if place is not None else None)
        run.watch(model, optimizer)
        began = 0.0
        for step, data in enumerate(run.steps(itertools.repeat(batch, WARMUP + steps))):
            if step == WARMUP:
                began = time.thread_time()
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
        seconds = (time.thread_time() - began) / steps
        run.finish()
    return seconds


def agent_cpu(device: torch.device, ends: float, smoke: bool) -> Row:
    """Return the CPU seconds that the agent adds to a step: the median over pairs, with its 95 % interval."""
    sink = Sink()
    threading.Thread(target=sink.serve_forever, daemon=True).start()
    steps = 20 if smoke else STEPS
    random, added = np.random.default_rng(0), list[float]()
    while len(added) < (2 if smoke else MAX_PAIRS):
        order = (None, sink.url) if len(added) % 2 else (sink.url, None)
        seconds = {url: thread_s(url, device, steps) for url in order}
        added.append(seconds[sink.url] - seconds[None])
        draws = np.median(random.choice(added, (1000, len(added))), axis=1)
        low, high = np.quantile(draws, (0.025, 0.975))
        if (len(added) >= MIN_PAIRS and (high - low) / 2 <= ENOUGH_S) or time.monotonic() > ends:
            break
    sink.shutdown()
    sink.server_close()
    return {
        "seconds": statistics.median(added),
        "interval_s": [float(low), float(high)],
        "pairs": len(added),
        "decided": bool((high - low) / 2 <= ENOUGH_S),
    }


def energy(device: torch.device) -> Row:
    """Return the joules used in a few busy seconds, according to the counter and to the integral of power samples."""
    if device.type != "cuda":
        return {"verdict": "a CPU has no energy counter"}
    matrix = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    samples: list[tuple[float, float]] = []
    done = threading.Event()

    def sample() -> None:
        while not done.wait(BETWEEN_SAMPLES_S):
            samples.append((time.perf_counter(), torch.cuda.power_draw(device) * 1e-3))

    sampler = threading.Thread(target=sample)
    sampler.start()
    before, began = total_energy_j(device), time.perf_counter()
    while time.perf_counter() - began < LOAD_S:
        torch.mm(matrix, matrix)
        torch.cuda.synchronize(device)
    after = total_energy_j(device)
    done.set()
    sampler.join()
    moments, watts = np.asarray(samples).T
    if before is None or after is None:
        return {"verdict": "the device has no energy counter"}
    return {"counter_j": after - before, "samples_j": float(np.trapezoid(watts, moments)), "seconds": LOAD_S}


def run(results: Results, device: torch.device, seconds: float, smoke: bool) -> None:
    """Add one row for the training thread's CPU time and one row for energy."""
    ends = time.monotonic() + seconds
    rows: dict[str, Any] = {
        "energy": lambda: energy(device),
        "CPU of the training thread": lambda: agent_cpu(device, ends, smoke),
    }
    for name in results.missing(rows, ends):
        results.add(name, rows[name]())
