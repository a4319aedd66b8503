"""Hooks that the agent registers once per process: its end, and an exception that ends it.

`sys.excepthook` and `sys.exit` are replaced because nothing else sees what they see: `atexit` functions are not given
the exception or the status. Both call what was there before.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

_exit_pid: int | None = None  # the process that an exit function is registered in; a forked child has its own
_watches_failures = False


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
