"""Manages a job's folder of logs, spools, checkpoints and training state, which one process at a time can lock."""

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
from typing import TypeVar

from pydantic import TypeAdapter

from tula_client._errors import LaunchError, UsageError

T = TypeVar("T")

_FOR_RAY = {"RAY_DEDUP_LOGS": "0"}
"""Stops Ray from merging lines that differ only in digits, which would hide the stacks of all ranks but one."""


def may_hold_files(folder: Path) -> bool:
    """Return True if `folder` contains a file at any depth, or may contain one in a folder that cannot be read."""
    errors: list[OSError] = []
    holds = any(files for _, _, files in os.walk(folder, onerror=errors.append))
    return holds or not all(isinstance(error, FileNotFoundError) for error in errors)


def rank_logs(log: Path) -> Path:
    """Return the folder for the output of all ranks except the first, given the launch's log (see `WorkDir.log`)."""
    return log.with_suffix("")


def _private(path: str, flags: int) -> int:
    """Open a file that only the user can access; use this function as the `opener` of `open`."""
    return os.open(path, flags, 0o600)


def _replace(path: Path, document: object) -> None:
    """Write a JSON document atomically, readable only by the user; a crash or a full disk leaves the old file."""
    new = path.with_name(f".{path.name}.new")
    with open(new, "w", opener=_private) as file:
        json.dump(document, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


class WorkDir:
    """A job's folder, whose contents outlive `tula` so that a repeated command can continue where it stopped."""

    def __init__(self, root: Path, job_id: str) -> None:
        self.path = (root / job_id).resolve()

    @contextmanager
    def locked(self) -> Iterator[str]:
        """Lock the folder; yield the name that holds this folder's leases, which stays the same after a restart.

        The kernel releases the lock when the process ends, even after kill -9, so a process that has the lock can treat
        earlier leases under that name as orphaned. Raises `LaunchError` if another process has the lock, and
        `UsageError` if the folder cannot be used.
        """
        try:
            self._make()
            lock = open(self.path / "lock", "a", opener=_private)  # noqa: SIM115 - closed below
        except OSError as error:
            raise UsageError(
                f"the folder {self.path} cannot be used ({error.strerror}): give another --work-dir"
            ) from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise LaunchError(
                    f"another tula process is using {self.path} for this job: wait for it, or give another --work-dir"
                ) from None
            try:
                holder = self._holder()
            except OSError as error:
                raise UsageError(
                    f"{self.path} cannot be written ({error.strerror}): free disk space, or give another --work-dir"
                ) from None
            yield holder

    def log(self, launch_id: str) -> Path:
        """Return the path of a launch's log; each launch has its own file, so that no earlier output is judged."""
        return self.path / "logs" / f"{launch_id}.log"

    def spool(self, run_id: str) -> Path:
        """Return the folder in which a run's agent keeps samples that it could not send."""
        return self.path / "spool" / run_id

    def checkpoints(self, training: int = 1) -> Path:
        """Return the checkpoint folder of the training run with this number; only restarts of that run share it."""
        return self.path / ("checkpoints" if training == 1 else f"checkpoints-{training}")

    def next_training(self) -> int:
        """Return the lowest training run number that has no checkpoints yet."""
        return next(n for n in count(1) if not may_hold_files(self.checkpoints(n)))

    def scratch(self, run_id: str) -> Path:
        """Return the checkpoint folder of a profiling run, whose checkpoints are never used."""
        return self.path / "scratch" / run_id

    def env_file(self, run_id: str, variables: dict[str, str]) -> Path:
        """Write a run's environment variables to a file that only the user can read, since they may contain a token."""
        path = self.path / "env" / f"{run_id}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, {"env_vars": {**_FOR_RAY, **variables}})
        return path

    def load(self, kind: type[T], name: str) -> T | None:
        """Return the state that was saved under `name`, or None if there is no valid state."""
        try:
            return TypeAdapter(kind).validate_python(json.loads((self.path / f"{name}.json").read_bytes()))
        except (OSError, ValueError):
            return None

    def save(self, name: str, state: object) -> None:
        """Save a state under `name`, replacing it atomically; a crash leaves either the old or the new state."""
        self._make()
        # The `json` module can also write an argument whose bytes are not valid UTF-8.
        _replace(self.path / f"{name}.json", TypeAdapter(type(state)).dump_python(state))

    def names(self, prefix: str) -> list[str]:
        """Return the names of the saved states that start with `prefix`."""
        return sorted(path.stem for path in self.path.glob(f"{prefix}*.json"))

    def delete(self, name: str) -> None:
        """Delete the state that was saved under `name`, if it exists."""
        (self.path / f"{name}.json").unlink(missing_ok=True)

    def _make(self) -> None:
        """Create the folder and, if needed, its parent, readable only by the user, since logs may contain secrets."""
        if not self.path.parent.exists():
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.mkdir(exist_ok=True)
        self.path.chmod(0o700)

    def _holder(self) -> str:
        if (holder := self.load(str, "holder")) is None:
            holder = f"{socket.gethostname()}-{uuid.uuid4().hex[:12]}"
            self.save("holder", holder)
        return holder
