"""One run from lease to outcome: start its command, renew the lease, judge how it ended, report to the service."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from tula_client._client import Client
from tula_client._errors import ConflictError, TulaError
from tula_client.launch import pending_cancel
from tula_client.launch.environment import command_environment, run_variables
from tula_client.launch.judge import Outcome, agent_warnings, judge, ran_out_of_memory, tail
from tula_client.launch.process import Started, start
from tula_client.launch.report import Reporter
from tula_client.launch.retry_until_back import UNREACHABLE, RetryUntilBack
from tula_client.launch.template import Template
from tula_client.launch.workdir import WorkDir
from tula_wire import Run, RunPatch

_DUMP_TIMEOUT_S: Final = 10.0
_UPLOAD_TIMEOUT_S: Final = 120.0
_STACKS_BEFORE_S: Final = 5.0
"""Seconds before the time limit at which a rank that runs the agent prints its own stack, on whatever node it runs."""


class StartCommand(Protocol):
    """Starts a command; outside of tests, `process.start`."""

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
    """How runs are launched.

    time_limit_s: longest duration of a run. lease_s: seconds after which the service takes back a run whose `tula`
    died. grace_s: seconds between SIGTERM and SIGKILL. retry_s: longest wait for an unreachable service.
    """

    url: str
    token: str | None = None
    time_limit_s: float | None = None
    lease_s: float = 60.0
    grace_s: float = 10.0
    poll_s: float = 0.05
    retry_s: float = 600.0
    stop_template: Template | None = None
    inherited: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


def upload_spool(folder: Path, options: RunnerOptions) -> None:
    """Send the samples that an agent could not send, with `tula upload` in another process."""
    command = [sys.executable, "-m", "tula_client.cli", "upload", str(folder)]
    environment = {**options.inherited, "TULA_URL": options.url, "TULA_TOKEN": options.token or ""}
    subprocess.run(command, env=environment, capture_output=True, timeout=_UPLOAD_TIMEOUT_S, check=False)


@dataclass
class ActiveRun:
    """A run whose command was started; times are of the runner's clock, in seconds."""

    run: Run
    launch_id: str
    process: Started
    log: Path
    started_at: float
    next_heartbeat_at: float
    stacks_dumped_at: float | None = None
    cancelled: bool = False
    out_of_memory_seen_at: float | None = None
    out_of_memory: bool = False


class Runner:
    """Starts commands for runs that `holder` has leased, and supervises them until they end."""

    def __init__(
        self,
        service: Client,
        work: WorkDir,
        holder: str,
        options: RunnerOptions,
        reporter: Reporter,
        *,
        start_command: StartCommand = start,
        upload: Callable[[Path, RunnerOptions], None] = upload_spool,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.service = service
        self.work = work
        self.holder = holder
        self.options = options
        self.reporter = reporter
        self.sleep = sleep
        self.retrying = RetryUntilBack(options.retry_s, reporter, clock=clock, sleep=sleep)
        self._start_command = start_command
        self._upload = upload
        self._clock = clock
        self._wall_clock = wall_clock

    def start(
        self,
        run: Run,
        template: Template,
        *,
        checkpoints: Path | None = None,
        resume: Path | None = None,
        restart: int = 0,
    ) -> ActiveRun:
        """Start the command of `run`; without `checkpoints`, it gets a scratch folder for them.

        Raises `CommandNotFoundError` after releasing the lease.
        """
        checkpoints = checkpoints or self.work.scratch(run.id)
        launch_id = f"{run.id}-{secrets.token_hex(3)}"
        spool, log = self.work.spool(run.id), self.work.log(launch_id)
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
            stacks_at_s=None if limit is None else self._wall_clock() + limit - min(_STACKS_BEFORE_S, 0.1 * limit),
        )
        env_file = str(self.work.env_file(run.id, variables)) if "env_file" in template.placeholders else ""
        command = template.fill(
            run.configuration,
            run_id=run.id,
            launch_id=launch_id,
            resume=None if resume is None else str(resume),
            env_file=env_file,
        )
        stop = self.options.stop_template
        stop_command = None if stop is None else stop.fill(run.configuration, run_id=run.id, launch_id=launch_id)
        if stop_command is not None:
            pending_cancel.record(self.work, launch_id, stop_command)
        try:
            process = self._start_command(
                command,
                environment=command_environment(self.options.inherited, variables, command),
                log=log,
                grace_s=self.options.grace_s,
                stop_command=stop_command,
            )
        except TulaError:
            pending_cancel.clear(self.work, launch_id)
            self.release(run)
            raise
        now = self._clock()
        active = ActiveRun(run, launch_id, process, log, started_at=now, next_heartbeat_at=now)
        self.reporter.started(run, log)
        self.poll(active)
        return active

    def poll(self, active: ActiveRun) -> int | None:
        """The exit status if the command has ended; else enforce the time limit, renew the lease, and return None."""
        status = active.process.poll()
        if status is not None:
            return status
        now = self._clock()
        limit = self.options.time_limit_s
        if limit is not None and active.stacks_dumped_at is None and now - active.started_at > limit:
            active.stacks_dumped_at = now
            active.process.dump_stacks()
            active.process.request_stop()
        elif (
            active.stacks_dumped_at is not None
            and now - active.stacks_dumped_at > self.options.grace_s + _DUMP_TIMEOUT_S
        ):
            active.process.stop()
        if now >= active.next_heartbeat_at:
            active.next_heartbeat_at = now + self.options.lease_s / 3
            self._renew_lease(active)
            self._stop_if_out_of_memory(active, now)
        return None

    def finish(self, active: ActiveRun, status: int) -> Outcome:
        """Judge a command that ended with `status` and report the outcome to the service."""
        pending_cancel.clear(self.work, active.launch_id)
        lines = tail(active.log)
        run = self._run_with_samples(active.run.id)
        limit = self.options.time_limit_s if active.stacks_dumped_at is not None else None
        outcome = (
            Outcome("cancelled", "The run was cancelled at the service.")
            if active.cancelled
            else judge(run, 137 if active.out_of_memory else status, lines, timed_out_after_s=limit)
        )
        if run.state != outcome.state:
            try:
                self.retrying(self.service.patch_run, run.id, outcome.patch(self.holder))
            except ConflictError as error:
                self.reporter.note(f"Run {run.id}: the service kept the state that it had ({error}).")
        for warning in agent_warnings(lines):
            self.reporter.note(f"Run {run.id}: {warning}")
        self.reporter.finished(active.run, outcome, active.log, self._clock() - active.started_at)
        return outcome

    def abandon(self, active: ActiveRun) -> None:
        """Stop the command and give its run back."""
        active.process.stop()
        pending_cancel.clear(self.work, active.launch_id)
        self.release(active.run)

    def cancel_pending(self) -> None:
        """Run the stop commands that an earlier `tula` in this folder left behind."""
        for launch_id in pending_cancel.cancel_pending(self.work, self.options.inherited):
            self.reporter.note(f"Ran the stop command of {launch_id}, left behind by an interrupted start.")

    def release(self, run: Run) -> None:
        """Give the lease back, or cancel a training run; if the service is unreachable, the lease expires."""
        patch = RunPatch(state="pending", holder=self.holder)
        if run.kind == "train":  # a later `tula run` creates another run that continues this one
            patch = RunPatch(state="cancelled", holder=self.holder, message="It was stopped before its end.")
        try:
            self.service.patch_run(run.id, patch)
        except TulaError:
            return

    def _run_with_samples(self, run_id: str) -> Run:
        """The run as the service knows it, once the samples are uploaded that its agent could not send."""
        run = self.retrying(self.service.run, run_id)
        spool = self.work.spool(run_id)
        if run.num_samples == 0 and any(spool.glob("*.spool")):
            self._upload(spool, self.options)
            run = self.retrying(self.service.run, run_id)
        return run

    def _stop_if_out_of_memory(self, active: ActiveRun, now: float) -> None:
        """Stop a profiling script that caught its out-of-memory and hangs, a grace period after it logged the error."""
        if active.run.kind != "profile" or active.stacks_dumped_at is not None or active.out_of_memory:
            return
        if not ran_out_of_memory(tail(active.log)):
            active.out_of_memory_seen_at = None
        elif active.out_of_memory_seen_at is None:
            active.out_of_memory_seen_at = now
            active.next_heartbeat_at = now + self.options.grace_s
        elif now - active.out_of_memory_seen_at >= self.options.grace_s:
            active.out_of_memory = True
            active.process.request_stop()

    def _renew_lease(self, active: ActiveRun) -> None:
        patch = RunPatch(state="running", holder=self.holder, lease_s=self.options.lease_s)
        try:
            self.service.patch_run(active.run.id, patch)
        except ConflictError:  # the agent has ended the run, or a user has cancelled it
            try:
                active.cancelled = self.service.run(active.run.id).state == "cancelled"
            except TulaError:
                return
            if active.cancelled:
                active.process.request_stop()
        except UNREACHABLE:
            active.next_heartbeat_at = self._clock() + min(5.0, self.options.lease_s / 6)
