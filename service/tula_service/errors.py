"""Exceptions of the service; only `api/errors.py` turns them into HTTP."""

from __future__ import annotations


class ServiceError(Exception):
    """Base class of every error with a message for a person: one sentence on what was wrong, where, and what to do."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class InvalidInput(ServiceError):
    """A value is well-formed but cannot be accepted; `field` names its field in dotted notation."""


class NotFound(ServiceError):
    """The object does not exist, or the caller may not know that it exists."""

    @classmethod
    def of(cls, kind: str, identity: str) -> NotFound:
        """Return the usual sentence for a missing `kind` ("job", "run", ...)."""
        return cls(f"There is no {kind} {identity!r}: check the id, and that your token belongs to its project.")


class Conflict(ServiceError):
    """The request is valid but conflicts with the object's state: another holder has it, or its state is final."""


class Unauthenticated(ServiceError):
    """The token is missing, unknown, expired or revoked."""


class Forbidden(ServiceError):
    """The token is valid, but its scope does not allow the request."""


class TooLarge(ServiceError):
    """The body is larger than the limit, before or after decompression."""


class UnsupportedMedia(ServiceError):
    """The service does not read this content type or content encoding."""


class Busy(ServiceError):
    """There are too many requests; `retry_after_s` says when to retry.

    `limited` is True for a quota, False for overload.
    """

    def __init__(self, message: str, *, retry_after_s: float, limited: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.limited = limited


class StoreUnavailable(ServiceError):
    """The database cannot be reached or is locked for too long; nothing was stored."""

    retry_after_s = 1.0


class SchemaMismatch(ServiceError):
    """The database's schema is older or newer than this code; the message contains the command to run."""
