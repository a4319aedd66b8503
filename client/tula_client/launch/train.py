"""Trains with the recommended configuration for `tula run`, and continues from checkpoints after a failure."""

from __future__ import annotations

import signal
from contextlib import suppress
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path

from tula_client._errors import InvalidInputError, LaunchError
from tula_client.launch.judge import Outcome
from tula_client.launch.run_loop import POLL_S, ActiveRun, Runner, check_configuration
from tula_client.launch.template import Template
from tula_client.launch.workdir import may_hold_files
from tula_wire import Candidate, Configuration, Job, Run
from tula_wire.format import duration

_STATE = "training"
_PREEMPTED = (128 + signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGUSR1, 128 + signal.SIGHUP)


@dataclass
class _State:
    """The state of one training run, which is kept on disk between attempts and between invocations of `tula run`."""

    configuration: Configuration
    training: int = 1
    restart: int = 0
    run_id: str | None = None


def train(
    runner: Runner,
    job: Job,
    template: Template,
    *,
    method: str | None = None,
    max_restarts: int = 10,
    fresh: bool = False,
    reconfigure: bool = False,
    configuration: Configuration | None = None,
) -> list[tuple[Run, Outcome]]:
    """Train until the command succeeds; return every attempt with its outcome, the successful attempt last.

    `fresh` starts training from the beginning; `reconfigure` continues the unfinished training with the current
    recommendation. If `configuration` is given, it is used instead of the recommendation.

    After an out-of-memory failure, training continues from the last checkpoint with the next smaller configuration
    (`next_smaller`). After a pre-emption, or after the failure of an attempt that had written a checkpoint, it
    continues with the same configuration. If `tula` died and there is a checkpoint, the next call also continues from
    this checkpoint.

    Raises `LaunchError` if training cannot continue. May also raise the client's errors.
    """
    state = _begin(runner, job, fresh, reconfigure, configuration)
    checkpoints = runner.work.checkpoints(state.training)
    attempts: list[tuple[Run, Outcome]] = []
    while True:
        before = _newest_file(checkpoints)
        run = _create_run(runner, job, state, method)
        state.run_id = run.id
        resume = checkpoints if state.restart and before is not None else None
        if run.time_limit_s is not None:
            runner.reporter.note(
                f"Training will stop after {duration(run.time_limit_s)}, because limits.on_breach is 'stop'."
            )
        factor = _learning_rate_factor(runner, job, template, run.configuration)
        active = runner.start(
            run,
            template,
            checkpoints=checkpoints,
            resume=resume,
            restart=state.restart,
            learning_rate_factor=factor,
            examples=job.spec.dataset.size * job.spec.epochs,
        )
        state.restart += 1
        _save(runner, state)
        while (status := runner.poll(active)) is None:
            runner.sleep(POLL_S)
        ((run, outcome),) = runner.finish(active, status)
        attempts.append((run, outcome))
        if outcome.state == "succeeded":
            runner.work.delete(_STATE)
            return attempts
        if outcome.state == "cancelled" and run.end_cause == "time_limit":
            raise LaunchError(
                f"{outcome.message} To continue from the last checkpoint, raise the limits (tula jobs edit) and repeat "
                "this command."
            )
        if len(attempts) > max_restarts:
            raise LaunchError(f"the training did not finish in {len(attempts)} attempts: see {active.log}")
        if outcome.state == "out_of_memory":
            state.configuration = _fall_back(runner, job, template, state.configuration)
        elif outcome.state == "failed" and (_preempted(active, status) or _newest_file(checkpoints) != before):
            runner.reporter.note(f"{outcome.message} Restarting from the last checkpoint in {checkpoints}.")
        else:
            text = f"run {run.id}: {outcome.message} Log: {active.log}{outcome.listed}"
            raise LaunchError(text, f"run {run.id} {outcome.state}: correct the command and repeat `tula run`")
        _save(runner, state)


def _save(runner: Runner, state: _State) -> None:
    """Save the state for a later `tula run`; if writing fails, print a note and let the training continue."""
    try:
        runner.work.save(_STATE, state)
    except OSError as error:
        runner.reporter.note(
            f"{runner.work.path} cannot be written ({error.strerror}). Training continues, but a later `tula run` "
            "cannot resume it."
        )


def _preempted(active: ActiveRun, status: int) -> bool:
    """Return True if the host ended the command; False if `tula` ended it at a limit that every attempt would reach."""
    return status in _PREEMPTED and active.stacks_dumped_at is None


def _begin(runner: Runner, job: Job, fresh: bool, reconfigure: bool, configuration: Configuration | None) -> _State:
    """Return the state of the unfinished training run to continue, or the state of a new training run."""
    work, note = runner.work, runner.reporter.note
    state = None if fresh else work.load(_State, _STATE)
    if state is not None and not may_hold_files(work.checkpoints(state.training)):
        note("The unfinished training run left no checkpoint, so training starts from the beginning.")
        state = None  # the old configuration may be an outdated guess
    if state is None:
        return _State(configuration or _recommended(runner, job), work.next_training())
    if configuration is not None:
        state.configuration = configuration
        note("Continuing the unfinished training with the requested configuration.")
    elif reconfigure:
        state.configuration = _recommended(runner, job)
        note("Continuing the unfinished training with the current recommendation.")
    else:
        note(
            "Continuing the unfinished training. Use --fresh to start from the beginning, or --reconfigure to "
            "continue with the current recommendation."
        )
    return state


def _create_run(runner: Runner, job: Job, state: _State, method: str | None) -> Run:
    """Register a run that continues the previous run, or an independent run if the previous run no longer exists."""
    try:
        return runner.create_run(job, "train", state.configuration, method=method, continues=state.run_id)
    except InvalidInputError as error:
        if error.field != "continues":
            raise
    runner.reporter.note(
        f"Run {state.run_id} no longer exists on the service, so its time and cost do not count toward the limits."
    )
    return runner.create_run(job, "train", state.configuration, method=method)


def _recommended(runner: Runner, job: Job) -> Configuration:
    recommendation = runner.retrying(runner.service.recommendation, job.id)
    if recommendation.chosen is None:
        raise LaunchError(f"there is no configuration to train with: {recommendation.why}")
    if recommendation.basis == "prior":
        runner.reporter.note(
            "This job has no measurements, so this configuration is a guess. To measure the job, use `tula tune`."
        )
    return check_configuration(recommendation.chosen.configuration, job)


def _learning_rate_factor(runner: Runner, job: Job, template: Template, configuration: Configuration) -> float:
    """Return the value of `{learning_rate_factor}`; if the configuration has none, print a note and return 1."""
    if "learning_rate_factor" not in template.placeholders:
        return 1.0
    candidates = runner.retrying(runner.service.recommendation, job.id).candidates
    factors = (
        candidate.learning_rate_factor
        for candidate in candidates
        if _steps_alike(candidate.configuration, configuration)
    )
    factor = next(factors, None)  # candidates have only options that were launched, so none may match
    if factor is None:
        runner.reporter.note("No learning rate factor is known for this batch, so {learning_rate_factor} is 1.")
    return 1.0 if factor is None else factor


def _steps_alike(one: Configuration, other: Configuration) -> bool:
    """Return True if the learning rate factors of two configurations are equal.

    The factors are equal if the global batches are equal and if either both configurations or neither of them split the
    global batch into several local batches.
    """
    divided, also = (c.world_size * c.grad_accum_steps > 1 for c in (one, other))
    return one.global_batch_size == other.global_batch_size and divided == also


def _newest_file(folder: Path) -> tuple[str, float] | None:
    """Return the name and modification time of the newest file in `folder` at any depth, or None if there is none."""
    entries = []
    with suppress(OSError):  # the script may delete checkpoints at the same time
        for entry in folder.rglob("*"):
            with suppress(OSError):
                if entry.is_file():
                    entries.append((entry.stat().st_mtime, entry.name))
    return (max(entries)[1], max(entries)[0]) if entries else None


def _fall_back(runner: Runner, job: Job, template: Template, failed: Configuration) -> Configuration:
    """Return the next smaller configuration to try after an out-of-memory failure, and print a note about it.

    Its local batch is at most the largest local batch of any candidate that fits, according to a memory model that
    takes the failure into account. Only candidates with the same instance type and options as the failed configuration
    are considered, since the options affect memory.
    """
    bound = max(
        (
            candidate.configuration.local_batch_size
            for candidate in runner.retrying(runner.service.recommendation, job.id).candidates
            if (candidate.configuration.instance_type, candidate.configuration.options)
            == (failed.instance_type, failed.options)
            and _fits(candidate, job)
        ),
        default=None,
    )
    smaller = next_smaller(failed, can_accumulate=template.can_accumulate, max_local_batch_size=bound)
    if smaller is None:
        raise LaunchError(
            f"a local batch of {failed.local_batch_size} ran out of memory and there is no smaller batch to try: "
            "use a smaller model or more memory per rank"
        )
    runner.reporter.note(_explain_fallback(failed, smaller))
    return smaller


def _fits(candidate: Candidate, job: Job) -> bool:
    """Return True if a candidate fits into memory with at least the required probability.

    If the probability is unknown, a candidate fits unless it is excluded.
    """
    if candidate.memory_fits is None:
        return candidate.excluded_by is None
    return candidate.memory_fits >= job.spec.profiling.memory_safety


def next_smaller(
    failed: Configuration, *, can_accumulate: bool, max_local_batch_size: int | None = None
) -> Configuration | None:
    """Return the configuration to try after `failed` ran out of memory, or None if no smaller configuration exists.

    If possible, the global batch stays the same: the local batch b becomes smaller and accumulation increases, so that
    b x accumulation stays constant. The result has the largest such b that is below the failed b and at most
    `max_local_batch_size`, but never below a quarter of this bound, since smaller batches waste the accelerator. If the
    script cannot accumulate gradients, the result has the same nodes and half the local batch, so the global batch
    becomes smaller.
    """
    bound = min(failed.local_batch_size - 1, max_local_batch_size or failed.local_batch_size)
    if can_accumulate:
        per_rank = failed.local_batch_size * failed.grad_accum_steps
        for local in range(bound, max(1, bound // 4) - 1, -1):
            if per_rank % local == 0:
                return replace(failed, local_batch_size=local, grad_accum_steps=per_rank // local)
    local = failed.local_batch_size // 2
    while local > bound:
        local //= 2
    return replace(failed, local_batch_size=local) if local else None


def _explain_fallback(failed: Configuration, smaller: Configuration) -> str:
    start = f"Out of memory at a local batch of {failed.local_batch_size}: continuing with {smaller.local_batch_size}"
    if smaller.global_batch_size == failed.global_batch_size:
        return (
            f"{start} and {smaller.grad_accum_steps} accumulation steps. The global batch stays "
            f"{smaller.global_batch_size}, so keep the learning rate; a step takes longer."
        )
    ratio = smaller.global_batch_size / failed.global_batch_size
    return (
        f"{start}. The global batch falls from {failed.global_batch_size} to {smaller.global_batch_size}: multiply a "
        f"learning rate chosen for the larger batch by {ratio:g} (SGD, linear rule) or {sqrt(ratio):.3g} (Adam, square "
        "root rule)."
    )
