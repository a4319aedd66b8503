"""Progress of a plan in the terminal: active runs, remaining runs, and the estimated time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from tula_client.cli import format
from tula_client.launch.judge import Outcome
from tula_client.launch.run_loop import Reporter
from tula_wire import Configuration, Job, Run

_OPEN = ("pending", "claimed", "running")
_WORDS = {"succeeded": "measured", "out_of_memory": "out of memory", "failed": "failed", "cancelled": "cancelled"}


class ProgressReporter(Reporter):
    """Draws a progress bar on a terminal; prints plain lines to a file. `quiet`: not what a training writes."""

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
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._running: dict[str, Configuration] = {}
        self._job: Job | None = None
        self._began: dict[str, float] = {}
        self._took_s: dict[str, float] = {}
        self._last_reason = ""
        self._printed_plans: set[bool] = set()

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
        self._print_plan(job)

    def started(self, run: Run, log: Path) -> None:
        """Print the run that starts."""
        self._running[run.id] = run.configuration
        self._began[run.id] = time.monotonic()
        purpose = f" ({run.purpose.rstrip('.')})" if run.purpose else ""
        self._console.print(
            f"[dim]start[/]     {format.configuration(run.configuration)}[dim]{purpose}[/]", highlight=False
        )
        if run.kind == "train" or self._console.is_terminal:
            self._console.print(f"[dim]          log: {escape(str(log))}[/]", highlight=False, soft_wrap=True)
        self._describe()

    def output(self, lines: Sequence[str]) -> None:
        """Print what the training has written."""
        for line in lines if not self._quiet else ():
            self._console.print(Text.from_ansi(line), soft_wrap=True)

    def finished(self, run: Run, outcome: Outcome, log: Path, took_s: float) -> None:
        """Print one line per run; for a failed one also its log and the last lines with an error."""
        self._running.pop(run.id, None)
        self._took_s[run.id] = took_s
        word = _WORDS.get(outcome.state, outcome.state)
        word = "trained" if (run.kind, outcome.state) == ("train", "succeeded") else word
        colour = "green" if outcome.state == "succeeded" else "yellow" if outcome.state == "out_of_memory" else "red"
        step = f": {format.seconds(run.step_time_s)} a step" if run.step_time_s is not None else ""
        took = f" in {took_s:.1f} s" if took_s >= 0.05 else ""
        self._console.print(
            f"[{colour}]{word:<9}[/] {format.configuration(run.configuration)}{step}{took}", highlight=False
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

    def _print_plan(self, job: Job) -> None:
        """Print what is left of a plan of columns: before the first launch, and once the cost of one is known."""
        known = launches_left(job, self._took_s) is not None
        text = plan_text(job, self._took_s)
        if job.spec.profiling.columns and text and known not in self._printed_plans:
            self._printed_plans.add(known)
            self._console.print(f"plan      {text}", highlight=False)

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


def seconds_left(job: Job, took_s: Mapping[str, float], elapsed_s: Mapping[str, float]) -> float | None:
    """Seconds until every run of the plan has ended; None before the first has.

    took_s: durations of the runs that this `tula` has seen end; the largest batch of a launch has the whole launch's.
    elapsed_s: seconds since the start of each active launch; as many are assumed active until the end.
    """
    expected = launches_left(job, took_s)
    if expected is None:
        return None
    total_s = sum(max(0.0, each.seconds - sum(elapsed_s.get(run.id, 0.0) for run in each.runs)) for each in expected)
    return total_s / max(1, len(elapsed_s))


@dataclass(frozen=True)
class LaunchLeft:
    """Runs that one launch will measure, and how long it is expected to take, start-up included."""

    runs: tuple[Run, ...]
    seconds: float


def launches_left(job: Job, took_s: Mapping[str, float]) -> list[LaunchLeft] | None:
    """The launches that are left of the plan; None before the first has ended.

    Estimates start-up time by the median so far, and steps by the fraction of planned steps that earlier runs needed.
    Without a predicted step time, a launch takes the average duration.
    """
    launches = _launches(job)
    ended = [runs for runs in launches if any(took_s.get(run.id) for run in runs)]
    if not ended:
        return None
    duration_s = [max(took_s.get(run.id, 0.0) for run in runs) for runs in ended]
    measured = [run for run in job.plan if run.id in took_s and run.step_time_s is not None and _steps(run)]
    around_s = share = None
    if measured:
        in_steps = [sum(_needed(run) * (run.step_time_s or 0.0) for run in runs) for runs in ended]
        pairs = zip(duration_s, in_steps, strict=True)
        around_s = median([max(0.0, took - steps_s) for took, steps_s in pairs if steps_s > 0.0] or [0.0])
        share = fmean(_needed(run) / _steps(run) for run in measured)
    found = []
    for runs in launches:
        left = tuple(run for run in runs if run.state in _OPEN and run.id not in took_s)
        expected_s = fmean(duration_s)
        predicted = [run.predicted_step_time_s for run in left]
        if around_s is not None and share is not None and None not in predicted:
            expected_s = around_s + share * sum(_steps(run) * (run.predicted_step_time_s or 0.0) for run in left)
        if left:
            found.append(LaunchLeft(left, expected_s))
    return found


def plan_text(job: Job, took_s: Mapping[str, float]) -> str:
    """What is left of a plan: `8 runs in 2 launches, about 3 min 20 s and $0.21`; empty where nothing is.

    Time and money, where the job has prices, are known once a launch has ended.
    """
    waiting = [[run for run in runs if run.state in _OPEN] for runs in _launches(job)]
    runs, launches = sum(map(len, waiting)), sum(map(bool, waiting))
    if not launches:
        return ""
    text = f"{runs} run{'s' if runs > 1 else ''} in {launches} launch{'es' if launches > 1 else ''}"
    expected = launches_left(job, took_s)
    if not expected:
        return text
    text += f", about {format.seconds(sum(each.seconds for each in expected))}"
    prices = {cluster.instance_type: cluster.price.usd_per_node_hour for cluster in job.spec.cluster}
    usd = 0.0
    for each in expected:
        configuration = each.runs[0].configuration
        price = prices.get(configuration.instance_type)
        if price is None:
            return text
        usd += price * configuration.num_nodes * each.seconds / 3600.0
    return f"{text} and {format.dollars(usd)}"


def _launches(job: Job) -> list[list[Run]]:
    """The plan's runs by launch: with `profiling.columns`, those that differ in the local batch alone share one."""
    found: dict[object, list[Run]] = {}
    for run in job.plan:
        column = replace(run.configuration, local_batch_size=1)
        found.setdefault(column if job.spec.profiling.columns else run.id, []).append(run)
    return list(found.values())


def _needed(run: Run) -> int:
    return min(run.num_samples, _steps(run))


def _steps(run: Run) -> int:
    plan = run.instruction
    return 0 if plan is None else plan.profiling_warmup_steps + plan.measuring_steps
