"""Replaces a launcher (torchrun, srun, ...) in the documents' commands, and reports what the job's agent would report.

`tula` starts this script with the variables of a run. The script uses only the standard library, so that a run takes a
fraction of a second.
"""

from __future__ import annotations

import json
import os
import urllib.request
from typing import Any

__all__ = ["main", "step_time_s"]


def step_time_s(world_size: int, local_batch_size: int) -> float:
    """Return the step time of an all-reduce ring in seconds."""
    return 0.02 + 0.001 * local_batch_size + 0.03 * (1 - 1 / world_size)


def main() -> None:
    """Report twenty steps and the peak memory of the run that the environment variables specify."""
    nodes, ranks = (int(os.environ[f"TULA_{name}"]) for name in ("NUM_NODES", "RANKS_PER_NODE"))
    batch = int(os.environ["TULA_LOCAL_BATCH_SIZE"])
    step = step_time_s(nodes * ranks, batch)
    steps = list(range(20))
    run = f"{os.environ['TULA_URL']}/v1/runs/{os.environ['TULA_RUN_ID']}"
    ask("PATCH", run, {"state": "running"})
    samples = {
        "rank": 0,
        "boot_id": "stand-in",
        "sequence": steps,
        "step": steps,
        "step_time_s": [step * (1 + 0.01 * (number % 3)) for number in steps],
    }
    ask("POST", f"{run}/samples", samples)
    print("epoch 1: done")


def ask(method: str, url: str, body: dict[str, Any]) -> None:
    """Send JSON. Raises `HTTPError` if the service refuses the request."""
    head = {"Content-Type": "application/json"}
    if token := os.environ.get("TULA_TOKEN"):
        head["Authorization"] = f"Bearer {token}"
    wanted = urllib.request.Request(url, json.dumps(body).encode(), head, method=method)
    with urllib.request.urlopen(wanted, timeout=30) as answer:
        answer.read()


if __name__ == "__main__":
    main()
