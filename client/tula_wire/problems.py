"""Errors as RFC 9457 problem documents, each type with one stable name."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from tula_wire._base import WireModel

MEDIA_TYPE: Final = "application/problem+json"


class ProblemType:
    """Values of `type`, which are stable: clients branch on them, not on messages."""

    INVALID: Final = "urn:tula:problem:invalid-input"
    NOT_FOUND: Final = "urn:tula:problem:not-found"
    CONFLICT: Final = "urn:tula:problem:conflict"
    UNAUTHENTICATED: Final = "urn:tula:problem:unauthenticated"
    FORBIDDEN: Final = "urn:tula:problem:forbidden"
    TOO_LARGE: Final = "urn:tula:problem:too-large"
    UNSUPPORTED_MEDIA: Final = "urn:tula:problem:unsupported-media-type"
    TOO_MANY_REQUESTS: Final = "urn:tula:problem:too-many-requests"
    UNAVAILABLE: Final = "urn:tula:problem:unavailable"
    INTERNAL: Final = "urn:tula:problem:internal"


class FieldError(WireModel):
    """An invalid field, in dotted notation, with the remedy."""

    field: str = Field(description="The invalid field, in dotted notation.")
    message: str = Field(description="What is wrong with it and how to fix it.")


class Problem(WireModel):
    """The body of every error; `detail` contains the remedy."""

    type: str = Field(description="Stable name of the kind of error (URN): branch on this.")
    title: str = Field(description="The kind of error, for people.")
    status: int = Field(description="HTTP status code.")
    detail: str = Field(description="What was wrong and how to fix it.")
    field: str | None = Field(None, description="The first invalid field.")
    errors: list[FieldError] = Field([], description="Every invalid field, at most 20.")
    request_id: str | None = Field(None, description="Identifier of the request, as in the service's log.")
