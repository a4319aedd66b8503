"""Progress of a plan in the terminal: active runs, remaining runs, and the estimated time."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from typing_extensions import Self

from tula_client.cli import format
from tula_client.cli.eta import seconds_left
from tula_client.launch.judge import Outcome
from tula_wire import Configuration, Job, Run

_WORDS = {"succeeded": "measured", "out_of_memory": "out of memory", "failed": "failed", "cancelled": "cancelled"}


class ProgressReporter:
    """Draws a progress bar on a terminal; prints plain lines to a file."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._running: dict[str, Configuration] = {}
        self._job: Job | None = None
        self._began: dict[str, float] = {}
        self._took_s: dict[str, float] = {}
        self._last_reason = ""

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def job(self, job: Job) -> None:
        """Update the bar."""
        self._job = job
        if self._task is None:
            self._task = self._progress.add_task("", total=None)
        self._progress.update(self._task, completed=job.runs_done, total=max(job.runs_planned, job.runs_done))
        self._describe()

    def started(self, run: Run, log: Path) -> None:
        """Print the run that starts."""
        self._running[run.id] = run.configuration
        self._began[run.id] = time.monotonic()
        purpose = f" ({run.purpose.rstrip('.')})" if run.purpose else ""
        purpose += f", log {log}" if self._console.is_terminal else ""
        self._console.print(
            f"[dim]start[/]     {format.configuration(run.configuration)}[dim]{purpose}[/]", highlight=False
        )
        self._describe()

    def finished(self, run: Run, outcome: Outcome, log: Path, took_s: float) -> None:
        """Print one line per run; for a failed one also its log and the last lines with an error."""
        self._running.pop(run.id, None)
        self._took_s[run.id] = took_s
        word = _WORDS.get(outcome.state, outcome.state)
        word = "trained" if (run.kind, outcome.state) == ("train", "succeeded") else word
        colour = "green" if outcome.state == "succeeded" else "yellow" if outcome.state == "out_of_memory" else "red"
        self._console.print(
            f"[{colour}]{word:<9}[/] {format.configuration(run.configuration)} in {took_s:.1f} s", highlight=False
        )
        if outcome.state != "succeeded" and outcome.message:
            self._console.print(f"          {outcome.message}", highlight=False, markup=False)
            for line in outcome.lines:
                self._console.print(f"          | {line}", highlight=False, markup=False)
            self._console.print(f"          log: {log}", highlight=False, markup=False, soft_wrap=True)
        self._describe()

    def waiting(self, reason: str) -> None:
        """Print the reason, unless it is the last one printed."""
        if reason != self._last_reason:
            self._last_reason = reason
            self._console.print(f"waiting   {reason}", highlight=False, markup=False)

    def note(self, text: str) -> None:
        """Print the message."""
        self._console.print(f"note      {text}", highlight=False, markup=False)

    def _describe(self) -> None:
        if self._task is None:
            return
        now = (
            ", ".join(format.configuration(configuration) for configuration in self._running.values())
            or "nothing running"
        )
        left = 0 if self._job is None else self._job.runs_planned - self._job.runs_done
        self._progress.update(self._task, description=now + (self._remaining(left) if left > 0 else ""))

    def _remaining(self, left: int) -> str:
        clock = time.monotonic()
        elapsed_s = {run_id: clock - self._began[run_id] for run_id in self._running}
        seconds = None if self._job is None else seconds_left(self._job, self._took_s, elapsed_s)
        return f"; {left} left" + ("" if seconds is None else f", about {format.seconds(seconds)}")
