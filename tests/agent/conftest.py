"""Provides a server that receives what agents send, and runs training scripts as real processes."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks.support.fork_server import AGENT, FRAMEWORKS, ForkServer
from tests.agent.sink import Sink, start
from tests.support.forked_commands import fork_server, launchers

SCRIPTS = Path(__file__).parent / "scripts"
_PATIENCE_S = 120.0


@pytest.fixture
def sink() -> Iterator[Sink]:
    """Start a service that accepts everything until a test changes its `behaviour`."""
    made = Sink()
    server = start(made)
    yield made
    made.released.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def environment(sink: Sink, tmp_path: Path) -> dict[str, str]:
    """Return the environment that a launcher would set for one run that reports to `sink`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TULA_")}
    return kept | {
        "TULA_URL": sink.url,
        "TULA_RUN_ID": "run1",
        "TULA_JOB_ID": "job1",
        "TULA_SPOOL_DIR": str(tmp_path / "spool"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": sys.path[0],
    }


@dataclass
class Done:
    """The exit status of a process, as `subprocess` reports it, and its output.

    With several ranks, `stdout` and `stderr` contain the outputs of all ranks in order; `codes` has one exit status per
    rank.
    """

    returncode: int
    stdout: str
    stderr: str
    codes: list[int] = field(default_factory=list)

    def printed(self, word: str) -> list[str]:
        """Return the lines of the output that begin with `word`."""
        return [line for line in self.stdout.splitlines() if line.startswith(word)]


def run_script(forks: ForkServer, argv: list[str], env: dict[str, str], folder: Path, ranks: int = 0) -> Done:
    """Run a script as one process or as ranks with torchrun's variables; write the output to files in `folder`.

    A process that hangs is killed, so that it fails only one test and not all later ones.
    """
    files = [(folder / f"stdout{rank}", folder / f"stderr{rank}") for rank in range(ranks or 1)]
    for path in (path for pair in files for path in pair):
        path.unlink(missing_ok=True)
    places = places_of(ranks) or [{}]
    started = [forks.start(argv, env | place, *names) for place, names in zip(places, files, strict=True)]
    ends = time.monotonic() + _PATIENCE_S
    try:
        codes = [process.wait(max(0.0, ends - time.monotonic())) for process in started]
    except subprocess.TimeoutExpired:
        for process in started:
            process.send_signal(signal.SIGKILL)
        codes = [process.wait(10) for process in started]
    out, err = ("".join(path.read_text(errors="replace") for path in paths) for paths in zip(*files, strict=True))
    return Done(codes[0], out, err, codes)


@pytest.fixture(scope="session")
def forks() -> ForkServer:
    """Return the fork server for scripts; all tests share it, since importing torch takes seconds."""
    return fork_server()


@functools.cache
def framework_fork_server() -> ForkServer:
    """Return the fork server that has imported the frameworks; it is itself forked from one that has imported torch."""
    made = ForkServer([*AGENT, *FRAMEWORKS], str(launchers() / "python"))
    atexit.register(made.close)
    return made


def places_of(ranks: int) -> list[dict[str, str]]:
    """Return the variables that torchrun would set for each of `ranks` processes on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


Launch = Callable[..., Done]


@pytest.fixture
def launch(environment: dict[str, str], forks: ForkServer, tmp_path: Path) -> Launch:
    """Return a function that runs a script from `scripts/` as one process or several ranks and returns its `Done`."""

    def run(name: str, *arguments: str, ranks: int = 0, expect: int | None = 0, **variables: str) -> Done:
        done = run_script(forks, [str(SCRIPTS / name), *arguments], environment | variables, tmp_path, ranks)
        if expect is not None:
            assert {done.returncode, *done.codes} == {expect}, done.stderr[-4000:]
        return done

    return run


@pytest.fixture(scope="session")
def alone(forks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Done]:
    """Return a function that runs a script without a service and asserts that all processes succeed."""

    def run(script: Path, *arguments: str, ranks: int = 0, **variables: str) -> Done:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TULA_")}
        clean |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": sys.path[0], **variables}
        done = run_script(forks, [str(script), *arguments], clean, tmp_path_factory.mktemp("alone"), ranks)
        assert {*done.codes} == {0}, done.stderr[-4000:]
        return done

    return run


@pytest.fixture(scope="session")
def plain(alone: Callable[..., Done]) -> Callable[..., list[str]]:
    """Return a function that runs `train.py` without an agent and returns the final weights of each rank."""
    known: dict[tuple[str | int, ...], list[str]] = {}

    def weights(*arguments: str, ranks: int = 0) -> list[str]:
        key = (ranks, *arguments)
        if key not in known:
            known[key] = alone(SCRIPTS / "train.py", *arguments, ranks=ranks).printed("weights")
            assert len(known[key]) == (ranks or 1)
        return known[key]

    return weights
