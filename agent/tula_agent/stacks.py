"""The stack of every thread of this rank, shown shortly before the launcher ends a run at its time limit.

`tula` has the ranks on its own machine print theirs; a rank on another node, or under a launcher that only submits,
shows its own, since nothing of ours reaches it there. No network and no cooperation of a stuck main thread is needed.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import threading
import time
from typing import Final

__all__ = ["show", "show_at"]

_THREAD: Final = "tula-stacks"
_STDERR: Final = 2


def show_at(at_s: float, rank: int) -> None:
    """Show the stacks of this process on standard error at `at_s` (Unix time, s), if it still lives; once per process.

    The thread that waits is a daemon, holds nothing of the job, and ends with the process.
    """
    if any(thread.name == _THREAD for thread in threading.enumerate()):
        return
    threading.Thread(target=_wait, args=(at_s, rank), name=_THREAD, daemon=True).start()


def _wait(at_s: float, rank: int) -> None:
    while (left := at_s - time.time()) > 0:
        time.sleep(min(left, 60.0))  # so that a clock that is set meanwhile counts
    show(rank)


def show(rank: int) -> None:
    """Write the stacks of all threads to standard error; `tula` looks for the first line in the run's log."""
    where = f"process {os.getpid()} on {socket.gethostname()}"
    # To the descriptor, since frameworks put objects without one in the place of sys.stderr.
    os.write(_STDERR, f"\ntula: stack of rank {rank} ({where}) near its time limit:\n".encode())
    faulthandler.dump_traceback(_STDERR)
