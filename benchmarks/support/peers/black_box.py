"""What Optuna and Ray Tune are given: an objective over two axes, answered by a table or by a real run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

At = tuple[int, int]
Search = Callable[[Callable[[At], tuple[At, float]], At, int, int], dict[At, float]]
"""search(measure, sizes of the axes, runs, seed): what was measured; at a hole `measure` takes the nearest place."""


# user
def seconds_per_epoch(command: list[str], ranks: int, batch: int) -> float:
    """Train the script and time its epochs, without the first."""
    torchrun = [command[0], "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    options = [f"--batch-size={batch}", "--epochs=4"]
    with subprocess.Popen([*torchrun, *command[1:], *options], stdout=subprocess.PIPE, text=True) as process:
        ended = [time.monotonic() for line in process.stdout or () if line.startswith("epoch")]
    return (ended[-1] - ended[0]) / (len(ended) - 1)


# end


def nearest(table: dict[At, float], at: At) -> tuple[At, float]:
    """The place of the table that is fewest places away, and its value."""
    place = min(table, key=lambda one: (abs(one[0] - at[0]) + abs(one[1] - at[1]), one))
    return place, table[place]


def answer(by_table: Search, by_script: Search) -> None:
    """Work through the job that the command line names."""
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    if "command" in job:
        ranks, batches = job["ranks"], job["batches"]
        began = time.monotonic()
        ran = by_script(
            lambda at: (at, seconds_per_epoch(job["command"], ranks[at[0]], batches[at[1]])),
            (len(ranks), len(batches)), job["runs"], 0,
        )  # fmt: skip
        found: Any = {"seconds": time.monotonic() - began, "ran": [[*at, value] for at, value in ran.items()]}
    else:
        found = []
        for case in job["cases"]:
            table = {(i, j): value for i, j, value in case["values"]}
            ran = by_table(partial(nearest, table), tuple(case["sizes"]), job["runs"], case["seed"])
            found.append([[*at, value] for at, value in ran.items()])
    Path(sys.argv[2]).write_text(json.dumps(found))
