"""Where `tula tune` and `tula run` report progress."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from tula_client.launch.judge import Outcome
from tula_wire import Job, Run


class Reporter(Protocol):
    """Called for every event, in order; must not raise."""

    def job(self, job: Job) -> None:
        """The job changed: its plan, or how much of it is done."""

    def started(self, run: Run, log: Path) -> None:
        """The command of a run was started."""

    def finished(self, run: Run, outcome: Outcome, log: Path, took_s: float) -> None:
        """The command of a run ended and was judged."""

    def waiting(self, reason: str) -> None:
        """Nothing can be started at present."""

    def note(self, text: str) -> None:
        """A message for the user."""


class Silent:
    """Reports nothing."""

    def job(self, job: Job) -> None:
        """Ignore."""

    def started(self, run: Run, log: Path) -> None:
        """Ignore."""

    def finished(self, run: Run, outcome: Outcome, log: Path, took_s: float) -> None:
        """Ignore."""

    def waiting(self, reason: str) -> None:
        """Ignore."""

    def note(self, text: str) -> None:
        """Ignore."""
