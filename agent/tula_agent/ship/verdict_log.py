"""Logs a verdict on the speed of a training run, after 100 steps and at the end of the run."""

from __future__ import annotations

from collections import deque
from typing import Any, Final, NamedTuple

from tula_agent.guard import logger
from tula_wire.host_facts import HostFacts
from tula_wire.memory_breakdown import MemoryBreakdown
from tula_wire.verdict import Steps, diagnose, sentence

SAID_AFTER_STEPS: Final = 100
"""Number of steps after which the verdict is logged; only the service gives a verdict on shorter runs."""
_KEPT: Final = 1000
"""Maximum number of steps that the verdict uses; the service has the same limit."""
_QUIET: Final = ("compute_bound", "healthy")
"""Diagnoses that require no change, which are logged as information and not as warnings."""


class StepRow(NamedTuple):
    """Times of one measured step in seconds, with the fields of `Steps`; None marks times that were not measured."""

    step_time_s: float
    input_time_s: float | None
    exposed_comm_time_s: float | None
    skew_s: float | None
    straggler_rank: int | None


class VerdictLog:
    """Collects a training run's steps as measured by the first rank, and logs the verdict on these steps."""

    def __init__(self) -> None:
        self._rows: deque[StepRow] = deque(maxlen=_KEPT)
        self._newest = 0
        self._said_at: int | None = None
        self._memory: dict[str, Any] | None = None

    def add(self, step: int, row: StepRow) -> None:
        """Add a step after the warm-up."""
        self._rows.append(row)
        self._newest = max(self._newest, step)

    def add_memory(self, memory: dict[str, Any]) -> None:
        """Store the latest memory reading, keyed by the field names of `MemoryBreakdown`."""
        self._memory = memory

    def say_when_due(self, host: dict[str, Any], *, last: bool) -> None:
        """Log the verdict once after SAID_AFTER_STEPS, and again at the end of a longer run.

        host: facts keyed by the field names of `HostFacts`. If there are too few measurements for a diagnosis, log
        nothing.
        """
        due = self._newest >= SAID_AFTER_STEPS and (self._said_at is None or (last and self._newest > self._said_at))
        if not due:
            return
        self._said_at = self._newest
        columns = (list(column) for column in zip(*self._rows, strict=True))
        memory = None if self._memory is None else MemoryBreakdown(**self._memory)
        verdict = diagnose(Steps(*columns), HostFacts(**host), memory)
        if verdict.diagnosis != "unknown":
            when, text = "at the end, after" if last else "after", sentence(verdict)
            say = logger.info if verdict.diagnosis in _QUIET else logger.warning
            say("%s %d steps: %s", when, self._newest, text)
