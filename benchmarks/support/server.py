"""Runs the service as users do: in a separate process, with a real port and a real database."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

import httpx
import psutil

from benchmarks.support import PYTHON, clean_environment
from tula_service.store import Store
from tula_service.store.migrations import upgrade_schema
from tula_service.usecases.access import ANONYMOUS, issue_token

_RUNNING = re.compile(r"running on (http://[^ ]+)")


class Process(Protocol):
    """The part of `subprocess.Popen` that a server needs."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def terminate(self) -> None: ...


class Server:
    """A separate process that runs `tula serve` on a free port; it is stopped at the end of the `with` block."""

    def __init__(
        self, database: str, *, workers: int = 1, port: int = 0, python: str = PYTHON, **settings: object
    ) -> None:
        self.database, self._workers = database, workers
        descriptor, self.log_file = tempfile.mkstemp(prefix="tula-serve-", suffix=".log")
        os.close(descriptor)
        environment = clean_environment(**{f"TULA_{name.upper()}": str(value) for name, value in settings.items()})
        arguments = ["serve", "--database", database, "--port", str(port), "--workers", str(workers)]
        self.process = self.start_process(python, arguments, environment)
        self.url = self._wait_for_address()

    def start_process(self, python: str, arguments: list[str], environment: dict[str, str]) -> Process:
        """Start `python -m tula_service ARGUMENTS` in a separate session; the log is written to `log_file`."""
        with Path(self.log_file).open("a") as log:
            return subprocess.Popen(
                [python, "-m", "tula_service", *arguments],
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    @property
    def port(self) -> int:
        """Return the port on which the service listens."""
        return int(self.url.rsplit(":", 1)[1])

    def log(self) -> str:
        """Return everything that the server has logged so far."""
        return Path(self.log_file).read_text(encoding="utf-8")

    def worker_ids(self) -> list[int]:
        """Return the ids of the processes that handle requests: the workers, or the only process."""
        if self._workers == 1:
            return [self.process.pid]
        return [child.pid for child in psutil.Process(self.process.pid).children() if _is_spawned(child)]

    def fit_ids(self) -> list[int]:
        """Return the ids of the processes that compute fits, of which each worker has one."""
        workers = [psutil.Process(pid) for pid in self.worker_ids()]
        return [child.pid for worker in workers for child in worker.children() if _is_spawned(child)]

    def kill(self) -> None:
        """Kill the whole process group without warning, as an out-of-memory killer does."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        Path(self.log_file).unlink(missing_ok=True)

    def stop(self) -> int:
        """Send the signal with which an orchestrator stops the service, and return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()
        Path(self.log_file).unlink(missing_ok=True)
        return self.process.wait(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()

    def _wait_for_address(self) -> str:
        ends = time.monotonic() + 60
        while time.monotonic() < ends:
            match = _RUNNING.search(self.log())
            if match is not None and _answers(match[1]):
                return match[1]
            if self.process.poll() is not None:
                raise RuntimeError(f"the service ended with exit status {self.process.returncode}: {self.log()}")
            time.sleep(0.05)
        self.kill()
        raise RuntimeError(f"the service did not start within a minute: {self.log()}")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one of the service's commands, and return its output and exit status when it ends."""
    return subprocess.run(
        [sys.executable, "-m", "tula_service", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=clean_environment(),
    )


def migrate(database: str) -> None:
    """Create the database's schema with the migrations."""
    store = Store.open(database)
    upgrade_schema(store.engine)
    store.close()


def make_token(database: str, scope: Literal["user", "admin"] = "user") -> str:
    """Create a token as an administrator, and return its secret."""
    store = Store.open(database)
    try:
        return issue_token(store, ANONYMOUS, name="test", scope=scope).secret
    finally:
        store.close()


def _is_spawned(process: psutil.Process) -> bool:
    try:
        return any("spawn_main" in part for part in process.cmdline())
    except psutil.Error:  # the process is ending
        return False


def _answers(url: str) -> bool:
    try:
        return httpx.get(url + "/readyz", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
