"""Exit codes of the `tula` command, and which failure has which."""

from __future__ import annotations

from enum import IntEnum

from tula_client._errors import (
    ForbiddenError,
    InvalidInputError,
    MissingExtraError,
    NotFoundError,
    ServiceUnavailableError,
    ServiceUnreachableError,
    TooLargeError,
    TooManyRequestsError,
    TulaError,
    UnauthenticatedError,
)
from tula_client.handle import JobNotFoundError


class ExitCode(IntEnum):
    """What a script may rely on."""

    OK = 0
    FAILED = 1
    """It was tried and did not work."""
    USAGE = 2
    """A flag, a file or a field is wrong; nothing was tried."""
    UNREACHABLE = 3
    """No service answered, or it cannot serve now."""
    DENIED = 4
    """The token is missing, wrong, or not for this."""
    NOT_FOUND = 5
    """No such job, run or chart."""
    INTERRUPTED = 130
    """Ctrl-C."""


class UsageError(TulaError):
    """What a person gave on the command line, or in a file named there, is wrong."""


_CODES: tuple[tuple[type[TulaError], ExitCode], ...] = (
    (UsageError, ExitCode.USAGE),
    (InvalidInputError, ExitCode.USAGE),
    (TooLargeError, ExitCode.USAGE),
    (ServiceUnreachableError, ExitCode.UNREACHABLE),
    (ServiceUnavailableError, ExitCode.UNREACHABLE),
    (TooManyRequestsError, ExitCode.UNREACHABLE),
    (UnauthenticatedError, ExitCode.DENIED),
    (ForbiddenError, ExitCode.DENIED),
    (NotFoundError, ExitCode.NOT_FOUND),
    (JobNotFoundError, ExitCode.NOT_FOUND),
    (MissingExtraError, ExitCode.FAILED),
)


def exit_code(error: TulaError) -> int:
    """The exit code of a failure; a class may bring its own as `exit_code`."""
    own = getattr(error, "exit_code", None)
    if isinstance(own, int):
        return own
    return next((int(code) for kind, code in _CODES if isinstance(error, kind)), int(ExitCode.FAILED))
