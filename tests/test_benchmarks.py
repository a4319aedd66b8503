"""Tests that every benchmark runs within seconds with `--smoke`, and writes the keys of the stored results."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import names
from benchmarks.support import clean_environment
from benchmarks.support.fork_server import AGENT, SERVICE, ForkServer
from benchmarks.support.forked_programs import programs

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NEEDS_A_CLUSTER = {"cluster", "fabric"}
TIMEOUT_S = 360
"""Far above the seconds that each takes, for a busy machine."""
STORED = {"cluster": ("cluster-tune", "cluster-drift")}
"""Results in several files; else one, whose name may end with the input that it was run on."""
ELSEWHERE = re.compile(
    r"mlflow|agents\.(workers_4|replicas)|^(source|without)\.|^memory\.(analytic|counted_one|apart)\.|^cold\.held_out"
    r"|^(sqlite|postgres)\.json\.|^options\.effect\."
)
"""Figures of earlier studies (`benchmarks/results/README.md`), and of tables that are not in the repository."""


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    made = ForkServer([*SERVICE, *AGENT, "tula_agent", "tula_client"])
    yield made
    made.close()


@pytest.fixture(scope="module")
def python(forks: ForkServer) -> Path:
    """Return an interpreter that forks the programs it runs."""
    return programs(forks, {"python": []}, spawns="python") / "python"


def run(forks: ForkServer, module: str, folder: Path, **environment: str) -> dict[str, Any]:
    """Run `python -m MODULE --smoke --json OUT`; return the object in OUT."""
    out, log = folder / "out.json", folder / "log"
    log.touch()
    process = forks.start(["-m", module, "--smoke", "--json", str(out)], clean_environment(**environment), log)
    try:
        code = process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # it removes what it has made, such as namespaces
        process.wait(30)
        raise
    assert code == 0, log.read_text()[-4000:]
    found = json.loads(out.read_text())
    assert isinstance(found, dict)
    return found


def newest(stem: str) -> dict[str, Any]:
    """Return the latest stored result with this name, or {} if there is none."""
    found = [*RESULTS.glob(f"*-{stem}.json"), *RESULTS.glob(f"*-{stem}-[0-9]*.json")]
    return dict(json.loads(max(found).read_text())) if found else {}


def stored(name: str) -> dict[str, Any]:
    """Return the newest stored figures of the benchmark."""
    return functools.reduce(lambda left, right: left | newest(right), STORED.get(name, (name,)), {})


def numbers(value: Any) -> Iterator[float]:
    """Yield every number in a JSON value."""
    if isinstance(value, dict):
        yield from itertools.chain.from_iterable(map(numbers, value.values()))
    elif isinstance(value, list):
        yield from itertools.chain.from_iterable(map(numbers, value))
    elif isinstance(value, (int, float)):
        yield float(value)


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.cluster("namespaces") if name in NEEDS_A_CLUSTER else ())
        for name in names()
    ],
)
def test_a_smoke_run_writes_the_keys_of_the_stored_result(
    name: str, forks: ForkServer, python: Path, tmp_path: Path
) -> None:
    found = run(forks, f"benchmarks.{name}", tmp_path, BENCHMARK_PYTHON=str(python))
    assert {key for key in stored(name) if not ELSEWHERE.search(key)} <= set(found)
    values = list(numbers(found))
    assert values
    assert all(map(math.isfinite, values))


def test_a_forked_program_starts_although_it_inherits_a_file_that_cannot_be_opened_again(python: Path) -> None:
    counter = os.eventfd(0, 0)
    try:
        command = [python, "-c", "print('started')"]
        done = subprocess.run(command, close_fds=False, capture_output=True, text=True, check=False)
    finally:
        os.close(counter)
    assert done.stdout == "started\n", done.stderr
