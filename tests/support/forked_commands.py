"""Forks `python`, `torchrun` and `tula`, for tests that do not depend on how an interpreter starts.

Put the folder `launchers()`, which contains the three programs, first on the PATH. torchrun reads the interpreter for
its ranks from PYTHON_EXEC.
"""

from __future__ import annotations

import atexit
import functools
from pathlib import Path

from benchmarks.support.fork_server import AGENT, ForkServer
from benchmarks.support.forked_programs import programs

__all__ = ["launchers"]

LAUNCHED = ("torch.distributed.run", "sklearn.datasets", "tula_client.cli.app")
"""Modules that torchrun, the example script and `tula` import."""


@functools.cache
def fork_server() -> ForkServer:
    """Return the fork server that a whole test run shares, since importing torch takes seconds."""
    made = ForkServer([*AGENT, *LAUNCHED], shared=True)
    atexit.register(made.close)
    return made


@functools.cache
def launchers() -> Path:
    """Return the folder with the three programs, which work until this process ends."""
    return programs(
        fork_server(), {"python": [], "torchrun": ["-m", "torch.distributed.run"], "tula": ["-m", "tula_client.cli"]}
    )
