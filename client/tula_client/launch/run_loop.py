"""Supervises runs: leases them, starts their commands, renews the leases, judges outcomes and reports to the service.

Before starting the command of a run, the module checks the run that the service returned, because the run's fields
become the command's arguments and `TULA_*` variables. For example, a training run that was returned with the kind
`profile` would end after a few steps with exit code 0.
"""

from __future__ import annotations

import math
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, ParamSpec, Self, TypeVar

from tula_client._client import Client
from tula_client._errors import (
    ConflictError,
    ForeignAnswerError,
    LaunchError,
    ServiceUnavailableError,
    ServiceUnreachableError,
    TooManyRequestsError,
    TulaError,
    UsageError,
)
from tula_client.launch.judge import EMBED, Outcome, agent_warnings, judge, tail
from tula_client.launch.process import LogLines, Process, command_environment, of_first_rank, run_variables, start
from tula_client.launch.reporter import Reporter
from tula_client.launch.template import Template
from tula_client.launch.workdir import WorkDir, rank_logs
from tula_wire import (
    ClaimRequest,
    Configuration,
    Job,
    Run,
    RunClaimed,
    RunCreate,
    RunKind,
    RunPatch,
    RunState,
    TokenCreate,
    TokenCreated,
)
from tula_wire.bounds import LAUNCH_TOKEN_S
from tula_wire.enums import FINAL_STATES
from tula_wire.format import duration
from tula_wire.text import printable_lines

P = ParamSpec("P")
T = TypeVar("T")

LEASE_S: Final = 60.0
"""Seconds after which the service reclaims a run if the `tula` process that leased the run has died."""
POLL_S: Final = 0.05
SILENT_S: Final = 45.0
"""Seconds after which a note is printed about a profiling run that has not sent a measurement."""
ENDS_WITHIN_S: Final = 30.0
"""Seconds within which the command of a profiling run must end after its agent has reported the end of the run.

The limit allows for `sbatch --wait`, which checks its job only every ten seconds.
"""
RETRY_S: Final = 600.0
"""The maximum time for which an unreachable service is retried, so that a service restart does not end `tula tune`."""
_RETRY_INTERVAL_S: Final = 1.0
_UNREACHABLE: Final = (ServiceUnreachableError, ServiceUnavailableError, TooManyRequestsError, ForeignAnswerError)
"""Errors that are retried, since the service was reachable when the job was read."""
_HEARTBEAT_RETRY_S: Final = 5.0
_DUMP_TIMEOUT_S: Final = 10.0
_MOST_OUTPUT_BYTES: Final = 65_536
_UPLOAD_TIMEOUT_S: Final = 120.0
_STOP_COMMAND_TIMEOUT_S: Final = 30.0
_SUBMITTED: Final = "submitted-"


@dataclass
class ActiveRun:
    """A run whose command was started; times are in seconds on the runner's clock.

    smaller: the runs of smaller batches that the same command measures first. limit_from: the start of the
    time limit, which is the launch at first and later the first measurement. limit_reached: True once the training run
    was asked to end at its own limit. has_measured: True once the service has stored a sample of the run. has_ended:
    True once the service has refused to renew the run's lease.
    """

    run: Run
    launch_id: str
    process: Process
    log: Path
    output: LogLines
    started_at: float
    limit_from: float
    next_heartbeat_at: float
    stacks_dumped_at: float | None = None
    limit_reached: bool = False
    has_ended: bool = False
    sent_output: str = ""
    has_measured: bool = False
    silence_reported: bool = False
    smaller: tuple[Run, ...] = ()


@dataclass
class Runner:
    """A context manager that starts commands for runs that `holder` has leased, and supervises them until they end.

    On entry, the runner executes the stop commands that an earlier `tula` process left in the folder `work`, which the
    caller has locked. A stop command is kept on disk while its job runs, so that a cluster job can be cancelled even
    after a reboot. A stop command that fails is not retried, since it usually fails because the supervisor has already
    cancelled the job. On exit, the runner stops all commands that are still running, and returns their runs to the
    plan.

    time_limit_s: the time limit for a run's start-up and, separately, for the remainder of the run. grace_s: seconds
    between SIGTERM and SIGKILL. stop_template: the command that cancels a cluster job. inherited: environment variables
    that commands inherit. active: the runs whose commands are running.
    """

    service: Client
    work: WorkDir
    holder: str
    reporter: Reporter
    _: KW_ONLY
    time_limit_s: float | None = None
    grace_s: float = 10.0
    stop_template: Template | None = None
    inherited: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    start_command: Callable[..., Process] = start
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    active: list[ActiveRun] = field(default_factory=list, init=False)
    _tokens: dict[str, TokenCreated] = field(default_factory=dict, init=False)

    def __enter__(self) -> Self:
        for name in self.work.names(_SUBMITTED):
            # The element type is Any because validation as `str` would reject arguments that are not valid UTF-8.
            words = (self.work.load(dict[str, list[Any]], name) or {}).get("stop_command")
            if words and self._succeeds(words, _STOP_COMMAND_TIMEOUT_S):
                launch_id = name.removeprefix(_SUBMITTED)
                self.reporter.note(f"Ran the stop command that the interrupted launch {launch_id} left behind.")
            self.work.delete(name)
        return self

    def __exit__(self, *_: object) -> None:
        for active in self.active:
            active.process.request_stop()
        for active in list(self.active):
            self.abandon(active)
        for made in self._tokens.values():
            with suppress(TulaError):  # the token expires anyway
                self.service.revoke_token(made.token.id)

    def retrying(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make a call and return its result, retrying for at most RETRY_S seconds while the service is unreachable."""
        deadline = self.clock() + RETRY_S
        reported = False
        while True:
            try:
                return call(*args, **kwargs)
            except _UNREACHABLE as error:
                if self.clock() >= deadline:
                    raise
                if not reported:
                    reported = True
                    self.reporter.waiting(f"The service is unreachable ({error}): retrying for {RETRY_S:g} s.")
                self.sleep(_RETRY_INTERVAL_S)

    def claim(self, job: Job, max_nodes: int, *, whole_launch: bool = False) -> RunClaimed:
        """Lease and return the next runs in the plan of `job`.

        Raises `LaunchError` if the service returns runs that do not match the request.
        """
        claim = ClaimRequest(holder=self.holder, lease_s=LEASE_S, max_nodes=max_nodes, whole_launch=whole_launch)
        claimed = self.retrying(self.service.claim, job.id, claim)
        if claimed.run is not None:
            largest = check_configuration(claimed.run.configuration, job)
            _check_run(claimed.run, job, "profile", replace(largest, num_nodes=min(largest.num_nodes, max_nodes)))
            for run in claimed.smaller:  # these runs must differ only in the local batch
                batch = min(check_configuration(run.configuration, job).local_batch_size, largest.local_batch_size - 1)
                _check_run(run, job, "profile", replace(largest, local_batch_size=batch))
        return claimed

    def create_run(self, job: Job, kind: RunKind, configuration: Configuration, **more: Any) -> Run:
        """Register and return a run that is not in the plan of `job`.

        Raises `LaunchError` if the service returns a run that does not match the request.
        """
        create = RunCreate(kind=kind, configuration=configuration, holder=self.holder, lease_s=LEASE_S, **more)
        return _check_run(self.retrying(self.service.create_run, job.id, create), job, kind, configuration)

    def start(
        self,
        run: Run,
        template: Template,
        *,
        checkpoints: Path | None = None,
        resume: Path | None = None,
        restart: int = 0,
        smaller: Sequence[Run] = (),
        learning_rate_factor: float = 1.0,
        examples: float = 1.0,
    ) -> ActiveRun:
        """Start the command of `run` and return the active run.

        checkpoints: the checkpoint folder, by default a scratch folder. smaller: runs of smaller local batches that the
        same command measures. examples: the number of examples in the whole training. Raises `UsageError`, after
        releasing the leases, if the program does not exist.
        """
        checkpoints = checkpoints or self.work.scratch(run.id)
        launch_id = f"{run.id}-{secrets.token_hex(3)}"
        spool, log = self.work.spool(run.id), self.work.log(launch_id)
        try:
            for folder in (checkpoints, spool, log.parent):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.release(run, *smaller)
            raise UsageError(
                f"the folder {folder} cannot be created ({error.strerror}), so the run was not started"
            ) from None
        variables = run_variables(
            run,
            url=self.service.url,
            token=self._agent_token(run.job_id),
            spool=spool,
            checkpoints=checkpoints,
            restart=restart,
            smaller=smaller,
        )
        stop = self.stop_template
        templates = (template,) if stop is None else (template, stop)
        needs_file = any("env_file" in template.placeholders for template in templates)
        env_file = str(self.work.env_file(run.id, variables)) if needs_file else ""
        command, *stop_commands = [
            template.fill(
                run.configuration,
                run_id=run.id,
                launch_id=launch_id,
                resume=resume,
                env_file=env_file,
                checkpoint_dir=checkpoints,
                learning_rate_factor=learning_rate_factor,
                examples=examples,
            )
            for template in templates
        ]
        stop_command = next(iter(stop_commands), None)
        if stop_command is not None:
            self.work.save(_SUBMITTED + launch_id, {"stop_command": stop_command})
        ranks = rank_logs(log) if run.configuration.world_size > 1 else None
        environment = command_environment(self.inherited, variables, command, rank_logs=ranks)
        if ranks is not None and environment.get("PET_LOG_DIR") == str(ranks):
            with suppress(OSError):  # torchrun reports the error
                ranks.mkdir()  # the folder must exist now, so that the reporter can print its path
        try:
            process = self.start_command(
                command,
                environment=environment,
                log=log,
                grace_s=self.grace_s,
                stop_command=stop_command,
            )
        except TulaError:
            self.work.delete(_SUBMITTED + launch_id)
            self.release(run, *smaller)
            raise
        now = self.clock()
        active = ActiveRun(run, launch_id, process, log, LogLines(log), now, now, next_heartbeat_at=now)
        active.smaller = tuple(smaller)
        self.active.append(active)
        self.reporter.started(run, log)
        self.poll(active)
        return active

    def poll(self, active: ActiveRun) -> int | None:
        """Return the exit status of the command, or None if it is still running.

        While the command runs, this method enforces the time limits and renews the lease. At the runner's limit, each
        rank prints its stack; at a training run's own limit (`limits.on_breach`), the run is asked to end. The method
        also prints new output of a training run.
        """
        status = active.process.poll()
        if active.run.kind == "train":
            self.reporter.output(active.output.new(last=status is not None))
        if status is not None:
            return status
        now = self.clock()
        limit = self.time_limit_s
        if limit is not None and active.stacks_dumped_at is None and now - active.limit_from > limit:
            active.stacks_dumped_at = now
            active.process.request_stop(stacks=True)
        elif now - (active.stacks_dumped_at or now) > self.grace_s + _DUMP_TIMEOUT_S:
            active.process.stop()
        if not active.limit_reached and now - active.started_at > (active.run.time_limit_s or math.inf):
            active.limit_reached = True
            active.process.request_stop()
        if now >= active.next_heartbeat_at:
            active.next_heartbeat_at = now + LEASE_S / 3
            self._renew_lease(active)
            self._look_for_measurements(active)
            self._send_output(active, active.run, "running")
        return None

    def finish(self, active: ActiveRun, status: int) -> list[tuple[Run, Outcome]]:
        """Judge and report every run of a command that ended with `status`; return the runs in order of measurement.

        A run that had not started returns to the plan. The run of the largest batch also returns to the plan if the
        command measured all smaller batches but ended before it measured the largest.
        """
        self._ended(active)
        lines = tail(active.log)
        for warning in agent_warnings(lines):
            self.reporter.note(f"Run {active.run.id}: {warning}")
        largest = self._run_with_samples(active.run.id)
        runs = [*(self.retrying(self.service.run, run.id) for run in active.smaller), largest]
        begun = [run for run in runs[:-1] if run.state not in ("pending", "claimed")]
        reached = bool(begun) and all(run.state == "succeeded" for run in runs[:-1])
        stopped_it = active.stacks_dumped_at is not None or judge(largest, status, lines).state == "out_of_memory"
        if not begun or (reached and stopped_it) or largest.num_samples or largest.state in FINAL_STATES:
            begun.append(largest)
        elif reached:
            self.reporter.note(
                f"The command ended before its local batch of {largest.configuration.local_batch_size} was measured, "
                "so this batch stays in the plan. If the script trains for longer, one launch can measure all batches."
            )
        self.release(*(run for run in runs if run not in begun))
        outcomes: list[tuple[Run, Outcome]] = []
        for run in begun:
            complete = run is not largest and run.state in ("succeeded", "cancelled")
            stopped = run.state == "running" and status != 0 and largest.state == "cancelled"
            ended, outcome = (run, Outcome(run.state)) if complete else self._judge(active, run, status, lines, stopped)
            if outcome.state == "succeeded" and outcome.message:
                self.reporter.note(f"Run {run.id}: {outcome.message.removeprefix(f'Run {run.id} ')}")
            self._send_output(active, ended, ended.state)
            # The duration of the launch is printed only with the run of the largest batch.
            took_s = self.clock() - active.started_at if run is largest else 0.0
            self.reporter.finished(ended, outcome, active.log, took_s)
            outcomes.append((ended, outcome))
        return outcomes

    def _judge(self, active: ActiveRun, run: Run, status: int, lines: list[str], stopped: bool) -> tuple[Run, Outcome]:
        """Report the outcome of one run of a command that ended with `status`; return the updated run and the outcome.

        stopped: whether the command was stopped because the run of its largest batch was cancelled.
        """
        limit = self.time_limit_s if active.stacks_dumped_at is not None else None
        outcome = judge(run, status, lines, timed_out_after_s=limit)
        if active.limit_reached and run.state != "cancelled":
            text = f"The run was stopped at its time limit of {duration(run.time_limit_s)}."
            outcome = Outcome("cancelled", text, end_cause="time_limit")
        if stopped:
            outcome = Outcome("cancelled", "The run of the largest batch in the same launch was cancelled.")
        if run.state != outcome.state:
            try:
                run = self.retrying(self.service.patch_run, run.id, outcome.patch(run, self.holder))
                if outcome.state == run.state == "succeeded":
                    outcome = replace(outcome, message=run.message)
            except ConflictError as error:
                self.reporter.note(f"Run {run.id}: the service did not change the run's state ({error}).")
        return run, outcome

    def abandon(self, active: ActiveRun) -> None:
        """Stop the command of an active run and return its runs to the plan."""
        active.process.stop()
        self._ended(active)
        self.release(active.run, *active.smaller)

    def _ended(self, active: ActiveRun) -> None:
        self.active.remove(active)
        self.work.delete(_SUBMITTED + active.launch_id)

    def release(self, *runs: Run) -> None:
        """Return profiling runs to the plan and cancel training runs; if the service is down, let the leases expire."""
        patch = RunPatch(state="pending", holder=self.holder)
        stopped = RunPatch(state="cancelled", holder=self.holder, message="The run was stopped before it finished.")
        for run in runs:
            with suppress(TulaError):  # a later `tula run` creates another run that continues the training
                self.service.patch_run(run.id, stopped if run.kind == "train" else patch)

    def _agent_token(self, job_id: str) -> str | None:
        """Return a token that permits only reports for this job, or None if `tula` itself has no token.

        The user's token would give the job's code all of the user's rights.
        """
        if not self.inherited.get("TULA_TOKEN"):
            return None
        if job_id not in self._tokens:
            create = TokenCreate(name=self.holder, scope="agent", job_id=job_id, expires_in_s=LAUNCH_TOKEN_S)
            self._tokens[job_id] = self.retrying(self.service.create_token, create)
        return self._tokens[job_id].secret

    def _run_with_samples(self, run_id: str) -> Run:
        """Upload any samples that the run's agent could not send, and return the run's current state on the service."""
        run = self.retrying(self.service.run, run_id)
        spool = self.work.spool(run_id)
        if run.num_samples == 0 and any(spool.glob("*.spool")):
            token = self._agent_token(run.job_id) or ""
            upload = [sys.executable, "-m", "tula_client.cli", "upload", str(spool)]
            self._succeeds(upload, _UPLOAD_TIMEOUT_S, TULA_TOKEN=token)
            run = self.retrying(self.service.run, run_id)
        return run

    def _succeeds(self, command: list[str], timeout_s: float, **variables: str) -> bool:
        """Run a short command with the inherited environment and `variables`; return True if the command succeeded."""
        environment = {**self.inherited, "TULA_URL": self.service.url, **variables}
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0

    def _look_for_measurements(self, active: ActiveRun) -> None:
        """Restart the time limit at a run's first measurement; print a note if a profiling run is slow to send one."""
        first, now = (*active.smaller, active.run)[0], self.clock()
        if active.has_measured:
            return
        with suppress(TulaError):
            if self.service.run(first.id).num_samples:
                active.has_measured, active.limit_from = True, now
            elif first.kind == "profile" and not active.silence_reported and now - active.started_at >= SILENT_S:
                active.silence_reported = True
                steps = f"If training has already begun (see {active.log}), {EMBED}"
                self.reporter.note(f"Run {first.id}: no measurement after {now - active.started_at:.0f} s. {steps}")

    def _send_output(self, active: ActiveRun, run: Run, state: RunState) -> None:
        """Send the tail of rank 0's output to the service, unless it is unchanged or the user has disabled this.

        A failure to send is ignored, since the output is also in the log.
        """
        if self.inherited.get("TULA_SEND_OUTPUT") == "0":
            return
        output = "\n".join(of_first_rank(tail(active.log))).encode(errors="replace")[-_MOST_OUTPUT_BYTES:]
        text = output.decode(errors="ignore")
        if (text == active.sent_output and state == "running") or not text:
            return
        patch = RunPatch(state=state, holder=self.holder, output=printable_lines(text))
        with suppress(TulaError):
            self.service.patch_run(run.id, patch)
            active.sent_output = text

    def _renew_lease(self, active: ActiveRun) -> None:
        patch = RunPatch(state="running", holder=self.holder, lease_s=LEASE_S)
        try:
            self.service.patch_run(active.run.id, patch)
        except ConflictError:  # the agent has ended the run, or a user has cancelled it
            with suppress(TulaError):
                state = self.service.run(active.run.id).state
                # The command of a finished profiling run ends by itself, unless its script remains in the loop.
                over = active.has_ended and active.run.kind == "profile" and state in FINAL_STATES
                if over or state == "cancelled":
                    active.process.request_stop()
            active.has_ended = True
            active.next_heartbeat_at = self.clock() + ENDS_WITHIN_S
        except _UNREACHABLE:
            active.next_heartbeat_at = self.clock() + _HEARTBEAT_RETRY_S


def _check_run(run: Run, job: Job, kind: RunKind, configuration: Configuration) -> Run:
    """Return `run` if it is the requested run of `job`; otherwise raise `LaunchError` naming the first wrong field."""
    asked: dict[str, object] = {"job_id": job.id, "kind": kind, "configuration": configuration}
    if kind == "profile" or job.spec.limits.on_breach != "stop":
        asked["time_limit_s"] = None  # such a run must not have a limit at which it is stopped
    for field_name, value in asked.items():
        if getattr(run, field_name) != value:
            raise LaunchError(
                f"the service returned run {run.id} with {field_name} {getattr(run, field_name)} instead of {value}, "
                "so the run was not started"
            )
    return run


def check_configuration(configuration: Configuration, job: Job) -> Configuration:
    """Return `configuration` if the job's specification allows it; otherwise raise `LaunchError`."""
    batch = job.spec.batch
    fixed, held, steps = batch.global_batch_size is not None, batch.grad_accum_steps, configuration.grad_accum_steps
    allowed = (
        any(
            cluster.instance_type == configuration.instance_type
            and cluster.ranks_per_node == configuration.ranks_per_node
            and cluster.min_nodes <= configuration.num_nodes <= cluster.max_nodes
            for cluster in job.spec.cluster
        )
        and configuration.local_batch_size <= (batch.max_local_batch_size or configuration.local_batch_size)
        and (fixed or configuration.local_batch_size >= batch.min_local_batch_size)
        and (steps == held if held else fixed or steps <= batch.max_grad_accum_steps)
        and configuration.global_batch_size == (batch.global_batch_size or configuration.global_batch_size)
        and [name for name, _ in configuration.options] == sorted(job.spec.options)
        and all(word in job.spec.options[name] for name, word in configuration.options)
    )
    if not allowed:
        raise LaunchError(
            f"the service returned {configuration}, which the job's specification does not allow, so the run was not "
            "started"
        )
    return configuration
