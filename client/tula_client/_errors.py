"""Exceptions of the client. Each message is one sentence; each type of problem document (RFC 9457) has a class.

An exception that ends a `tula` command has the exit code of the command in `exit_code`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar

from tula_wire import Problem, ProblemType


class ExitCode(IntEnum):
    """Exit codes of `tula`; scripts may rely on them."""

    OK = 0
    FAILED = 1
    """The command failed."""
    USAGE = 2
    """An option, a file or a field is wrong; nothing was done."""
    SLOWER = 3
    """`tula gate`: the change makes the training slower than it may."""
    DENIED = 4
    """The token is missing, wrong, or lacks permission."""
    NOT_FOUND = 5
    """No such job, run or chart."""
    UNREACHABLE = 6
    """The service is unreachable or unavailable."""
    INTERRUPTED = 130
    """Ctrl-C."""


class TulaError(Exception):
    """Base class of all exceptions of this package."""

    exit_code: ClassVar[ExitCode] = ExitCode.FAILED


class JobNotFoundError(TulaError):
    """No job has that id or name."""

    exit_code = ExitCode.NOT_FOUND


class UsageError(TulaError):
    """The command line, a file that it names, or the template of a command is wrong."""

    exit_code = ExitCode.USAGE


class LaunchError(TulaError):
    """An error that stops `tula tune` or `tula run`, with a remedy; `brief` if the failure was printed already."""

    def __init__(self, message: str, brief: str = "") -> None:
        super().__init__(message)
        self.brief = brief or message


class MissingExtraError(TulaError):
    """An optional part of Tula is not installed; the message names the command that installs it."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an extra that is not installed: run pip install 'tula[{extra}]'")
        self.extra = extra


class ServiceUnreachableError(TulaError):
    """No answer: nothing listens at the address, the name does not resolve, or the request timed out."""

    exit_code = ExitCode.UNREACHABLE


class UnexpectedAnswerError(TulaError):
    """An answer that no Tula service gives; the address probably belongs to another server."""


class ForeignAnswerError(UnexpectedAnswerError):
    """An error from another server: a proxy while the service is away, or a different server at the address."""


class ProblemError(TulaError):
    """The service rejected the request; `problem` is its problem document (RFC 9457)."""

    type: ClassVar[str] = ""

    def __init_subclass__(cls, *, type: str | None = None, exit_code: ExitCode | None = None) -> None:
        cls.type = cls.type if type is None else type
        cls.exit_code = cls.exit_code if exit_code is None else exit_code
        if type is not None:
            _BY_TYPE.setdefault(type, cls)  # a user's subclass does not replace ours

    def __init__(self, problem: Problem) -> None:
        super().__init__(_sentence(problem))
        self.problem = problem

    @property
    def status(self) -> int:
        """Return the HTTP status of the answer."""
        return self.problem.status

    @property
    def field(self) -> str | None:
        """Return the first invalid field in dotted notation, or None."""
        return self.problem.field


_BY_TYPE: dict[str, type[ProblemError]] = {}


class InvalidInputError(ProblemError, type=ProblemType.INVALID, exit_code=ExitCode.USAGE):
    """422: a field is missing, unknown or out of range."""


class NotFoundError(ProblemError, type=ProblemType.NOT_FOUND, exit_code=ExitCode.NOT_FOUND):
    """404: no such job, run, chart or token, or it belongs to another project."""


class ConflictError(ProblemError, type=ProblemType.CONFLICT):
    """409: the state or the holder of the resource does not allow the request."""


class UnauthenticatedError(ProblemError, type=ProblemType.UNAUTHENTICATED, exit_code=ExitCode.DENIED):
    """401: the request has no token, or a token that is unknown, expired or revoked."""


class ForbiddenError(ProblemError, type=ProblemType.FORBIDDEN, exit_code=ExitCode.DENIED):
    """403: the token is valid but does not permit the request."""


class TooLargeError(ProblemError, type=ProblemType.TOO_LARGE, exit_code=ExitCode.USAGE):
    """413: the body is larger than the service accepts."""


class UnsupportedMediaError(ProblemError, type=ProblemType.UNSUPPORTED_MEDIA):
    """415: the service does not support the type or encoding of the body."""


class TooManyRequestsError(ProblemError, type=ProblemType.TOO_MANY_REQUESTS, exit_code=ExitCode.UNREACHABLE):
    """429: the rate limit was exceeded, even after the retries."""


class ServiceUnavailableError(ProblemError, type=ProblemType.UNAVAILABLE, exit_code=ExitCode.UNREACHABLE):
    """503: the service is currently unavailable, even after the retries."""


class InternalServiceError(ProblemError, type=ProblemType.INTERNAL):
    """500: the service failed; its log contains the request id."""


def from_problem(problem: Problem) -> ProblemError:
    """Return the exception for a problem's type; an unknown type from a newer service becomes a `ProblemError`."""
    return _BY_TYPE.get(problem.type, ProblemError)(problem)


def _sentence(problem: Problem) -> str:
    """Return the problem as one sentence that names the field."""
    detail = " ".join((problem.detail or problem.title).split())
    if problem.field and problem.field not in detail:
        detail = f"{problem.field}: {detail}"
    more = len(problem.errors) - 1
    if more > 0:
        detail = f"{detail} (and {more} more)"
    if problem.type == ProblemType.INTERNAL and problem.request_id:
        detail = f"{detail} (request {problem.request_id})"
    return detail
