"""What launching tells whoever watches: a terminal, a test, or nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from tula_client.launch.outcome import Outcome
from tula_wire import Job, Run

__all__ = ["Reporter", "Silent"]


class Reporter(Protocol):
    """Told of everything that happens, in order; must not raise."""

    def job(self, job: Job) -> None:
        """The job as it now stands: its plan and how much of it is done."""

    def started(self, run: Run, log: Path) -> None:
        """A run's command was started."""

    def finished(self, run: Run, outcome: Outcome, log: Path, took_s: float) -> None:
        """A run's command ended and was judged."""

    def waiting(self, reason: str) -> None:
        """Nothing to do for now."""

    def note(self, text: str) -> None:
        """Something a person should know."""


class Silent:
    """Says nothing."""

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
