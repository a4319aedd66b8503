"""A sink for what agents send, and training scripts as real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.agent.sink import Sink, start

SCRIPTS = Path(__file__).parent / "scripts"
_PATIENCE_S = 120.0


@pytest.fixture
def sink() -> Iterator[Sink]:
    """A service that takes everything, until its `behaviour` is changed."""
    made = Sink()
    server = start(made)
    yield made
    made.released.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def environment(sink: Sink, tmp_path: Path) -> dict[str, str]:
    """What a launcher would set for one run that reports to `sink`."""
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
    """How a process ended: its exit status as `subprocess` has it, and what it printed.

    Of several ranks the outputs follow each other; `codes` are the exit statuses by rank.
    """

    returncode: int
    stdout: str
    stderr: str
    codes: list[int] = field(default_factory=list)

    def printed(self, word: str) -> list[str]:
        """Lines of the output that begin with `word`."""
        return [line for line in self.stdout.splitlines() if line.startswith(word)]


class Zygote:
    """The process that forks scripts, with these modules imported besides torch; see `tests/agent/zygote.py`."""

    def __init__(self, *modules: str) -> None:
        command = [sys.executable, str(Path(__file__).parent / "zygote.py"), *modules]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def start(self, argv: list[str], env: dict[str, str], folder: Path, ranks: int = 0) -> list[int]:
        """Fork a script, or all ranks of one that meet as under torchrun; the process ids."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._files = [(folder / f"stdout{rank}", folder / f"stderr{rank}") for rank in range(ranks or 1)]
        places = places_of(ranks) or [{}]
        processes = [
            {"env": env | place, "stdout": str(out), "stderr": str(err)}
            for place, (out, err) in zip(places, self._files, strict=True)
        ]
        self._process.stdin.write(json.dumps({"argv": argv, "processes": processes}) + "\n")
        self._process.stdin.flush()
        self._started: list[int] = list(json.loads(self._process.stdout.readline()))
        return self._started

    def wait(self) -> Done:
        """Wait for what was started last; what hangs is killed, so that one test fails and not all that follow."""
        assert self._process.stdout is not None
        hangs = threading.Timer(_PATIENCE_S, self._kill)
        hangs.start()
        try:
            statuses = json.loads(self._process.stdout.readline())
        finally:
            hangs.cancel()
        codes = [os.waitstatus_to_exitcode(status) for status in statuses]
        out, err = (
            "".join(path.read_text(errors="replace") for path in paths) for paths in zip(*self._files, strict=True)
        )
        return Done(codes[0], out, err, codes)

    def _kill(self) -> None:
        for child in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """One for all tests, since importing torch takes seconds."""
    made = Zygote()
    yield made
    made.close()


def places_of(ranks: int) -> list[dict[str, str]]:
    """What torchrun would set for each of `ranks` processes on this machine."""
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
def launch(environment: dict[str, str], zygote: Zygote, tmp_path: Path) -> Launch:
    """Run a script of `scripts/` in a new process, or in several as ranks; returns its output.

    `torchrun`: ranks are started by it, which takes seconds and ends one for another, and are forked without it.
    """

    def run(
        name: str, *arguments: str, ranks: int = 0, torchrun: bool = False, expect: int | None = 0, **variables: str
    ) -> Done:
        script, env = str(SCRIPTS / name), environment | variables
        if torchrun:
            start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            ended = subprocess.run([*start, script, *arguments], env=env, capture_output=True, text=True, timeout=90)
            done = Done(ended.returncode, ended.stdout, ended.stderr)
        else:
            zygote.start([script, *arguments], env, tmp_path, ranks)
            done = zygote.wait()
        if expect is not None:
            assert {done.returncode, *done.codes} == {expect}, done.stderr[-4000:]
        return done

    return run


@pytest.fixture(scope="session")
def alone(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Done]:
    """Run a script without a service, in a new process or in several as ranks; all must succeed."""

    def run(script: Path, *arguments: str, ranks: int = 0, **variables: str) -> Done:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TULA_")}
        clean |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": sys.path[0], **variables}
        zygote.start([str(script), *arguments], clean, tmp_path_factory.mktemp("alone"), ranks)
        done = zygote.wait()
        assert {*done.codes} == {0}, done.stderr[-4000:]
        return done

    return run


@pytest.fixture(scope="session")
def plain(alone: Callable[..., Done]) -> Callable[..., list[str]]:
    """The final weights of `train.py` with these arguments and no agent at all, on each rank."""
    known: dict[tuple[str | int, ...], list[str]] = {}

    def weights(*arguments: str, ranks: int = 0) -> list[str]:
        key = (ranks, *arguments)
        if key not in known:
            known[key] = alone(SCRIPTS / "train.py", *arguments, ranks=ranks).printed("weights")
            assert len(known[key]) == (ranks or 1)
        return known[key]

    return weights
