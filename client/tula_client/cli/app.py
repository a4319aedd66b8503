"""The `tula` command, with sub-commands of this and other packages; a failure is a sentence and an exit code."""

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
    "Exit codes: 0 done, 1 failed, 2 wrong usage or input, 3 slower (tula gate), 4 not allowed, 5 not found, "
    "6 service unreachable, 130 interrupted. TULA_URL is the address of the service, TULA_TOKEN the token; without "
    "them, .env and ~/.config/tula/config.toml are read."
)
CONTINUING: Final = frozenset({"tune", "run"})
"""Commands that continue where they stopped."""
LAUNCHING: Final = CONTINUING | {"gate"}
"""Commands that take a launch command."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):  # of a pipe that is also open for reading
                stream.reconfigure(errors="replace")  # a character that the encoding lacks ends no training
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
    if result == ExitCode.INTERRUPTED and CONTINUING & set(arguments):  # as typer reports Ctrl-C
        return _fail("stopped; repeat the command to continue", ExitCode.INTERRUPTED)
    return result if isinstance(result, int) else ExitCode.OK


def _usage(error: Exception, arguments: list[str]) -> str:
    """Return the message for a command line that the parser rejects, with the command that prints the help."""
    sentence = str(error.format_message()).strip()  # type: ignore[attr-defined]
    if not sentence:
        return ""
    path = getattr(getattr(error, "ctx", None), "command_path", "tula")
    launches = path.rpartition(" ")[2] in LAUNCHING and "--" not in arguments
    remedy = "put -- before your launch command, " if launches else ""
    return f"{' '.join(sentence.split()).rstrip('.')}: {remedy}see {path} --help"


def _fail(sentence: str, code: int) -> int:
    """Print the message and return the exit code; the message is empty after the help was printed."""
    if sentence:
        print("\n".join(map(printable, f"tula: {sentence}".split("\n"))), file=sys.stderr)
    return code


def build(arguments: Sequence[str] = ()) -> typer.Typer:
    """Return the complete command; of other packages' sub-commands, import only the one that `arguments` name."""
    app = typer.Typer(
        name="tula",
        help="How many nodes, and which global batch size?",
        epilog=EPILOG,
        no_args_is_help=True,
        rich_markup_mode="markdown",  # in the default mode [model] and tula[service] are read as styles
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
    on_scaling = typer.Typer(help="Show and set a job's gradient scaling.", no_args_is_help=True)
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
    """Return the sub-commands of installed packages, keyed by name; each resolves to a function or a `typer.Typer`."""
    return {point.name: point for point in entry_points(group=GROUP)}


def _print_version(version: bool) -> None:
    if version:
        print(f"tula {package_version()}")
        raise typer.Exit


def _root(
    context: typer.Context,
    url: Annotated[str, typer.Option("--url", help="The service's address, instead of TULA_URL.", metavar="URL")] = "",
    version: Annotated[  # noqa: ARG001 - its callback ends the command
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    context.obj = settings = access(url)
    # This also affects every command that this one starts, since the agent reads only the environment.
    if settings.origin not in ("TULA_URL", "default"):
        os.environ["TULA_URL"] = settings.url
    if settings.token:
        os.environ["TULA_TOKEN"] = settings.token


def _first_word(arguments: Sequence[str]) -> str | None:
    """Return the name of the sub-command, or None if there is none, so that the help lists all."""
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
    """Stand in for a command of another package, which is imported only when it is called."""


def _broken(name: str, point: EntryPoint, error: Exception) -> Callable[..., int | None]:
    extra = EXTRAS.get(point.value.partition(".")[0])
    remedy = f"run pip install 'tula[{extra}]'" if extra else f"reinstall {point.value.partition(':')[0]}"

    def missing() -> None:
        raise TulaError(f"{name} is not available ({error}): {remedy}")

    missing.__doc__ = f"Not available: {remedy}."
    return missing
