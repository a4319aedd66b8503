"""The exception tree of the client: one class a problem type, all below `TulaError`, each message one sentence."""

from __future__ import annotations

from typing import ClassVar

from tula_wire import Problem, ProblemType

__all__ = [
    "ConflictError",
    "ForbiddenError",
    "InternalServiceError",
    "InvalidInputError",
    "MissingExtraError",
    "NotFoundError",
    "ProblemError",
    "ServiceUnavailableError",
    "ServiceUnreachableError",
    "TooLargeError",
    "TooManyRequestsError",
    "TulaError",
    "UnauthenticatedError",
    "UnexpectedAnswerError",
    "UnsupportedMediaError",
    "from_problem",
]


class TulaError(Exception):
    """Everything that this package raises on purpose."""


class MissingExtraError(TulaError):
    """An optional part of Tula is not installed; the message names the command that installs it."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an extra that is not installed: run pip install 'tula[{extra}]'")
        self.extra = extra


class ServiceUnreachableError(TulaError):
    """No answer came: nothing listens there, the name does not resolve, or the time was up."""


class UnexpectedAnswerError(TulaError):
    """An answer came that no Tula service gives; the address is probably that of something else."""


class ProblemError(TulaError):
    """The service refused, and `problem` holds its reason (RFC 9457)."""

    type: ClassVar[str] = ""

    def __init__(self, problem: Problem) -> None:
        super().__init__(_sentence(problem))
        self.problem = problem

    @property
    def status(self) -> int:
        """HTTP status of the refusal."""
        return self.problem.status

    @property
    def field(self) -> str | None:
        """The first field at fault, in dotted notation, or None."""
        return self.problem.field


class InvalidInputError(ProblemError):
    """A field is missing, unknown or out of range."""

    type = ProblemType.INVALID


class NotFoundError(ProblemError):
    """No such job, run, chart or token, or it belongs to another project."""

    type = ProblemType.NOT_FOUND


class ConflictError(ProblemError):
    """The thing is in a state, or in hands, that rule the request out."""

    type = ProblemType.CONFLICT


class UnauthenticatedError(ProblemError):
    """No token came with the request, or one that is unknown, expired or revoked."""

    type = ProblemType.UNAUTHENTICATED


class ForbiddenError(ProblemError):
    """The token is good, but not for this."""

    type = ProblemType.FORBIDDEN


class TooLargeError(ProblemError):
    """The body is larger than the service accepts."""

    type = ProblemType.TOO_LARGE


class UnsupportedMediaError(ProblemError):
    """The body's type or encoding is not one that the service reads."""

    type = ProblemType.UNSUPPORTED_MEDIA


class TooManyRequestsError(ProblemError):
    """Over the rate limit, even after the retries."""

    type = ProblemType.TOO_MANY_REQUESTS


class ServiceUnavailableError(ProblemError):
    """The service is there but cannot serve now, even after the retries."""

    type = ProblemType.UNAVAILABLE


class InternalServiceError(ProblemError):
    """The service failed; its log has the request id."""

    type = ProblemType.INTERNAL


_BY_TYPE: dict[str, type[ProblemError]] = {
    error.type: error
    for error in (
        InvalidInputError,
        NotFoundError,
        ConflictError,
        UnauthenticatedError,
        ForbiddenError,
        TooLargeError,
        UnsupportedMediaError,
        TooManyRequestsError,
        ServiceUnavailableError,
        InternalServiceError,
    )
}


def from_problem(problem: Problem) -> ProblemError:
    """The exception of a problem's type; a type of a newer service becomes a plain `ProblemError`."""
    return _BY_TYPE.get(problem.type, ProblemError)(problem)


def _sentence(problem: Problem) -> str:
    """The problem in one sentence that names the field, unless its own words already do."""
    detail = " ".join((problem.detail or problem.title).split())
    if problem.field and problem.field not in detail:
        detail = f"{problem.field}: {detail}"
    more = len(problem.errors) - 1
    if more > 0:
        detail = f"{detail} (and {more} more)"
    if problem.type == ProblemType.INTERNAL and problem.request_id:
        detail = f"{detail} (request {problem.request_id})"
    return detail
