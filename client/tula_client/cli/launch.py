"""Implements the commands `tula tune`, `tula run`, `tula launchers` and `tula logs`."""

from __future__ import annotations

import dataclasses
import glob
import math
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from tula_client import Client, RetryPolicy
from tula_client._errors import ExitCode, LaunchError, TulaError, UsageError
from tula_client._spec import load_spec
from tula_client.cli.jobs import menu_table, recommendation_view
from tula_client.cli.output import JobName, Json, emit, lasting_console
from tula_client.launch.judge import Outcome
from tula_client.launch.registration import register
from tula_client.launch.reporter import Reporter
from tula_client.launch.run_loop import Runner
from tula_client.launch.template import LAUNCHERS, Template, with_launcher
from tula_client.launch.train import train
from tula_client.launch.tune import (
    Tuned,
    cost_of_explaining,
    named_configuration,
    to_explain,
    to_measure_again,
    work_through,
)
from tula_client.launch.workdir import WorkDir
from tula_wire import Configuration, Job, JobPatch, JobSpec, Recommendation, Run, Verdict
from tula_wire.format import configuration as in_words
from tula_wire.options import PLACEHOLDERS
from tula_wire.text import printable
from tula_wire.verdict import sentence

RETRY = RetryPolicy(max_attempts=3, budget_s=10.0)
"""Few retries of each request are needed, because the runner retries for minutes while it supervises runs."""
TIMEOUT_S = 15.0
_TRAINING_GRACE_S = 30.0
"""Seconds between SIGTERM and SIGKILL for a training run, which leave time to write a checkpoint."""

_Runs = Sequence[tuple[Run, Outcome]]
_Verdicts = Sequence[tuple[Run, Verdict]]

Command = Annotated[
    list[str], typer.Argument(metavar="-- COMMAND...", help="Launch command with {placeholders}; see tula launchers.")
]
LauncherName = Annotated[
    str | None, typer.Option("--launcher", metavar="NAME", help="Prepend a ready-made template; see tula launchers.")
]
StopCommand = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT", help="Command that cancels a submitted job, such as 'scancel --name=tula-{launch_id}'."
    ),
]
Folder = Annotated[Path, typer.Option(help="Folder for logs, spools and checkpoints.")]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        min=1,
        help="Time limit in seconds, which applies separately to the start-up (until the first measurement) and to the "
        "rest of the run; at the limit, each rank prints its stack and the run is stopped.",
    ),
]


def tune(
    spec: Annotated[Path, typer.Argument(metavar="SPEC.toml", help="The job's specification.")],
    command: Command,
    launcher: LauncherName = None,
    max_parallel: Annotated[int, typer.Option(min=1, help="Maximum number of concurrent runs.")] = 1,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of nodes in use (default: the job's max_nodes).")
    ] = None,
    max_failures: Annotated[int, typer.Option(min=1, help="Stop after this many consecutive failures.")] = 3,
    again: Annotated[
        list[str],
        typer.Option(
            metavar="failed|all|NODESxBATCH|RUN",
            help="What to measure again before the plan: failed, all, nodes x local batch as in 2x64 or "
            "2x64,precision=bf16, or a run's id.",
        ),
    ] = [],  # noqa: B006 - typer copies
    only: Annotated[
        str | None,
        typer.Option(metavar="OPTION,...", help="Vary only these options of the job; others keep their first values."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Launch every option value once, even values that cannot be the best.")
    ] = False,
    then_run: Annotated[
        bool, typer.Option("--then-run", help="Afterwards, train with the recommended configuration.")
    ] = False,
    stop_command: StopCommand = None,
    work_dir: Folder = Path(".tula"),
    time_limit: TimeLimit = 1800.0,
    as_json: Json = False,
) -> int:
    """Run the service's profiling plan and print its recommendation; if interrupted, repeat the command to continue."""
    job_spec = load_spec(spec)
    if only is not None:
        job_spec = _narrowed(job_spec, only.split(","))
    template, stop = checked_templates(command, launcher, stop_command, job_spec)
    with Client(timeout_s=TIMEOUT_S, retry=RETRY) as client, open_reporter(as_json) as reporter:
        registered = register(client, job_spec, retry_failed=True)
        job = registered.job
        with open_runner(client, job, work_dir, reporter, time_limit_s=time_limit, stop_template=stop) as runner:
            for note in registered.notes:
                reporter.note(note)
            reporter.job(job)
            configurations: tuple[Configuration, ...] = ()
            if again:
                handle = client.handle(job.id)
                candidates = (candidate.configuration for candidate in handle.recommendation().candidates)
                configurations = to_measure_again(again, handle.runs(), candidates, job.spec.options)
            limits: dict[str, Any] = {"max_parallel": max_parallel, "max_failures": max_failures, "node_budget": nodes}
            tuned = work_through(runner, job, template, again=configurations, **limits)
            if explain:
                tuned = _with_explanations(runner, tuned, template, limits)
            if not as_json and sys.stdin.isatty() and sys.stdout.isatty() and may_ask(tuned, then_run=then_run):
                tuned = _with_waiting(client, tuned)
            trained = None
            if then_run and tuned.job.state == "finished":
                reporter.note("This job has already been trained: use `tula run` to train it again.")
            elif then_run:
                reporter.note(tuned.recommendation.why)
                runner.time_limit_s = None
                trained = train(runner, job, template)
        verdicts = [
            *_verdict_on(client, run_like(tuned.recommendation, tuned.job.plan)),
            *(() if trained is None else _verdict_on(client, trained[-1][0])),
        ]
    emit(_tuned_plain(tuned, trained, verdicts), _tuned_view(tuned, trained, verdicts), as_json)
    return ExitCode.OK if tuned.recommendation.chosen is not None else ExitCode.FAILED


def _narrowed(spec: JobSpec, names: list[str]) -> JobSpec:
    """Return the specification with only the named options varied. Raises `UsageError` if the job lacks an option."""
    for name in names:
        if name not in spec.options:
            choices = f"use {', '.join(sorted(spec.options))}" if spec.options else "list it under [options] in the job"
            raise UsageError(f"--only: {name!r} is not an option of the job: {choices}")
    return spec.model_copy(update={"profiling": spec.profiling.model_copy(update={"only": names})})


def _with_explanations(runner: Runner, tuned: Tuned, template: Template, limits: dict[str, Any]) -> Tuned:
    """Print the total cost of launching the option values that the plan has not launched, then launch these values."""
    chosen = tuned.recommendation.chosen
    configurations = to_explain(tuned.job, None if chosen is None else chosen.configuration)
    if not configurations:
        return tuned
    runner.reporter.note(cost_of_explaining(tuned.job, configurations))
    explained = work_through(runner, tuned.job, template, again=configurations, **limits)
    return dataclasses.replace(explained, finished=(*tuned.finished, *explained.finished))


def may_ask(tuned: Tuned, *, then_run: bool) -> bool:
    """Return True if the user can be asked what waiting costs and the answer could change the recommendation.

    If `then_run` is True, the result is False, since the user may be absent and training would wait for an answer.
    """
    priced = [point for point in tuned.recommendation.menu if point.cost_usd is not None]
    open_ = tuned.job.spec.usd_per_hour_of_waiting is None and tuned.recommendation.objective == "balanced"
    return open_ and len(priced) > 1 and not then_run


def _with_waiting(client: Client, tuned: Tuned) -> Tuned:
    """Show the configurations to choose from, ask the user for the cost of waiting, and return `tuned` with that cost.

    If the user types no cost, return `tuned` unchanged.
    """
    lasting_console().print(menu_table(tuned.recommendation))
    text = "What does an hour of waiting cost you, in US dollars? (Press Enter to skip)"
    try:
        usd = typer.prompt(text, default="", show_default=False, value_proc=usd_typed)
    except typer.Abort as abort:
        if not isinstance(abort.__context__, EOFError):  # Ctrl-C or SIGTERM
            raise KeyboardInterrupt from None
        usd = None
    if usd is None:
        return tuned
    job = client.patch_job(tuned.job.id, JobPatch(usd_per_hour_of_waiting=usd))
    return dataclasses.replace(tuned, job=job, recommendation=client.recommendation(job.id))


def usd_typed(text: str) -> float | None:
    """Return the amount of US dollars that the user typed, or None for an empty line.

    Raises `typer.BadParameter` if the text is not an amount, so that typer repeats the question.
    """
    if not text.strip():
        return None
    try:
        usd = float(text.strip().removeprefix("$"))
    except ValueError:
        usd = -1.0
    if not 0.0 < usd < float("inf"):
        raise typer.BadParameter(f"{text!r} is not an amount above 0: give a number such as 25, or press Enter")
    return usd


def run(
    job: JobName,
    command: Command,
    launcher: LauncherName = None,
    method: Annotated[
        str | None, typer.Option(help="Label of the quality method that the script uses, for comparing runs.")
    ] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="Maximum number of restarts.")] = 10,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start a new training run instead of continuing.")] = False,
    reconfigure: Annotated[
        bool, typer.Option("--reconfigure", help="Continue the unfinished run with the current recommendation.")
    ] = False,
    configuration: Annotated[
        str | None,
        typer.Option(
            metavar="NODESxBATCH|RUN",
            help="Configuration to train with: nodes x local batch as in 2x64 or 2x64,precision=bf16, or a run's id.",
        ),
    ] = None,
    stop_command: StopCommand = None,
    work_dir: Folder = Path(".tula"),
    time_limit: TimeLimit = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not print the output of the training command.")] = False,
    as_json: Json = False,
) -> None:
    """Train with the recommended configuration; after a failure or an interruption, resume from the last checkpoint."""
    if fresh and reconfigure:
        raise typer.BadParameter("--fresh and --reconfigure are mutually exclusive: use only one")
    with Client(timeout_s=TIMEOUT_S, retry=RETRY) as client, open_reporter(as_json, quiet) as reporter:
        handle = client.handle(job)
        registered = handle.status()
        template, stop = checked_templates(command, launcher, stop_command, registered.spec)
        fixed: Configuration | None = None
        if configuration is None:
            _note_change(client, registered, reporter)
        else:
            runs = {run.configuration: run for run in sorted(handle.runs(), key=lambda run: run.id == configuration)}
            candidates = (candidate.configuration for candidate in handle.recommendation().candidates)
            options_of_job = registered.spec.options
            fixed = named_configuration(configuration, runs, candidates, options_of_job, "--configuration")
        options = {"time_limit_s": time_limit, "grace_s": _TRAINING_GRACE_S, "stop_template": stop}
        with open_runner(client, registered, work_dir, reporter, **options) as runner:
            choices: dict[str, Any] = {"fresh": fresh, "reconfigure": reconfigure, "configuration": fixed}
            trained = train(runner, registered, template, method=method, max_restarts=max_restarts, **choices)
        verdicts = _verdict_on(client, trained[-1][0])
    emit(_trained_plain(trained, verdicts), Group(_trained_view(trained), *map(_verdict_view, verdicts)), as_json)


def _note_change(client: Client, job: Job, reporter: Reporter) -> None:
    """Print a note if the recommendation differs from the configuration of the last successful training run."""
    newest = client.runs(job.id, kind="train", limit=1).runs
    chosen = client.recommendation(job.id).chosen
    if not newest or newest[0].state != "succeeded" or chosen is None:
        return
    last = newest[0].configuration
    if last != chosen.configuration:
        accumulation = f"x{last.grad_accum_steps}" if last.grad_accum_steps > 1 else ""
        options = "".join(f",{name}={word}" for name, word in last.options)
        reporter.note(
            f"The recommendation has changed since the last training run, which used {in_words(last)}. To use that "
            f"configuration again, add --configuration {last.num_nodes}x{last.local_batch_size}{accumulation}{options}."
        )


def launchers(as_json: Json = False) -> None:
    """Print the ready-made launch templates and all placeholders."""
    plain = {
        "launchers": {name: {"name": name, **dataclasses.asdict(launcher)} for name, launcher in LAUNCHERS.items()},
        "placeholders": dict(PLACEHOLDERS),
    }
    lines = []
    for name, launcher in LAUNCHERS.items():
        lines += [f"{name}: {launcher.description}", f"    {shlex.join(launcher.words)} SCRIPT ARGUMENTS..."]
        if launcher.stop_words:
            lines.append(f"    cancelled by: {shlex.join(launcher.stop_words)}")
    lines += ["", "Placeholders:", *(f"    {{{name}}}".ljust(24) + meaning for name, meaning in PLACEHOLDERS.items())]
    emit(plain, Text("\n".join(lines)), as_json)


def checked_templates(
    command: list[str], launcher: str | None, stop_command: str | None, spec: JobSpec
) -> tuple[Template, Template | None]:
    """Return the launch command, checked against the job, and the command that cancels a launch, or None."""
    options = frozenset(spec.options)
    words, stop_words = (command, []) if launcher is None else with_launcher(launcher, command)
    template = Template(tuple(words), options)
    template.check(spec)
    if stop_command is None:
        return template, Template(tuple(stop_words)) if stop_words else None
    try:
        return template, Template(tuple(shlex.split(stop_command)), options)
    except (ValueError, UsageError) as error:
        message = str(error)
        raise UsageError(f"--stop-command is invalid: {message[:1].lower()}{message[1:]}") from None


def open_reporter(as_json: bool, quiet: bool = False) -> Reporter:
    return Reporter(Console(quiet=True) if as_json else lasting_console(), quiet=quiet)


@contextmanager
def open_runner(client: Client, job: Job, work_dir: Path, reporter: Reporter, **options: Any) -> Iterator[Runner]:
    """Lock the job's folder and yield a runner for the job; `orderly_end` handles signals meanwhile."""
    work = WorkDir(work_dir, job.id)
    with work.locked() as holder, orderly_end():
        try:
            with Runner(client, work, holder, reporter, **options) as runner:
                yield runner
        except LaunchError as error:
            raise LaunchError(str(error) if reporter.is_quiet else error.brief) from None


@contextmanager
def orderly_end() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, which stops the running commands and releases their leases.

    Ignore SIGHUP, which a closing terminal sends, and SIGUSR1 and SIGUSR2, with which SLURM announces the end of an
    allocation.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    handlers: dict[int, Any] = dict.fromkeys((signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2), _go_on)
    handlers = {number: go_on for number, go_on in handlers.items() if signal.getsignal(number) is signal.SIG_DFL}
    handlers[signal.SIGTERM] = interrupt
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _go_on(_number: int, _frame: FrameType | None) -> None:
    """Ignore a signal; unlike SIG_IGN, a handler is not inherited by the commands that this process starts."""


def run_like(recommendation: Recommendation, plan: Sequence[Run]) -> Run | None:
    """Return the measured run of the recommended configuration, or else the most similar measured run, or None.

    The most similar run differs in the fewest options; ties are broken by the number of nodes, then by the batch.
    """
    chosen = recommendation.chosen
    measured = [run for run in plan if run.state == "succeeded"]
    if chosen is None or not measured:
        return None

    def distance(run: Run) -> tuple[int, bool, float, float]:
        have, want = run.configuration, chosen.configuration
        nodes, batch = have.num_nodes / want.num_nodes, have.global_batch_size / want.global_batch_size
        others = len({*want.options} - {*have.options})
        return others, have != want, abs(math.log(nodes)), abs(math.log(batch))

    return min(measured, key=distance)


def _verdict_on(client: Client, run: Run | None) -> list[tuple[Run, Verdict]]:
    """Return a list of the run and its verdict, or an empty list if there is no verdict or the request fails."""
    if run is None:
        return []
    with suppress(TulaError):
        verdict = client.verdict(run.id)
        return [(run, verdict)] if verdict.diagnosis != "unknown" else []
    return []


def _verdict_view(verdict: tuple[Run, Verdict]) -> RenderableType:
    run, said = verdict
    return Group(Text(), Text(f"Verdict on run {run.id} ({in_words(run.configuration)})."), Text(sentence(said)))


def _verdicts_plain(verdicts: _Verdicts) -> list[dict[str, Any]]:
    return [{"run": run.id, **said.model_dump(mode="json")} for run, said in verdicts]


def _tuned_plain(tuned: Tuned, trained: _Runs | None, verdicts: _Verdicts) -> dict[str, Any]:
    return {
        "job": tuned.job,
        "reason": tuned.job.plan_reason,
        "runs": _runs_plain(tuned.finished),
        "recommendation": tuned.recommendation,
        "trained": None if trained is None else _trained_plain(trained, verdicts),
        "verdicts": _verdicts_plain(verdicts),
    }


def _trained_plain(attempts: _Runs, verdicts: _Verdicts) -> dict[str, Any]:
    run, _ = attempts[-1]
    return {
        "run": run.id,
        "configuration": run.configuration,
        "global_batch_size": run.configuration.global_batch_size,
        "attempts": _runs_plain(attempts),
        "verdicts": _verdicts_plain([(of, said) for of, said in verdicts if of.id == run.id]),
    }


def _runs_plain(runs: _Runs) -> list[dict[str, Any]]:
    said = ("state", "message", "lines")
    return [
        {"run": run.id, "configuration": run.configuration} | {name: getattr(outcome, name) for name in said}
        for run, outcome in runs
    ]


def logs(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="A run's id; tula runs JOB lists the ids.")],
    work_dir: Folder = Path(".tula"),
) -> None:
    """Print the output of a run's most recent command; this works only on the machine that launched it."""
    paths = sorted(work_dir.glob(f"*/logs/{glob.escape(run_id)}-*.log"), key=lambda path: path.stat().st_mtime)
    if not paths:
        raise UsageError(
            f"RUN: there is no log of {run_id!r} in {work_dir}: give --work-dir if the run used another folder"
        )
    for line in paths[-1].read_text(encoding="utf-8", errors="replace").splitlines():
        print(printable(line))


def _tuned_view(tuned: Tuned, trained: _Runs | None, verdicts: _Verdicts) -> RenderableType:
    lines: list[RenderableType] = [
        Text(f"{tuned.job.name} ({tuned.job.id}): {tuned.job.plan_reason}"),
        Text(),
        recommendation_view(tuned.recommendation, candidates=True),
    ]
    if trained is not None:
        lines += [Text(), _trained_view(trained)]
    return Group(*lines, *map(_verdict_view, verdicts))


def _trained_view(attempts: _Runs) -> RenderableType:
    run, outcome = attempts[-1]
    if outcome.message:  # already printed as a note, such as that the run used another configuration
        return Text(f"Trained: run {run.id}.")
    return Text(f"Trained with {in_words(run.configuration)}: run {run.id}.")
