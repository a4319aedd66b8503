"""Forking versions of `python`, `torchrun` and `tula`, for tests that claim nothing about how an interpreter starts.

`launchers` is a folder with the three, to put first in a PATH; torchrun reads the interpreter for its ranks from
PYTHON_EXEC.
"""

from __future__ import annotations

import atexit
import functools
from pathlib import Path

from benchmarks.support.fork_server import AGENT, ForkServer
from benchmarks.support.forked_programs import programs

__all__ = ["launchers"]

LAUNCHED = ("torch.distributed.run", "sklearn.datasets", "tula_client.cli.app")
"""Modules that torchrun, the example that it starts, and `tula` import."""


@functools.cache
def fork_server() -> ForkServer:
    """Return one fork server for all tests of this process, since importing torch takes seconds."""
    made = ForkServer([*AGENT, *LAUNCHED])
    atexit.register(made.close)
    return made


@functools.cache
def launchers() -> Path:
    """Return the folder with the programs, served until this process ends."""
    return programs(
        fork_server(), {"python": [], "torchrun": ["-m", "torch.distributed.run"], "tula": ["-m", "tula_client.cli"]}
    )
