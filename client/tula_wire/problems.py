"""Errors as RFC 9457 problem documents, each type with one stable name."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from tula_wire._base import WireModel

MEDIA_TYPE: Final = "application/problem+json"


class ProblemType:
    """Stable `type` members; clients branch on these and never on a sentence."""

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
    """One field at fault, in dotted notation, with what is wrong."""

    field: str
    message: str


class Problem(WireModel):
    """The body of every error; `detail` says what to do."""

    type: str
    title: str
    status: int
    detail: str
    field: str | None = Field(None, description="The first field at fault.")
    errors: list[FieldError] = []
    request_id: str | None = None
