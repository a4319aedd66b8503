"""What launch commands have submitted elsewhere, written down so that not even a reboot leaves it running.

The guard cancels when `tula` dies; when the whole machine went, the next `tula` in the same folder does.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from tula_client.launch.workdir import WorkDir

__all__ = ["cancel_left", "forget", "remember"]

_PREFIX = "submitted-"
_WITHIN_S = 30.0


def remember(work: WorkDir, launch_id: str, stop_command: Sequence[str]) -> None:
    """Before the start: how to cancel it."""
    work.save(_PREFIX + launch_id, {"stop_command": list(stop_command)})


def forget(work: WorkDir, launch_id: str) -> None:
    """It has ended, or has been cancelled."""
    work.forget(_PREFIX + launch_id)


def cancel_left(work: WorkDir, environment: Mapping[str, str]) -> list[str]:
    """Cancel what an earlier `tula` left, with each one's own stop command; names of what was cancelled.

    The caller holds the folder, so nobody watches these any more. One that fails is not tried again: most often there
    is nothing to cancel, because the guard has been quicker.
    """
    cancelled = []
    for name in work.saved(_PREFIX):
        state = work.load(name) or {}
        words = state.get("stop_command")
        if isinstance(words, list) and words:
            try:
                done = subprocess.run(
                    [str(word) for word in words],
                    env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True, timeout=_WITHIN_S,
                )  # fmt: skip
            except (OSError, subprocess.TimeoutExpired):
                done = None
            if done is not None and done.returncode == 0:
                cancelled.append(name.removeprefix(_PREFIX))
        work.forget(name)
    return cancelled
