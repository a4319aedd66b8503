"""Exit codes of the `tula` command, and the code of each exception."""

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
    """Exit codes; scripts may rely on them."""

    OK = 0
    FAILED = 1
    """The command failed."""
    USAGE = 2
    """An option, a file or a field is wrong; nothing was done."""
    UNREACHABLE = 3
    """The service is unreachable or unavailable."""
    DENIED = 4
    """The token is missing, wrong, or lacks permission."""
    NOT_FOUND = 5
    """No such job, run or chart."""
    INTERRUPTED = 130
    """Ctrl-C."""


class UsageError(TulaError):
    """The command line, or a file named there, is wrong."""


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
    """The exit code of an exception; its class may define `exit_code`."""
    own = getattr(error, "exit_code", None)
    if isinstance(own, int):
        return own
    return next((int(code) for kind, code in _CODES if isinstance(error, kind)), int(ExitCode.FAILED))
