"""Defines the service's exceptions; only `api/errors.py` translates them into HTTP responses."""

from __future__ import annotations


class ServiceError(Exception):
    """The base class of errors with a message for the user, which states the fault and the remedy in one sentence."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class InvalidInput(ServiceError):
    """A value is well-formed but not acceptable; `field` is the dotted path of the value."""


class NotFound(ServiceError):
    """The object does not exist, or the caller is not allowed to know that it exists."""

    @classmethod
    def of(cls, kind: str, identity: str) -> NotFound:
        """Return the error for a missing object of this `kind` ("job", "run", ...)."""
        return cls(f"There is no {kind} {identity!r}: check its id, and check that your token belongs to its project.")


class Conflict(ServiceError):
    """The request is valid but conflicts with the object's state, for example because the state is final."""


class Unauthenticated(ServiceError):
    """The token is missing, unknown, expired or revoked."""


class Forbidden(ServiceError):
    """The token is valid, but its scope does not allow the request."""


class TooLarge(ServiceError):
    """The request body is larger than the limit, before or after decompression."""


class UnsupportedMedia(ServiceError):
    """The service does not support the request's content type or content encoding."""


class Busy(ServiceError):
    """The service refuses a request that may be retried after `retry_after_s` seconds.

    `limited` is True if the sender exceeded a quota, and False if the service is overloaded.
    """

    def __init__(self, message: str, *, retry_after_s: float, limited: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.limited = limited


class StoreUnavailable(ServiceError):
    """The database cannot be reached or was locked for too long; nothing was stored."""

    retry_after_s = 1.0


class SchemaMismatch(ServiceError):
    """The database's schema is older or newer than this code; the message contains the command to run."""
