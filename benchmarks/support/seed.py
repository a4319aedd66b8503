"""Creates a job with every kind of data, using only the public API."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from tula_wire import routes

GIB = 2**30
METHODS = {"lbt": 0.68, "lrs": 0.71, "lars": 0.70, "post_local_sgd": 0.69, "ags": 0.74}


@dataclass
class Seeded:
    """The created job, and methods that create more data."""

    url: str
    job_id: str
    runs: dict[str, str] = field(default_factory=dict)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send a POST request, assert that it succeeds, and return the response's JSON."""
        answer = httpx.post(self.url + path, json=body, timeout=60)
        assert answer.is_success, answer.text
        return answer.json()

    def patch(self, run_id: str, **body: Any) -> None:
        """Update fields of a run, such as its state."""
        answer = httpx.patch(self.url + routes.RUN.format(run_id=run_id), json={"holder": "seed", **body}, timeout=60)
        assert answer.is_success, answer.text

    def telemetry(
        self, run_id: str, sequence: int, steps: range, columns: Mapping[str, Sequence[float | None]]
    ) -> None:
        """Send a chunk of telemetry."""
        body = {"boot_id": "b", "sequence": sequence, "steps": list(steps), "columns": dict(columns)}
        self.post(routes.RUN_TELEMETRY.format(run_id=run_id), body)


def specification(name: str = "resnet50-cifar100", **more: Any) -> dict[str, Any]:
    """Return the specification of a job on up to 16 nodes with 16 GiB per rank."""
    cluster = {
        "max_nodes": 16,
        "memory_bytes_per_rank": 16 * GIB,
        "accelerator": "V100-16GB",
        "network_gbps": 10,
        "price": {"usd_per_node_hour": 3.06},
    }
    return {
        "name": name,
        "model": {"name": "resnet50", "parameters": 25_600_000},
        "dataset": {"size": 50_000},
        "epochs": 90,
        "cluster": cluster,
        "batch": {"max_local_batch_size": 512},
    } | more


def seed(url: str) -> Seeded:
    """Profile a job as planned, report that the largest batch ran out of memory, and train once with each method."""
    made = Seeded(url, "")
    made.job_id = made.post(routes.JOBS, specification())["job"]["id"]
    for _ in range(8):
        claimed = made.post(routes.JOB_CLAIM.format(job_id=made.job_id), {"holder": "seed"})["run"]
        if claimed is None:
            break
        _profile(made, claimed)
    answer = httpx.get(url + routes.JOB_RECOMMENDATION.format(job_id=made.job_id), timeout=60).json()
    for method, level in METHODS.items():
        body = {"kind": "train", "configuration": answer["chosen"]["configuration"], "method": method, "holder": "seed"}
        run_id = made.post(routes.JOB_RUNS.format(job_id=made.job_id), body)["id"]
        made.runs[method] = run_id
        made.patch(run_id, state="running")
        made.telemetry(run_id, 0, range(3000), _columns(random.Random(method), level, 3000))
        if method != "ags":
            made.patch(run_id, state="succeeded")
    return made


def a_hundred_thousand_steps(made: Seeded) -> str:
    """Store a training run with a hundred thousand values of `loss`, and return its id."""
    body = {"kind": "train", "configuration": {"num_nodes": 1, "local_batch_size": 32}, "holder": "seed"}
    run_id = str(made.post(routes.JOB_RUNS.format(job_id=made.job_id), body)["id"])
    values = (1 + np.arange(10_000) % 97 / 97).tolist()
    for part in range(10):
        steps = list(range(part * 10_000, (part + 1) * 10_000))
        chunk = {"rank": 0, "boot_id": "b", "sequence": part, "steps": steps, "columns": {"loss": values}}
        made.post(routes.RUN_TELEMETRY.format(run_id=run_id), chunk)
    return run_id


def _profile(made: Seeded, run: dict[str, Any]) -> None:
    batch, nodes = run["configuration"]["local_batch_size"], run["configuration"]["num_nodes"]
    made.patch(run["id"], state="running")
    if batch >= 512:
        made.patch(run["id"], state="out_of_memory", failed_local_batch_size=batch)
        return
    chance = random.Random(run["id"])
    compute, exposed = 0.02 + 0.0018 * batch, 0.07 * (1 - 1 / nodes)
    count = 40
    body = {
        "rank": 0,
        "boot_id": "b",
        "world_size": nodes,
        "sequence": list(range(count)),
        "step": list(range(count)),
        "step_time_s": [(compute + exposed) * chance.uniform(0.97, 1.03) for _ in range(count)],
        "compute_time_s": [compute] * count,
        "exposed_comm_time_s": [exposed] * count,
        "memory": {"method": "cuda_allocator", "peak_bytes": int(2e9 + batch * 3e7), "capacity_bytes": 16 * GIB},
    }
    made.post(routes.RUN_SAMPLES.format(run_id=run["id"]), body)
    made.patch(run["id"], state="succeeded")


def _columns(chance: random.Random, level: float, count: int) -> dict[str, list[float]]:
    steps = range(count)
    return {
        "loss": [4.6 * math.exp(-i / 900) + 0.8 + chance.gauss(0, 0.08) for i in steps],
        "accuracy": [level * (1 - math.exp(-i / 800)) + chance.gauss(0, 0.01) for i in steps],
        "grad_norm": [2 + 1.5 * math.exp(-i / 500) + abs(chance.gauss(0, 0.2)) for i in steps],
        "gradient_variability": [abs(chance.gauss(0, 0.35)) for _ in steps],
        "scaled_share": [0.9 - 0.3 * math.exp(-i / 600) for i in steps],
        "scale": [1 + 1.2 * (1 - math.exp(-i / 500)) for i in steps],
        "step_time_s": [0.3 * chance.lognormvariate(0, 0.05) for _ in steps],
        "memory_bytes": [9.1e9 + chance.gauss(0, 1e7) for _ in steps],
    }
