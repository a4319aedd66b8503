"""Forks `tula serve` for tests that do not depend on how the service starts."""

from __future__ import annotations

import atexit
import functools
from pathlib import Path

from benchmarks.support import PYTHON, server
from benchmarks.support.fork_server import SERVICE, ForkServer
from benchmarks.support.forked_programs import programs


@functools.cache
def fork_server() -> ForkServer:
    """Return the fork server for services; all tests of a run share it, since importing the service takes seconds."""
    made = ForkServer(SERVICE, PYTHON, shared=True)
    atexit.register(made.close)
    return made


@functools.cache
def spawns() -> Path:
    """Return a program that forks a service, or the process that computes its fits, with all modules imported."""
    return programs(fork_server(), {"python": []}, spawns="python") / "python"


class Server(server.Server):
    """A service in a separate process, which is forked unless it needs several workers or another interpreter."""

    def start_process(self, python: str, arguments: list[str], environment: dict[str, str]) -> server.Process:
        """Fork the service, or start it with `python` if it needs several workers or another interpreter."""
        if python != PYTHON or arguments[-1] != "1":
            return super().start_process(python, arguments, environment)
        words = ["-m", "tula_service", *arguments]
        return fork_server().start(words, environment, self.log_file, spawns=spawns())
