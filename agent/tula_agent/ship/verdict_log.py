"""Logs a verdict on the speed of a training run after 100 steps and at its end."""

from __future__ import annotations

from collections import deque
from typing import Any, Final, NamedTuple

from tula_agent.guard import logger
from tula_wire.host_facts import HostFacts
from tula_wire.memory_breakdown import MemoryBreakdown
from tula_wire.verdict import Steps, diagnose, sentence

SAID_AFTER_STEPS: Final = 100
"""Steps after which the verdict is logged; if a run ends earlier, only the service has its verdict."""
_KEPT: Final = 1000
"""Most steps that the verdict uses, as in the service."""
_QUIET: Final = ("compute_bound", "healthy")
"""Diagnoses without anything to change, which are logged as information rather than warnings."""


class StepRow(NamedTuple):
    """The times of one measured step in seconds, with the fields of `Steps`; None if communication was not measured."""

    step_time_s: float
    input_time_s: float | None
    exposed_comm_time_s: float | None
    skew_s: float | None
    straggler_rank: int | None


class VerdictLog:
    """Collects the first rank's measured steps of a training run, and logs the verdict on them."""

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
        """Store the newest memory reading, by the names of a `MemoryBreakdown`."""
        self._memory = memory

    def say_when_due(self, host: dict[str, Any], *, last: bool) -> None:
        """Log the verdict once after SAID_AFTER_STEPS, and again at the end of a longer run.

        host: facts by the names of `HostFacts`. Logs nothing if there are too few measurements for a diagnosis.
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
