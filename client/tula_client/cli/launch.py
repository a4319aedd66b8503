"""`tula tune`, `tula run` and `tula launchers`: the user's own launch command, from a job's spec to trained weights."""

from __future__ import annotations

import dataclasses
import os
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from tula_client import Client, RetryPolicy
from tula_client.cli import units
from tula_client.cli.options import JobName, Json
from tula_client.cli.output import console, emit
from tula_client.cli.progress import ProgressReporter
from tula_client.cli.recommend import recommendation_view
from tula_client.handle import find_job
from tula_client.launch import (
    LAUNCHERS,
    PLACEHOLDERS,
    Outcome,
    PlanOptions,
    Reporter,
    Runner,
    RunnerOptions,
    Silent,
    Template,
    TemplateError,
    Trained,
    TrainOptions,
    Tuned,
    WorkDir,
    load_spec,
    register,
    train,
    with_launcher,
    work_through,
)

__all__ = ["add_to", "launchers", "run", "tune"]

_RETRY = RetryPolicy(max_attempts=3, budget_s=10.0)
"""Short, because the loops wait for an absent service themselves and keep an eye on their processes meanwhile."""
_TIMEOUT_S = 15.0

Command = Annotated[
    list[str], typer.Argument(metavar="-- COMMAND...", help="Your launch command, with {placeholders}: see launchers.")
]
LauncherName = Annotated[
    str | None, typer.Option("--launcher", metavar="NAME", help="Put a ready-made template first: see launchers.")
]
StopCommand = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT", help="Cancels what a command only submitted, as in 'scancel --name=tula-{launch_id}'."
    ),
]
Folder = Annotated[Path, typer.Option(help="Where logs, spools and checkpoints lie.")]
TimeLimit = Annotated[
    float | None, typer.Option(min=1, help="Seconds that a run may take; then each rank shows its stack and is ended.")
]
Lease = Annotated[float, typer.Option(min=5, max=86400, help="Seconds after which an unattended run goes back.")]
Grace = Annotated[float, typer.Option(min=0, help="Seconds between asking a command to end and killing it.")]
Patience = Annotated[float, typer.Option(min=0, help="Seconds to wait for a service that is away.")]


def add_to(app: typer.Typer) -> None:
    """Give `app` these commands."""
    app.command("tune")(tune)
    app.command("run")(run)
    app.command("launchers")(launchers)


def tune(
    spec: Annotated[Path, typer.Argument(metavar="SPEC.toml", help="The job's specification.")],
    command: Command,
    launcher: LauncherName = None,
    max_parallel: Annotated[int, typer.Option(min=1, help="Runs at once.")] = 1,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes in use at once; default: the job's most.")] = None,
    max_failures: Annotated[int, typer.Option(min=1, help="Give up after so many failures in a row.")] = 3,
    then_run: Annotated[bool, typer.Option("--then-run", help="Train with the recommendation afterwards.")] = False,
    stop_command: StopCommand = None,
    work_dir: Folder = Path(".tula"),
    time_limit: TimeLimit = 1800.0,
    lease: Lease = 60.0,
    grace: Grace = 10.0,
    patience: Patience = 600.0,
    as_json: Json = False,
) -> None:
    """Profile the runs that the service asks for and print its recommendation; goes on where it stopped."""
    template, stop = _templates(command, launcher, stop_command)
    job_spec = load_spec(spec)
    template.check(job_spec)
    with _connect() as client, _reporter(as_json) as reporter:
        options = _options(client, stop, time_limit, lease, grace, patience)
        found = register(client, job_spec, work_dir)
        job, work = found.job, WorkDir(work_dir, found.job.id)
        with work.held() as holder, _signals_interrupt():
            found.remember(work)
            for told in found.notes:
                reporter.note(told)
            reporter.job(job)
            plan = PlanOptions(max_parallel=max_parallel, node_budget=nodes, max_failures=max_failures)
            runner = Runner(client, work, holder, options, reporter)
            tuned = work_through(client, job, template, runner, plan, reporter)
            trained = None
            if then_run and tuned.job.state == "finished":
                reporter.note("This job has been trained to its end already: `tula run` trains it another time.")
            elif then_run:
                reporter.note(tuned.recommendation.why)
                runner = Runner(client, work, holder, dataclasses.replace(options, time_limit_s=None), reporter)
                trained = train(client, job, template, runner, work, TrainOptions(), reporter)
    emit(_tuned_plain(tuned, trained), _tuned_view(tuned, trained), as_json)


def run(
    job: JobName,
    command: Command,
    launcher: LauncherName = None,
    method: Annotated[str | None, typer.Option(help="Name of the quality method, to compare runs by.")] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="Starts after the first before giving up.")] = 10,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start another training, not the one begun before.")] = False,
    reconfigure: Annotated[
        bool, typer.Option("--reconfigure", help="Go on with the training begun before as is recommended by now.")
    ] = False,
    stop_command: StopCommand = None,
    work_dir: Folder = Path(".tula"),
    time_limit: TimeLimit = None,
    lease: Lease = 60.0,
    grace: Grace = 30.0,
    patience: Patience = 600.0,
    as_json: Json = False,
) -> None:
    """Train with the recommended configuration; goes on from the last checkpoint after out-of-memory or a stop."""
    if fresh and reconfigure:
        raise typer.BadParameter("give --fresh for another training or --reconfigure to go on with this one, not both")
    template, stop = _templates(command, launcher, stop_command)
    with _connect() as client, _reporter(as_json) as reporter:
        options = _options(client, stop, time_limit, lease, grace, patience)
        known = client.job(find_job(client, job))
        template.check(known.spec)
        work = WorkDir(work_dir, known.id)
        with work.held() as holder, _signals_interrupt():
            runner = Runner(client, work, holder, options, reporter)
            wanted = TrainOptions(method=method, max_restarts=max_restarts, fresh=fresh, reconfigure=reconfigure)
            trained = train(client, known, template, runner, work, wanted, reporter)
    emit(_trained_plain(trained), _trained_view(trained), as_json)


def launchers(as_json: Json = False) -> None:
    """Show the ready-made templates and every placeholder."""
    plain = {
        "launchers": {name: dataclasses.asdict(one) for name, one in LAUNCHERS.items()},
        "placeholders": dict(PLACEHOLDERS),
    }
    lines = []
    for one in LAUNCHERS.values():
        lines += [f"{one.name}: {one.description}", f"    {shlex.join(one.words)} SCRIPT ARGUMENTS..."]
        if one.stop_words:
            lines.append(f"    cancelled by: {shlex.join(one.stop_words)}")
    lines += ["", "Placeholders:", *(f"    {{{name}}}".ljust(24) + meaning for name, meaning in PLACEHOLDERS.items())]
    emit(plain, Text("\n".join(lines)), as_json)


def _templates(command: list[str], launcher: str | None, stop_command: str | None) -> tuple[Template, Template | None]:
    words, stop_words = (command, []) if launcher is None else with_launcher(launcher, command)
    if stop_command is None:
        return Template(tuple(words)), Template(tuple(stop_words)) if stop_words else None
    try:
        stop = Template(tuple(shlex.split(stop_command)))
    except (ValueError, TemplateError) as error:
        said = str(error)
        raise TemplateError(f"--stop-command cannot be used: {said[:1].lower()}{said[1:]}") from None
    return Template(tuple(words)), stop


def _connect() -> Client:
    return Client(timeout_s=_TIMEOUT_S, retry=_RETRY)


def _options(
    client: Client, stop: Template | None, time_limit_s: float | None, lease_s: float, grace_s: float, patience_s: float
) -> RunnerOptions:
    return RunnerOptions(
        url=client.url,
        token=os.environ.get("TULA_TOKEN") or None,
        time_limit_s=time_limit_s,
        lease_s=lease_s,
        grace_s=grace_s,
        patience_s=patience_s,
        stop_template=stop,
    )


@contextmanager
def _reporter(as_json: bool) -> Iterator[Reporter]:
    if as_json:
        yield Silent()
        return
    with ProgressReporter(console()) as reporter:
        yield reporter


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end `tula` as Ctrl-C does: commands stopped, leases given back."""

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _outcome(outcome: Outcome) -> dict[str, Any]:
    return {"state": outcome.state, "message": outcome.message, "lines": list(outcome.lines)}


def _tuned_plain(tuned: Tuned, trained: Trained | None) -> dict[str, Any]:
    return {
        "job": tuned.job,
        "reason": tuned.reason,
        "runs": [{"run": run.id, **_outcome(outcome)} for run, outcome in tuned.finished],
        "recommendation": tuned.recommendation,
        "trained": None if trained is None else _trained_plain(trained),
    }


def _trained_plain(trained: Trained) -> dict[str, Any]:
    attempts = [
        {"run": one.run.id, "configuration": one.run.configuration, **_outcome(one.outcome)} for one in trained.attempts
    ]
    return {
        "run": trained.run.id,
        "configuration": trained.configuration,
        "global_batch_size": trained.configuration.global_batch_size,
        "attempts": attempts,
    }


def _tuned_view(tuned: Tuned, trained: Trained | None) -> RenderableType:
    lines: list[RenderableType] = [
        Text(f"{tuned.job.name} ({tuned.job.id}): {tuned.reason}"),
        Text(),
        recommendation_view(tuned.recommendation, candidates=True),
    ]
    if trained is not None:
        lines += [Text(), _trained_view(trained)]
    return Group(*lines)


def _trained_view(trained: Trained) -> RenderableType:
    return Text(f"Trained with {units.configuration(trained.configuration)}: run {trained.run.id}.")
