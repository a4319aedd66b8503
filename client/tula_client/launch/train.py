"""`tula run`: train with the recommended configuration; go on from checkpoints after out-of-memory or pre-emption."""

from __future__ import annotations

import signal
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from tula_client._errors import InvalidInputError
from tula_client.launch._errors import LaunchError
from tula_client.launch.fallback import Fallback, next_smaller
from tula_client.launch.outcome import Outcome
from tula_client.launch.report import Reporter
from tula_client.launch.runner import Runner
from tula_client.launch.service import Service
from tula_client.launch.template import Template
from tula_client.launch.workdir import WorkDir, holds_files
from tula_wire import Configuration, Job, Run, RunCreate

__all__ = ["Attempt", "TrainOptions", "Trained", "TrainingFailedError", "train"]

_STATE = "training"
_PREEMPTED = (128 + signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGUSR1, 128 + signal.SIGHUP)


class TrainingFailedError(LaunchError):
    """The training ended without finishing, and starting it again as it is would not help."""


@dataclass(frozen=True)
class TrainOptions:
    """What to train with, and how often to start again.

    `fresh` begins another training; `reconfigure` goes on with the one that was begun, as is recommended by now.
    """

    configuration: Configuration | None = None
    method: str | None = None
    max_restarts: int = 10
    fresh: bool = False
    reconfigure: bool = False


@dataclass(frozen=True)
class Attempt:
    """One start of the training."""

    run: Run
    outcome: Outcome


@dataclass(frozen=True)
class Trained:
    """A training that finished."""

    run: Run
    configuration: Configuration
    attempts: tuple[Attempt, ...]


@dataclass
class _State:
    """What is kept on disk between attempts and between calls of `tula run`."""

    configuration: Configuration
    training: int
    restart: int = 0
    run_id: str | None = None

    def save(self, work: WorkDir) -> None:
        state = {
            "configuration": asdict(self.configuration),
            "training": self.training,
            "restart": self.restart,
            "run_id": self.run_id,
        }
        work.save(_STATE, state)


def train(
    service: Service,
    job: Job,
    template: Template,
    runner: Runner,
    work: WorkDir,
    options: TrainOptions,
    reporter: Reporter,
) -> Trained:
    """Train until the command ends well.

    After an out-of-memory it goes on with the next smaller configuration (`fallback.next_smaller`); after a
    pre-emption, or a failure since which a checkpoint was written, with the same one; both from the last checkpoint.
    The same command after `tula` died goes on likewise, if there is a checkpoint.

    Raises `TrainingFailedError`, and what the client raises.
    """
    runner.cancel_left()
    state = None if options.fresh else _load(work)
    if state is not None and not holds_files(work.checkpoints(state.training)):
        reporter.note("The training that was begun before left no checkpoint: another begins.")
        state = None  # what it was to train with may be a guess of long ago
    if state is None or (options.configuration is not None and options.configuration != state.configuration):
        state = _State(options.configuration or _recommended(service, job, runner, reporter), work.next_training())
    elif options.reconfigure:
        state.configuration = _recommended(service, job, runner, reporter)
        reporter.note("Going on with the training that was begun before, with what is recommended now.")
    else:
        reporter.note(
            "Going on with the training that was begun before; --fresh starts another, --reconfigure goes on with it "
            "as is recommended now."
        )
    attempts: list[Attempt] = []
    checkpoints = work.checkpoints(state.training)
    while True:
        newest = _newest(checkpoints)
        run = _begun(service, job, state, runner, options, reporter)
        state.run_id = run.id
        resume = checkpoints if state.restart and newest is not None else None
        active = runner.start(run, template, checkpoints=checkpoints, resume=resume, restart=state.restart)
        state.restart += 1
        state.save(work)
        try:
            while (status := runner.attend(active)) is None:
                runner.sleep(runner.options.poll_s)
        except BaseException:
            runner.abandon(active)
            raise
        outcome = runner.judge(active, status)
        attempts.append(Attempt(active.run, outcome))
        if outcome.state == "succeeded":
            work.forget(_STATE)
            return Trained(run, state.configuration, tuple(attempts))
        if len(attempts) > options.max_restarts:
            raise TrainingFailedError(
                f"the training was started {len(attempts)} times without finishing: see {active.log}"
            )
        if outcome.state == "out_of_memory":
            fallback = _fall_back(service, job, template, runner, state.configuration)
            reporter.note(fallback.explanation)
            state.configuration = fallback.configuration
        elif outcome.state == "failed" and (status in _PREEMPTED or _newest(checkpoints) != newest):
            reporter.note(f"{outcome.message} Starting again from the last checkpoint in {checkpoints}.")
        else:
            lines = "".join(f"\n    {line}" for line in outcome.lines)
            raise TrainingFailedError(f"run {run.id}: {outcome.message} Log: {active.log}{lines}")
        state.save(work)


def _begun(service: Service, job: Job, state: _State, runner: Runner, options: TrainOptions, reporter: Reporter) -> Run:
    """A run that goes on from the one before, or stands alone where the service does not know that one any more."""
    create = RunCreate(
        kind="train",
        configuration=state.configuration,
        method=options.method,
        continues=state.run_id,
        holder=runner.holder,
        lease_s=runner.options.lease_s,
    )
    try:
        return runner.patiently(service.create_run, job.id, create)
    except InvalidInputError as error:
        if error.field != "continues":
            raise
    reporter.note(f"The service does not know {state.run_id}, so what it took counts toward no limit.")
    return runner.patiently(service.create_run, job.id, create.model_copy(update={"continues": None}))


def _recommended(service: Service, job: Job, runner: Runner, reporter: Reporter) -> Configuration:
    recommendation = runner.patiently(service.recommendation, job.id)
    if recommendation.chosen is None:
        raise LaunchError(f"there is no configuration to train with: {recommendation.why}")
    if recommendation.basis == "prior":
        reporter.note("Nothing of this job was measured, so this configuration is a guess: `tula tune` measures first.")
    return recommendation.chosen.configuration


def _fall_back(service: Service, job: Job, template: Template, runner: Runner, failed: Configuration) -> Fallback:
    """The next smaller configuration, within what the memory model allows after it has learnt of the failure."""
    bound = runner.patiently(service.recommendation, job.id).max_local_batch_size.get(failed.instance_type)
    fallback = next_smaller(failed, can_accumulate=template.can_accumulate, max_local_batch_size=bound or None)
    if fallback is None:
        raise TrainingFailedError(
            f"a local batch of {failed.local_batch_size} ran out of memory and nothing smaller is left: "
            "use a smaller model or more memory per rank"
        )
    return fallback


def _load(work: WorkDir) -> _State | None:
    state = work.load(_STATE)
    if state is None:
        return None
    try:
        configuration = TypeAdapter(Configuration).validate_python(state["configuration"])
        return _State(configuration, int(state.get("training", 1)), int(state["restart"]), state.get("run_id"))
    except (KeyError, TypeError, ValueError):
        return None


def _newest(folder: Path) -> tuple[str, float] | None:
    """Name and time of the newest file among the checkpoints; None where none can be read."""
    entries = []
    with suppress(OSError):  # the script may be writing or pruning while this looks
        for entry in folder.rglob("*"):
            with suppress(OSError):
                if entry.is_file():
                    entries.append((entry.stat().st_mtime, entry.name))
    return (max(entries)[1], max(entries)[0]) if entries else None
