"""What can go wrong inside the service, in its own words; `api/errors.py` alone turns these into HTTP."""

from __future__ import annotations


class ServiceError(Exception):
    """Base class of every error meant for a person: one sentence that says what was wrong, where, and what to do."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class InvalidInput(ServiceError):
    """A value that was understood but cannot be accepted; `field` names its field in dotted notation."""


class NotFound(ServiceError):
    """Something that does not exist, or that the caller may not know to exist."""

    @classmethod
    def of(cls, kind: str, identity: str) -> NotFound:
        """Return the usual sentence for a missing `kind` ("job", "run", ...)."""
        return cls(f"There is no {kind} {identity!r}: check the id, and that your token belongs to its project.")


class Conflict(ServiceError):
    """The request was valid, but its object has moved on: somebody else holds it, or it is already final."""


class Unauthenticated(ServiceError):
    """No token, or a token that is unknown, expired or revoked."""


class Forbidden(ServiceError):
    """A valid token whose scope does not cover the request."""


class TooLarge(ServiceError):
    """A body beyond the limit, before or after decompression."""


class UnsupportedMedia(ServiceError):
    """A content type or content encoding that the service does not read."""


class Busy(ServiceError):
    """Too many requests; `retry_after_s` says when to retry. `limited` tells a quota from overload."""

    def __init__(self, message: str, *, retry_after_s: float, limited: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.limited = limited


class StoreUnavailable(ServiceError):
    """The database cannot be reached or is locked for too long; nothing was stored."""

    retry_after_s = 1.0


class SchemaMismatch(ServiceError):
    """The database's schema is older or newer than this code; the message holds the command to run."""
