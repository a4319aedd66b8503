"""Starts `python -m MODULE` in a fraction of a second: a parent that has imported what the module imports forks it.

Run as a program, it is that parent. Its arguments are a folder and the modules to import. It reads one JSON object a
line: module, argv, env and a file for stdout and stderr. For each it answers the process id in a line. When a child
ends, its exit status goes into the file `<pid>` of the folder. The child is what `python -m` would have started: a
process with a separate session, environment and files, whose signals, `atexit` functions and exit status are the
module's.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SERVICE = (
    "tula_service.app",
    "tula_service.cli",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.httptools_impl",
    "uvloop",
    "altair",
    "scipy.stats",
    "scipy.optimize",
    "psycopg",
)


class ForkedProcess:
    """A forked process, with the part of `subprocess.Popen` that tests need."""

    def __init__(self, pid: int, status: Path) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        """The exit status as `subprocess` has it; None while the process runs."""
        if self.returncode is None and self._status.exists() and (text := self._status.read_text()):
            self.returncode = os.waitstatus_to_exitcode(int(text))
            self._status.unlink()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raises `subprocess.TimeoutExpired`."""
        ends = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if timeout is not None and ends is not None and time.monotonic() > ends:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)


class ForkServer:
    """The parent process, which has imported `modules`; ends with `close` or with this process."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tula-forks-")
        self._parent = subprocess.Popen(
            [sys.executable, __file__, self._folder.name, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def start(self, module: str, argv: Sequence[str], env: dict[str, str], log: str) -> ForkedProcess:
        """Fork `python -m MODULE ARGV`, which appends its output to the file `log`."""
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write(json.dumps({"module": module, "argv": list(argv), "env": env, "log": log}) + "\n")
        self._parent.stdin.flush()
        pid = int(self._parent.stdout.readline())
        return ForkedProcess(pid, Path(self._folder.name) / str(pid))

    def close(self) -> None:
        """End the parent; it no longer waits for children that still run."""
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.close()
        self._parent.wait(10)
        self._parent.stdout.close()
        self._folder.cleanup()


def serve_forks(folder: Path, modules: Sequence[str]) -> None:
    """Fork a module for each line of standard input, until it ends."""
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a child does not copy pages that its collector never visits

    def keep_statuses(*_: object) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            draft = folder / f"{pid}.draft"
            draft.write_text(str(status))
            draft.rename(folder / str(pid))

    signal.signal(signal.SIGCHLD, keep_statuses)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            become(order)
            return
        print(pid, flush=True)


def become(order: dict[str, Any]) -> None:
    """Turn this fork into `python -m MODULE`."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.environ.clear()
    os.environ.update(order["env"])
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND)
    for descriptor, target in ((os.open(os.devnull, os.O_RDWR), 0), (log, 1), (log, 2)):
        os.dup2(descriptor, target)
    sys.argv = [order["module"], *order["argv"]]
    sys.path[0] = ""
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve_forks(Path(sys.argv[1]), sys.argv[2:])
