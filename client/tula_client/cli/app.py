"""Entry point of `tula`: runs the command; every failure becomes one sentence and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

LAUNCHING: Final = frozenset({"tune", "run"})
"""Commands that launch others and continue where they stopped."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """Run the command line and return its exit code; failures are printed to standard error."""
    from pydantic import ValidationError

    from tula_client._errors import ExitCode, TulaError
    from tula_client.cli.commands import build
    from tula_client.launch.spec import faults

    try:
        result = build(arguments)(args=arguments, prog_name="tula", standalone_mode=False)
    except TulaError as error:
        return _fail(str(error), error.exit_code)
    except ValidationError as error:
        place, remedy = faults(error)[0]
        return _fail(f"{'.'.join(map(str, place)) or error.title}: {remedy}", ExitCode.USAGE)
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
    if result == ExitCode.INTERRUPTED and LAUNCHING & set(arguments):  # as typer reports Ctrl-C
        return _fail("stopped; repeat the command to continue", ExitCode.INTERRUPTED)
    return result if isinstance(result, int) else ExitCode.OK


def _usage(error: Exception, arguments: list[str]) -> str:
    """The message for a command line that the parser rejects, with the command that prints help."""
    sentence = str(error.format_message()).strip()  # type: ignore[attr-defined]
    if not sentence:
        return ""
    path = getattr(getattr(error, "ctx", None), "command_path", "tula")
    launches = path.rpartition(" ")[2] in LAUNCHING and "--" not in arguments
    remedy = "put -- before your launch command, " if launches else ""
    return f"{' '.join(sentence.split()).rstrip('.')}: {remedy}see {path} --help"


def _fail(sentence: str, code: int) -> int:
    """Print the message, if any, and return the exit code; after help was printed, there is none."""
    from tula_wire.text import printable

    if sentence:
        print(f"tula: {printable(sentence)}", file=sys.stderr)
    return code
