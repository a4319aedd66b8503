"""Prints the progress of `tula tune` and `tula run`: runs, the remaining plan, and messages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from tula_client.launch.judge import Outcome
from tula_client.launch.workdir import rank_logs
from tula_wire import Configuration, Job, Run
from tula_wire.format import configuration, duration, money
from tula_wire.jobs import ProfilingCost
from tula_wire.precision import FEWEST_STEPS

_WORDS = {"succeeded": "measured", "out_of_memory": "out of memory", "failed": "failed", "cancelled": "cancelled"}


class Reporter:
    """Draws a progress bar on a terminal, and prints plain lines to a file.

    With `quiet`, the output of training commands is hidden; with a quiet console, nothing is printed. The methods are
    called for every event, in order, and must not raise exceptions.
    """

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console = console
        self._quiet = quiet
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=console.quiet or not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=None, visible=False)
        self._running: dict[str, Configuration] = {}
        self._job: Job | None = None
        self._job_known_at = 0.0
        self._last_reason = ""

    @property
    def is_quiet(self) -> bool:
        """Return True if the reporter prints nothing."""
        return self._console.quiet

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def job(self, job: Job) -> None:
        """Update the progress bar after the job has changed, and print the remaining plan with its cost."""
        self._job, self._job_known_at = job, time.monotonic()
        self._describe()
        if job.profiling_cost.launches_left:
            self._console.print(f"plan      {rest_of_plan(job.profiling_cost)}", highlight=False)

    def started(self, run: Run, log: Path) -> None:
        """Print the configuration and purpose of a run that was started."""
        self._running[run.id] = run.configuration
        purpose = escape(f" ({run.purpose.rstrip('.')})") if run.purpose else ""
        self._console.print(f"[dim]start[/]     {configuration(run.configuration)}[dim]{purpose}[/]", highlight=False)
        if run.kind == "train" or self._console.is_terminal:
            self._console.print(f"[dim]          log: {escape(_place(log))}[/]", highlight=False, soft_wrap=True)
        self._describe()

    def output(self, lines: Sequence[str]) -> None:
        """Print new output of a training run's command."""
        for line in lines if not self._quiet else ():
            self._console.print(Text.from_ansi(line), soft_wrap=True)

    def finished(self, run: Run, outcome: Outcome, log: Path, took_s: float) -> None:
        """Print one line about a run that has ended and, after a failure, the path and the last lines of its log.

        `took_s` is the duration of the launch in seconds, or 0 for the runs of its smaller batches.
        """
        self._running.pop(run.id, None)
        word = _WORDS.get(outcome.state, outcome.state)
        word = "trained" if (run.kind, outcome.state) == ("train", "succeeded") else word
        colour = "green" if outcome.state == "succeeded" else "yellow" if outcome.state == "out_of_memory" else "red"
        step = f": {duration(run.step_time_s)} a step" if run.step_time_s is not None else ""
        took = f" in {took_s:.1f} s" if took_s >= 0.05 else ""
        text = f"{configuration(run.configuration)}{step}{_cut_short(run)}{took}"
        self._console.print(f"[{colour}]{word:<9}[/] {text}", highlight=False)
        if outcome.state != "succeeded" and outcome.message:
            self._console.print(f"          {outcome.message}", highlight=False, markup=False)
            for line in outcome.lines:
                self._console.print(f"          | {line}", highlight=False, markup=False)
            self._console.print(f"          log: {_place(log)}", highlight=False, markup=False, soft_wrap=True)
        self._describe()

    def waiting(self, reason: str) -> None:
        """Print the reason why no run can be started now, unless it equals the last reason that was printed."""
        if reason != self._last_reason:
            self._last_reason = reason
            self._console.print(f"waiting   {reason}", highlight=False, markup=False)

    def note(self, text: str) -> None:
        """Print a message for the user."""
        self._console.print(f"note      {text}", highlight=False, markup=False)

    def _describe(self) -> None:
        """Show the runs in progress and the remaining plan in the progress bar, if the job is already known."""
        job = self._job
        if job is None:
            return
        text = ", ".join(configuration(running) for running in self._running.values()) or "nothing running"
        left = job.runs_planned - job.runs_done
        if left > 0:
            seconds = job.profiling_cost.left_s / max(1, len(self._running)) - (time.monotonic() - self._job_known_at)
            text += f"; {left} left, about {duration(max(0.0, seconds))}"
        total = max(job.runs_planned, job.runs_done)
        self._progress.update(self._task, description=text, completed=job.runs_done, total=total, visible=True)


def _cut_short(run: Run) -> str:
    """Return text such as `, 4 of 16 steps` if a profiling run measured too few steps for a precise step time."""
    planned = 0 if run.instruction is None else min(FEWEST_STEPS, run.instruction.measuring_steps)
    if run.instruction is None or not 0 < (run.num_steps or 0) < planned:
        return ""
    return f", {run.num_steps} of {run.instruction.measuring_steps} steps"


def _place(log: Path) -> str:
    """Return the path of a log and, if it exists, the path of the folder with the logs of the other ranks."""
    ranks = rank_logs(log)
    return f"{log} (logs of other ranks: {ranks})" if ranks.is_dir() else str(log)


def rest_of_plan(cost: ProfilingCost) -> str:
    """Return a description of the remaining plan, such as `2 launches, 8 configurations, about 3 min 20 s and $0.21`.

    The text includes the cost if there are prices, and an upper bound on the total if the search may add launches.
    """

    def words(launches: int, seconds: float, usd: float | None, between: str) -> str:
        priced = "" if usd is None else f" and {money(usd)}"
        return f"{launches} launch{'es' if launches > 1 else ''}{between}{duration(seconds)}{priced}"

    runs = f", {cost.runs_left} configurations" if cost.runs_left > cost.launches_left else ""
    left = words(cost.launches_left, cost.left_s, cost.left_usd, f"{runs}, about ")
    if cost.launches_at_most <= cost.launches_left:
        return left
    most = words(cost.launches_at_most, cost.at_most_s, cost.at_most_usd, ", ")
    return f"{left}; including launches that the search may add: at most {most}"
