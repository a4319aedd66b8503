"""Where a job's logs, spools, checkpoints and training state lie, held by one `tula` at a time."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from tula_client.launch._errors import WorkDirBusyError, WorkDirError

__all__ = ["WorkDir", "holds_files"]

_FOR_RAY = {"RAY_DEDUP_LOGS": "0"}
"""Ray takes lines that differ in digits only for the same one, and would show one rank's stack of many."""


def holds_files(folder: Path) -> bool:
    """True where a file lies below `folder`, or may: what cannot be read is not taken for nothing."""
    errors: list[OSError] = []
    return _any_file(folder, errors) or not all(isinstance(error, FileNotFoundError) for error in errors)


def _any_file(folder: Path, errors: list[OSError]) -> bool:
    """True where a file was seen below `folder`; what could not be looked at is added to `errors`."""
    return any(files for _, _, files in os.walk(folder, onerror=errors.append))


class WorkDir:
    """One folder per job; everything in it survives `tula`, so that the same command goes on where it stopped."""

    def __init__(self, root: Path, job_id: str) -> None:
        self.path = (root / job_id).resolve()

    @contextmanager
    def held(self) -> Iterator[str]:
        """Hold the folder; yields this folder's name as a lease holder, the same after a restart.

        The lock falls with the process, also by kill -9, so whoever holds it knows that leases under its name are
        orphans. Raises `WorkDirBusyError` while another process holds it, `WorkDirError` when it cannot be used.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / "lock").open("a")
        except OSError as error:
            raise WorkDirError(
                f"the folder {self.path} cannot be used ({error.strerror}): give another --work-dir"
            ) from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise WorkDirBusyError(
                    f"another tula is at work on this job in {self.path}: wait for it or give another --work-dir"
                ) from None
            yield self._holder()

    def log(self, launch_id: str) -> Path:
        """The log file of one start, so that no start is judged by what an earlier one printed."""
        return self.path / "logs" / f"{launch_id}.log"

    def spool(self, run_id: str) -> Path:
        """Where the agent keeps what it could not send yet."""
        return self.path / "spool" / run_id

    def checkpoints(self, training: int = 1) -> Path:
        """Where the script keeps the checkpoints of a training, shared by its restarts and by no other training."""
        return self.path / ("checkpoints" if training == 1 else f"checkpoints-{training}")

    def next_training(self) -> int:
        """The number of a training that has no checkpoints yet."""
        return next(n for n in count(1) if not _any_file(self.checkpoints(n), []))

    def scratch(self, run_id: str) -> Path:
        """A checkpoint folder for a profiling run, whose weights nobody needs."""
        return self.path / "scratch" / run_id

    def env_file(self, run_id: str, variables: dict[str, str]) -> Path:
        """Write this run's variables where only the user can read them (they may hold a token)."""
        path = self.path / "env" / f"{run_id}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"env_vars": {**_FOR_RAY, **variables}}, file)
        return path

    def load(self, name: str) -> dict[str, Any] | None:
        """A saved state, or None."""
        try:
            value = json.loads((self.path / f"{name}.json").read_text())
        except (OSError, ValueError):
            return None
        return value if isinstance(value, dict) else None

    def save(self, name: str, state: dict[str, Any]) -> None:
        """Replace a saved state at once, so that a crash leaves the old or the new one."""
        self.path.mkdir(parents=True, exist_ok=True)
        new = self.path / f".{name}.json.new"
        with new.open("w") as file:
            json.dump(state, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.path / f"{name}.json")

    def saved(self, prefix: str) -> list[str]:
        """Names of saved states that begin with `prefix`."""
        return sorted(path.stem for path in self.path.glob(f"{prefix}*.json"))

    def forget(self, name: str) -> None:
        """Drop a saved state."""
        (self.path / f"{name}.json").unlink(missing_ok=True)

    def _holder(self) -> str:
        path = self.path / "holder"
        if not path.exists():
            path.write_text(f"{socket.gethostname()}-{uuid.uuid4().hex[:12]}")
        return path.read_text()
