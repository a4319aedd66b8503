"""Hooks that the agent registers once per process: its end, an exception that ends it, and a stack near a time limit.

`sys.excepthook` and `sys.exit` are replaced because nothing else sees what they see: `atexit` functions are not given
the exception or the status. Both call what was there before.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

_STDERR = 2
_exit_pid: int | None = None  # the process that an exit function is registered in; a forked child has its own
_watches_failures = False
_dumps_stacks_pid: int | None = None


def on_exit(function: Callable[[], None]) -> None:
    """Call `function` at the end of this process, not of a child forked from it. Only the first call counts."""
    global _exit_pid
    if _exit_pid == os.getpid():
        return
    _exit_pid = pid = os.getpid()

    def in_same_process() -> None:
        if os.getpid() == pid:
            function()

    atexit.register(in_same_process)


def on_failure(on_exception: Callable[[BaseException], None], on_status: Callable[[Any], None]) -> None:
    """Call `on_exception` with one that ends this process, `on_status` with what the main thread gives `sys.exit`.

    Only the first call counts. The functions must not raise.
    """
    global _watches_failures
    if _watches_failures:
        return
    _watches_failures = True
    previous_hook, previous_exit = sys.excepthook, sys.exit

    def hook(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        if os.getpid() == _exit_pid:
            on_exception(error)
        previous_hook(kind, error, at)

    def exit(status: Any = None, /) -> NoReturn:
        if threading.current_thread() is threading.main_thread():
            on_status(status)
        previous_exit(status)

    sys.excepthook = hook
    sys.exit = exit


def dump_stacks_at(at_s: float, rank: int) -> None:
    """Write the stack of every thread to standard error at `at_s` (Unix time, seconds), if this process still runs.

    Only the first call in a process counts. `tula` dumps the stacks of ranks on its own machine; ranks on other nodes
    dump theirs. A thread writes the rank's number next to them, which `faulthandler.dump_traceback_later` cannot.
    """
    global _dumps_stacks_pid
    if _dumps_stacks_pid == os.getpid():
        return
    _dumps_stacks_pid = os.getpid()
    from socket import gethostname  # milliseconds, which a run without a time limit need not spend

    threading.Thread(target=_dump_stacks, args=(at_s, rank, gethostname()), name="tula-stacks", daemon=True).start()


def _dump_stacks(at_s: float, rank: int, host: str) -> None:
    while (left := at_s - time.time()) > 0:
        time.sleep(min(left, 60.0))  # a clock that is corrected meanwhile counts, and no time is too far for `sleep`
    # `tula` searches the run's log for this line. To the descriptor, since frameworks replace sys.stderr.
    head = f"tula: stack of rank {rank} (process {os.getpid()} on {host}) near its time limit:"
    os.write(_STDERR, f"\n{head}\n".encode())
    faulthandler.dump_traceback(_STDERR)
