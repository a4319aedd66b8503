"""Start, watch and stop one launched command, so that nothing of it outlives `tula`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tula_client.launch import guard
from tula_client.launch._errors import CommandNotFoundError

__all__ = ["Process", "Started", "start"]

_MARGIN_S = 45.0
"""What the guard may need beyond the grace period: its stop command, a dump of stacks, and SIGKILL."""


class Started(Protocol):
    """What the loops need of a started command."""

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""

    def request_stop(self) -> None:
        """Ask for an orderly end and return at once."""

    def dump_stacks(self) -> None:
        """Ask every rank to print its stacks and return at once."""

    def stop(self) -> int:
        """End it and everything below it; the exit status."""


class Process:
    """One command under its guard (see `guard`), with all output in one log file."""

    def __init__(self, guarded: subprocess.Popen[bytes], grace_s: float) -> None:
        self._guarded = guarded
        self._grace_s = grace_s

    @property
    def pid(self) -> int:
        """Process id of the guard."""
        return self._guarded.pid

    def poll(self) -> int | None:
        """Exit status, 128 + n for signal n; None while it runs."""
        status = self._guarded.poll()
        return status if status is None or status >= 0 else 128 - status

    def dump_stacks(self) -> None:
        """Make each rank print its stacks into the log; ends the ranks. Returns at once."""
        self._order(b"d")

    def request_stop(self) -> None:
        """Ask for SIGTERM, the grace period, SIGKILL; returns at once."""
        self._order(b"s")

    def stop(self) -> int:
        """End the command and everything below it; the exit status."""
        self.request_stop()
        try:
            self._guarded.wait(timeout=self._grace_s + _MARGIN_S)
        except subprocess.TimeoutExpired:
            self._guarded.kill()
            self._guarded.wait()
        self._close()
        return self.poll() or 0

    def _order(self, letter: bytes) -> None:
        if self._guarded.stdin is not None and self._guarded.poll() is None:
            try:
                self._guarded.stdin.write(letter)
                self._guarded.stdin.flush()
            except BrokenPipeError:
                return

    def _close(self) -> None:
        if self._guarded.stdin is not None:
            self._guarded.stdin.close()

    def __del__(self) -> None:
        self._close()


def start(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    grace_s: float = 10.0,
    stop_command: Sequence[str] | None = None,
) -> Process:
    """Start `command` in a session of its own, output appended to `log`.

    `stop_command` cancels what a submitting command (`sbatch --wait`, `kubectl`) left running elsewhere.
    Raises `CommandNotFoundError` when the first word of either is no program here.
    """
    for what, words in (("command", command), ("stop command", stop_command)):
        if words and shutil.which(words[0], path=environment.get("PATH")) is None:
            raise CommandNotFoundError(
                f"the {what} {words[0]!r} was not found on this machine: check its spelling or install it"
            )
    options = ["--grace", str(grace_s)]
    if stop_command:
        options += ["--stop-command", json.dumps(list(stop_command))]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        guarded = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, *options, "--", *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
    return Process(guarded, grace_s)
