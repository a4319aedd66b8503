"""One run at a time from lease to verdict: start its command, keep the lease, judge how it ended, tell the service."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tula_client._errors import ConflictError, TulaError
from tula_client.launch.environment import run_variables, whole_environment
from tula_client.launch.logs import agent_warnings, ran_out_of_memory, tail
from tula_client.launch.outcome import Outcome, judge
from tula_client.launch.process import Started, start
from tula_client.launch.report import Reporter
from tula_client.launch.service import AWAY, Patience, Service
from tula_client.launch.submitted import cancel_left, forget, remember
from tula_client.launch.template import Template
from tula_client.launch.workdir import WorkDir
from tula_wire import Run, RunPatch

__all__ = ["Active", "Runner", "RunnerOptions", "Start"]

_DUMP_TAKES_S = 10.0
_STACKS_BEFORE_S = 5.0
"""How long before its time limit a rank that runs the agent shows its own stack, wherever it is."""
_UPLOAD_WITHIN_S = 120.0


class Start(Protocol):
    """How a command is started; `process.start` in earnest."""

    def __call__(
        self,
        command: list[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        grace_s: float,
        stop_command: list[str] | None,
    ) -> Started:
        """Start `command`, output appended to `log`."""


@dataclass(frozen=True)
class RunnerOptions:
    """How runs are launched and how long they may take."""

    url: str
    token: str | None = None
    time_limit_s: float | None = None
    lease_s: float = 60.0
    grace_s: float = 10.0
    poll_s: float = 0.05
    patience_s: float = 600.0
    stop_template: Template | None = None
    inherited: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


def upload_spool(folder: Path, options: RunnerOptions) -> None:
    """Send what an agent could not send itself; its command does that, in a process of its own."""
    command = [sys.executable, "-m", "tula_client.cli", "upload", str(folder)]
    environment = {**options.inherited, "TULA_URL": options.url, "TULA_TOKEN": options.token or ""}
    subprocess.run(command, env=environment, capture_output=True, timeout=_UPLOAD_WITHIN_S, check=False)


@dataclass
class Active:
    """A run whose command is going."""

    run: Run
    launch_id: str
    process: Started
    log: Path
    started_at: float
    next_beat: float
    dumped_at: float | None = None
    cancelled: bool = False
    said_at: float | None = None
    out_of_memory: bool = False


class Runner:
    """Starts commands for runs that `holder` has leased, and sees them through."""

    def __init__(
        self,
        service: Service,
        work: WorkDir,
        holder: str,
        options: RunnerOptions,
        reporter: Reporter,
        *,
        start_command: Start = start,
        upload: Callable[[Path, RunnerOptions], None] = upload_spool,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._service = service
        self._work = work
        self.holder = holder
        self.options = options
        self._reporter = reporter
        self._start_command = start_command
        self._upload = upload
        self.clock = clock
        self.wall_clock = wall_clock
        self.sleep = sleep
        self.patiently = Patience(options.patience_s, reporter, clock=clock, sleep=sleep)

    def start(
        self,
        run: Run,
        template: Template,
        *,
        checkpoints: Path | None = None,
        resume: Path | None = None,
        restart: int = 0,
    ) -> Active:
        """Start the command of `run`; raises `CommandNotFoundError`, with the lease given back.

        Without a folder for `checkpoints` nobody needs them: it gets one of its own.
        """
        checkpoints = checkpoints or self._work.scratch(run.id)
        launch_id = f"{run.id}-{secrets.token_hex(3)}"
        spool, log = self._work.spool(run.id), self._work.log(launch_id)
        for folder in (checkpoints, spool, log.parent):
            folder.mkdir(parents=True, exist_ok=True)
        limit = self.options.time_limit_s
        variables = run_variables(
            run,
            url=self.options.url,
            token=self.options.token,
            spool=spool,
            checkpoints=checkpoints,
            restart=restart,
            stacks_at_s=None if limit is None else self.wall_clock() + limit - min(_STACKS_BEFORE_S, 0.1 * limit),
        )
        env_file = str(self._work.env_file(run.id, variables)) if "env_file" in template.placeholders else ""
        command = template.fill(
            run.configuration,
            run_id=run.id,
            launch_id=launch_id,
            resume=None if resume is None else str(resume),
            env_file=env_file,
        )
        stop = self.options.stop_template
        cancel = None if stop is None else stop.fill(run.configuration, run_id=run.id, launch_id=launch_id)
        if cancel is not None:
            remember(self._work, launch_id, cancel)
        try:
            process = self._start_command(
                command,
                environment=whole_environment(self.options.inherited, variables, command),
                log=log,
                grace_s=self.options.grace_s,
                stop_command=cancel,
            )
        except TulaError:
            forget(self._work, launch_id)
            self.release(run)
            raise
        now = self.clock()
        active = Active(run, launch_id, process, log, now, now)
        self._reporter.started(run, log)
        self.attend(active)
        return active

    def attend(self, active: Active) -> int | None:
        """Renew the lease and watch the clock; the exit status once the command has ended."""
        status = active.process.poll()
        if status is not None:
            return status
        now = self.clock()
        limit = self.options.time_limit_s
        if limit is not None and active.dumped_at is None and now - active.started_at > limit:
            active.dumped_at = now
            active.process.dump_stacks()
            active.process.request_stop()
        elif active.dumped_at is not None and now - active.dumped_at > self.options.grace_s + _DUMP_TAKES_S:
            active.process.stop()
        if now >= active.next_beat:
            active.next_beat = now + self.options.lease_s / 3
            self._beat(active)
            self._look_for_caught(active, now)
        return None

    def judge(self, active: Active, status: int) -> Outcome:
        """Judge a command that ended and tell the service."""
        forget(self._work, active.launch_id)
        lines = tail(active.log)
        known = self.patiently(self._service.run, active.run.id)
        spool = self._work.spool(active.run.id)
        if known.num_samples == 0 and any(spool.glob("*.spool")):  # the service was away while it ran
            self._upload(spool, self.options)
            known = self.patiently(self._service.run, active.run.id)
        limit = self.options.time_limit_s if active.dumped_at is not None else None
        outcome = (
            Outcome("cancelled", "The run was cancelled at the service.")
            if active.cancelled
            else judge(known, 137 if active.out_of_memory else status, lines, timed_out_after_s=limit)
        )
        if known.state != outcome.state:
            self._tell(active.run, outcome.patch(self.holder))
        for said in agent_warnings(lines):
            self._reporter.note(f"Run {active.run.id}: {said}")
        self._reporter.finished(active.run, outcome, active.log, self.clock() - active.started_at)
        return outcome

    def abandon(self, active: Active) -> None:
        """Stop a command whose run is to be done again later."""
        active.process.stop()
        forget(self._work, active.launch_id)
        self.release(active.run)

    def cancel_left(self) -> None:
        """Cancel what commands of an earlier `tula` in this folder still have running elsewhere."""
        for launch_id in cancel_left(self._work, self.options.inherited):
            self._reporter.note(f"Ran the stop command of {launch_id}, which an interrupted start had left behind.")

    def release(self, run: Run) -> None:
        """Give the lease back, or end a training that was stopped; if the service is away, the lease runs out."""
        patch = RunPatch(state="pending", holder=self.holder)
        if run.kind == "train":  # going on is another run's business
            patch = RunPatch(state="cancelled", holder=self.holder, message="It was stopped before its end.")
        try:
            self._service.patch_run(run.id, patch)
        except TulaError:
            return

    def _look_for_caught(self, active: Active, now: float) -> None:
        """A profiling script that caught its out-of-memory and hangs is ended a grace period after it said so."""
        if active.run.kind != "profile" or active.dumped_at is not None or active.out_of_memory:
            return
        if not ran_out_of_memory(tail(active.log)):
            active.said_at = None
        elif active.said_at is None:
            active.said_at = now
            active.next_beat = now + self.options.grace_s
        elif now - active.said_at >= self.options.grace_s:
            active.out_of_memory = True
            active.process.request_stop()

    def _beat(self, active: Active) -> None:
        patch = RunPatch(state="running", holder=self.holder, lease_s=self.options.lease_s)
        try:
            self._service.patch_run(active.run.id, patch)
        except ConflictError:  # the agent has closed the run, or someone has cancelled it
            try:
                active.cancelled = self._service.run(active.run.id).state == "cancelled"
            except TulaError:
                return
            if active.cancelled:
                active.process.request_stop()
        except AWAY:
            active.next_beat = self.clock() + min(5.0, self.options.lease_s / 6)

    def _tell(self, run: Run, patch: RunPatch) -> None:
        try:
            self.patiently(self._service.patch_run, run.id, patch)
        except ConflictError as error:
            self._reporter.note(f"Run {run.id}: the service kept its own verdict ({error}).")
