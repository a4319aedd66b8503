"""Defines error responses as RFC 9457 problem documents with stable type names, and remedies for invalid input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import Field

from tula_wire._base import WireModel, optional

MEDIA_TYPE: Final = "application/problem+json"


class ProblemType:
    """The values of `type`, which are stable so that clients can branch on them instead of on messages."""

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
    """An invalid field and the remedy."""

    field: str = Field(description="Path of the invalid field in dotted notation.")
    message: str = Field(description="What is wrong with the field and how to fix it.")


class Problem(WireModel):
    """The body of every error response; `detail` contains the remedy."""

    type: str = Field(description="Stable name of the kind of error (a URN), on which clients may branch.")
    title: str = Field(description="Human-readable name of the kind of error.")
    status: int = Field(description="HTTP status code.")
    detail: str = Field(description="What was wrong and how to fix it.")
    field: str | None = optional("The first invalid field.")
    errors: list[FieldError] = Field([], description="The invalid fields, at most 20.")
    request_id: str | None = optional("Identifier of the request, as in the service's log.")


_UNKNOWN: Final = "is not a known field; check its spelling or remove it."
_NO_TABLE: Final = "must be a table of fields."

_REMEDIES: Final = {
    "missing": "is required; add it.",
    "extra_forbidden": _UNKNOWN,
    "unexpected_keyword_argument": _UNKNOWN,  # raised for dataclasses
    "model_type": _NO_TABLE,
    "dataclass_type": _NO_TABLE,
    "int_parsing": "must be a whole number.",
    "float_parsing": "must be a number.",
    "float_type": "must be a number without quotes.",
    "bool_parsing": "must be 1 or 0.",
    "finite_number": "is NaN or infinite; give a finite number, or null if nothing was measured.",
    "greater_than_equal": "must be at least {ge}; give a larger value.",
    "greater_than": "must be above {gt}; give a larger value.",
    "less_than_equal": "must be at most {le}; give a smaller value.",
    "less_than": "must be below {lt}; give a smaller value.",
    "literal_error": "must be one of {expected}.",
    "json_invalid": "is not valid JSON; check commas, quotes and brackets.",
    "too_long": "has more than {max_length} entries; give fewer at a time.",
    "too_short": "has fewer than {min_length} entries; give at least that many.",
    "string_too_long": "is longer than {max_length} characters; shorten it.",
    "string_too_short": "is shorter than {min_length} characters; give a longer value.",
    "string_pattern_mismatch": "contains characters that are not allowed; use only the documented ones.",
    "timezone_aware": "has no time zone; add one, such as Z.",
}


def remedy(error: Mapping[str, Any]) -> str:
    """Return the fault and the remedy for an entry of `ValidationError.errors()`, as text to follow `field: `."""
    kind = str(error.get("type", ""))
    if kind in _REMEDIES:
        return _REMEDIES[kind].format_map(error.get("ctx") or {})
    message = str(error.get("msg", "is not valid")).removeprefix("Value error, ")
    message = f"{message[:1].lower()}{message[1:]}"
    return message if kind == "value_error" else f"{message}; correct it."
