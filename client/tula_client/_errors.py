"""Defines the exceptions of the client, with one class for each type of problem document (RFC 9457).

The message of each exception is one sentence. If an exception ends a `tula` command, the command exits with the code in
the exception's `exit_code`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar

from tula_wire import Problem, ProblemType


class ExitCode(IntEnum):
    """Exit codes of `tula`, on which scripts may rely."""

    OK = 0
    FAILED = 1
    """The command failed."""
    USAGE = 2
    """An option, a file or a field is wrong; the command did nothing."""
    SLOWER = 3
    """`tula gate` found that the change slows training by more than the threshold."""
    DENIED = 4
    """The token is missing, is wrong, or lacks the permission."""
    NOT_FOUND = 5
    """The job, run or chart does not exist."""
    UNREACHABLE = 6
    """The service is unreachable or unavailable."""
    INTERRUPTED = 130
    """The user pressed Ctrl-C."""


class TulaError(Exception):
    """Base class of all exceptions that this package raises."""

    exit_code: ClassVar[ExitCode] = ExitCode.FAILED


class JobNotFoundError(TulaError):
    """No job has the given id or name."""

    exit_code = ExitCode.NOT_FOUND


class UsageError(TulaError):
    """The command line, a file that it names, or a command template is wrong."""

    exit_code = ExitCode.USAGE


class LaunchError(TulaError):
    """An error that stops `tula tune` or `tula run`; its message names a remedy.

    `brief` is a shorter message, for a terminal on which the details were already printed.
    """

    def __init__(self, message: str, brief: str = "") -> None:
        super().__init__(message)
        self.brief = brief or message


class MissingExtraError(TulaError):
    """An optional part of Tula is not installed; the message names the command that installs it."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} requires an extra that is not installed: run pip install 'tula[{extra}]'")
        self.extra = extra


class ServiceUnreachableError(TulaError):
    """No response arrived: no server listens at the address, the name does not resolve, or the request timed out."""

    exit_code = ExitCode.UNREACHABLE


class UnexpectedAnswerError(TulaError):
    """The response cannot come from a Tula service; the address probably belongs to another server."""


class ForeignAnswerError(UnexpectedAnswerError):
    """The error comes from another server: a proxy in front of the service, or an unrelated server at the address."""


class ProblemError(TulaError):
    """The service rejected the request; `problem` is its problem document (RFC 9457)."""

    type: ClassVar[str] = ""

    def __init_subclass__(cls, *, type: str | None = None, exit_code: ExitCode | None = None) -> None:
        cls.type = cls.type if type is None else type
        cls.exit_code = cls.exit_code if exit_code is None else exit_code
        if type is not None:
            _BY_TYPE.setdefault(type, cls)  # a user's subclass must not replace this package's class

    def __init__(self, problem: Problem) -> None:
        super().__init__(_sentence(problem))
        self.problem = problem

    @property
    def status(self) -> int:
        """Return the HTTP status of the response."""
        return self.problem.status

    @property
    def field(self) -> str | None:
        """Return the path of the first invalid field in dotted notation, or None if no field is invalid."""
        return self.problem.field


_BY_TYPE: dict[str, type[ProblemError]] = {}


class InvalidInputError(ProblemError, type=ProblemType.INVALID, exit_code=ExitCode.USAGE):
    """422: a field is missing, unknown or out of range."""


class NotFoundError(ProblemError, type=ProblemType.NOT_FOUND, exit_code=ExitCode.NOT_FOUND):
    """404: the job, run, chart or token does not exist, or belongs to another project."""


class ConflictError(ProblemError, type=ProblemType.CONFLICT):
    """409: the request conflicts with the state of the resource or with the holder of its lease."""


class UnauthenticatedError(ProblemError, type=ProblemType.UNAUTHENTICATED, exit_code=ExitCode.DENIED):
    """401: the request has no token, or a token that is unknown, expired or revoked."""


class ForbiddenError(ProblemError, type=ProblemType.FORBIDDEN, exit_code=ExitCode.DENIED):
    """403: the token is valid but does not permit the request."""


class TooLargeError(ProblemError, type=ProblemType.TOO_LARGE, exit_code=ExitCode.USAGE):
    """413: the body is larger than the service accepts."""


class UnsupportedMediaError(ProblemError, type=ProblemType.UNSUPPORTED_MEDIA):
    """415: the service does not support the type or encoding of the body."""


class TooManyRequestsError(ProblemError, type=ProblemType.TOO_MANY_REQUESTS, exit_code=ExitCode.UNREACHABLE):
    """429: the rate limit was still exceeded after all retries."""


class ServiceUnavailableError(ProblemError, type=ProblemType.UNAVAILABLE, exit_code=ExitCode.UNREACHABLE):
    """503: the service was still unavailable after all retries."""


class InternalServiceError(ProblemError, type=ProblemType.INTERNAL):
    """500: the service failed internally; its log contains the request id."""


def from_problem(problem: Problem) -> ProblemError:
    """Return the exception for a problem's type; an unknown type from a newer service becomes a `ProblemError`."""
    return _BY_TYPE.get(problem.type, ProblemError)(problem)


def _sentence(problem: Problem) -> str:
    """Return the problem as one sentence that names the invalid field, if there is one."""
    detail = " ".join((problem.detail or problem.title).split())
    if problem.field and problem.field not in detail:
        detail = f"{problem.field}: {detail}"
    more = len(problem.errors) - 1
    if more > 0:
        detail = f"{detail} (and {more} more)"
    if problem.type == ProblemType.INTERNAL and problem.request_id:
        detail = f"{detail} (request {problem.request_id})"
    return detail
