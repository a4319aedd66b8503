"""Builds and runs the `tula` command from the sub-commands of this package and of other packages.

A command that fails prints one sentence and exits with a code from `ExitCode`.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, Final

import typer
from pydantic import ValidationError

from tula_client._errors import ExitCode, TulaError
from tula_client._settings import access, package_version
from tula_client._spec import faults
from tula_client.cli import data, gate, init, jobs, launch, mcp
from tula_wire.text import printable

GROUP: Final = "tula.commands"
EXTRAS: Final = {"tula_service": "service", "tula_agent": "agent"}
EPILOG: Final = (
    "Exit codes: 0 success, 1 failure, 2 wrong usage or input, 3 slower (tula gate), 4 not allowed, 5 not found, "
    "6 service unreachable, 130 interrupted. TULA_URL sets the service's address and TULA_TOKEN the token; if they are "
    "unset, tula reads .env and ~/.config/tula/config.toml."
)
CONTINUING: Final = frozenset({"tune", "run"})
"""Commands that resume interrupted work when they are repeated."""
LAUNCHING: Final = CONTINUING | {"gate"}
"""Commands that expect a launch command after `--`."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, then exit with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):  # raised for a pipe that is also open for reading
                stream.reconfigure(errors="replace")  # an unencodable character must not end a training run
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """Run the command line and return its exit code; failures are printed to standard error."""
    try:
        result = build(arguments)(args=arguments, prog_name="tula", standalone_mode=False)
    except TulaError as error:
        return _fail(str(error), error.exit_code)
    except ValidationError as error:
        return _fail(faults(error)[0], ExitCode.USAGE)
    except KeyboardInterrupt:
        result = ExitCode.INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
    except Exception as error:
        if not hasattr(error, "format_message"):
            if type(error).__name__ == "Abort":
                return _fail("stopped", ExitCode.FAILED)
            raise
        return _fail(_usage(error, arguments), ExitCode.USAGE)
    if result == ExitCode.INTERRUPTED and CONTINUING & set(arguments):  # typer returns this code after Ctrl-C
        return _fail("stopped; repeat the command to continue", ExitCode.INTERRUPTED)
    return result if isinstance(result, int) else ExitCode.OK


def _usage(error: Exception, arguments: list[str]) -> str:
    """Return the message for a command line that the parser rejected; it names the command that prints the help."""
    sentence = str(error.format_message()).strip()  # type: ignore[attr-defined]
    if not sentence:
        return ""
    path = getattr(getattr(error, "ctx", None), "command_path", "tula")
    launches = path.rpartition(" ")[2] in LAUNCHING and "--" not in arguments
    remedy = "put -- before your launch command, " if launches else ""
    return f"{' '.join(sentence.split()).rstrip('.')}: {remedy}see {path} --help"


def _fail(sentence: str, code: int) -> int:
    """Print the error message, unless it is empty, and return the exit code."""
    if sentence:
        print("\n".join(map(printable, f"tula: {sentence}".split("\n"))), file=sys.stderr)
    return code


def build(arguments: Sequence[str] = ()) -> typer.Typer:
    """Return the complete `tula` command.

    A sub-command of another package is imported only if `arguments` name it.
    """
    app = typer.Typer(
        name="tula",
        help="Recommend the number of nodes and the global batch size for a PyTorch training job.",
        epilog=EPILOG,
        no_args_is_help=True,
        rich_markup_mode="markdown",  # the default mode would interpret [model] and tula[service] as styles
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    commands = (
        init.init,
        jobs.recommend,
        jobs.predict,
        jobs.runs,
        launch.tune,
        launch.run,
        gate.gate,
        launch.launchers,
    )
    _add(app, *commands, launch.logs, jobs.watch, jobs.open_, data.plot, data.export, mcp.mcp)
    on_jobs = typer.Typer(help="Add, list, show, edit, archive and delete jobs.", no_args_is_help=True)
    _add(on_jobs, jobs.add, jobs.list_, jobs.show, jobs.edit, jobs.archive, jobs.delete)
    app.add_typer(on_jobs, name="jobs")
    on_scaling = typer.Typer(help="Show and set a job's gradient-scaling values.", no_args_is_help=True)
    _add(on_scaling, jobs.show_scaling, jobs.set_scaling)
    app.add_typer(on_scaling, name="scaling")
    word = _first_word(arguments)
    for name, point in sorted(plugins().items()):
        _add_plugin(app, name, point, load=word in (None, name))
    return app


def _add(app: typer.Typer, *commands: Callable[..., int | None]) -> None:
    for command in commands:
        app.command(command.__name__.partition("_")[0])(command)


def plugins() -> dict[str, EntryPoint]:
    """Return the entry points of installed sub-commands by name; each loads a function or a `typer.Typer`."""
    return {point.name: point for point in entry_points(group=GROUP)}


def _print_version(version: bool) -> None:
    if version:
        print(f"tula {package_version()}")
        raise typer.Exit


def _root(
    context: typer.Context,
    url: Annotated[
        str, typer.Option("--url", help="Use this address of the service instead of TULA_URL.", metavar="URL")
    ] = "",
    version: Annotated[  # noqa: ARG001 - its callback ends the command
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    context.obj = settings = access(url)
    # The commands that this command starts inherit these variables, since the agent reads only the environment.
    if settings.origin not in ("TULA_URL", "default"):
        os.environ["TULA_URL"] = settings.url
    if settings.token:
        os.environ["TULA_TOKEN"] = settings.token


def _first_word(arguments: Sequence[str]) -> str | None:
    """Return the name of the sub-command, or None if there is none and the help must list all sub-commands."""
    rest = iter(arguments)
    for word in rest:
        if word == "--url":
            next(rest, None)
        elif not word.startswith("-"):
            return word
    return None


def _add_plugin(app: typer.Typer, name: str, point: EntryPoint, *, load: bool) -> None:
    settings: dict[str, Any] | None = None
    try:
        plugin: Any = point.load() if load else _unloaded
    except Exception as error:  # a broken package must not break the other commands
        plugin, settings = _broken(name, point, error), {"ignore_unknown_options": True, "allow_extra_args": True}
    if isinstance(plugin, typer.Typer):
        app.add_typer(plugin, name=name)
    else:
        app.command(name, context_settings=settings)(plugin)


def _unloaded() -> None:
    """Stand in for a sub-command of another package, which is imported only when the sub-command is called."""


def _broken(name: str, point: EntryPoint, error: Exception) -> Callable[..., int | None]:
    extra = EXTRAS.get(point.value.partition(".")[0])
    remedy = f"run pip install 'tula[{extra}]'" if extra else f"reinstall {point.value.partition(':')[0]}"

    def missing() -> None:
        raise TulaError(f"{name} is not available ({error}): {remedy}")

    missing.__doc__ = f"Not available: {remedy}."
    return missing
