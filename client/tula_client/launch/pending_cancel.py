"""Stop commands of started runs, kept on disk so that a cluster job is cancelled even after a reboot.

When `tula` dies, the supervisor runs the stop command. When the whole machine died, the next `tula` in the same folder
does.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from tula_client.launch.workdir import WorkDir

_PREFIX = "submitted-"
_TIMEOUT_S = 30.0


def record(work: WorkDir, launch_id: str, stop_command: Sequence[str]) -> None:
    """Keep the stop command of a start that is about to happen."""
    work.save(_PREFIX + launch_id, {"stop_command": list(stop_command)})


def clear(work: WorkDir, launch_id: str) -> None:
    """Delete the stop command of a start that ended or was cancelled."""
    work.delete(_PREFIX + launch_id)


def cancel_pending(work: WorkDir, environment: Mapping[str, str]) -> list[str]:
    """Run every stop command that is left in `work`; the launch ids of those that succeeded.

    The caller holds the folder's lock, so no other `tula` supervises these starts. A stop command that fails is not
    repeated: most often its job is gone because the supervisor cancelled it.
    """
    cancelled = []
    for name in work.names(_PREFIX):
        words = (work.load(name) or {}).get("stop_command")
        if isinstance(words, list) and words and _succeeds([str(word) for word in words], environment):
            cancelled.append(name.removeprefix(_PREFIX))
        work.delete(name)
    return cancelled


def _succeeds(command: list[str], environment: Mapping[str, str]) -> bool:
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
