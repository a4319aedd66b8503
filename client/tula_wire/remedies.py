"""What is wrong with invalid input and how to correct it: the one table, for client and service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

UNKNOWN_FIELD: Final = frozenset({"extra_forbidden", "unexpected_keyword_argument"})
"""Types of Pydantic errors for a field that the model does not have: of a model and of a dataclass."""

_UNKNOWN: Final = "is not known; check its spelling or leave it out."
_NO_TABLE: Final = "must be a table of fields; give it as one."

_REMEDIES: Final = {
    "missing": "is required; add it.",
    **dict.fromkeys(UNKNOWN_FIELD, _UNKNOWN),
    "model_type": _NO_TABLE,
    "dataclass_type": _NO_TABLE,
    "int_parsing": "must be a whole number; give one.",
    "float_parsing": "must be a number; give one.",
    "bool_parsing": "must be 1 or 0; give one of them.",
    "finite_number": "is NaN or infinite; give a finite number, or null where nothing was measured.",
    "greater_than_equal": "must be at least {ge}; give a larger value.",
    "greater_than": "must be above {gt}; give a larger value.",
    "less_than_equal": "must be at most {le}; give a smaller value.",
    "less_than": "must be below {lt}; give a smaller value.",
    "literal_error": "must be one of {expected}; choose one.",
    "json_invalid": "is not valid JSON; check commas, quotes and brackets.",
    "too_long": "has more than {max_length} entries; give fewer at once.",
    "too_short": "has fewer than {min_length} entries; give at least that many.",
    "string_too_long": "is longer than {max_length} characters; shorten it.",
    "string_too_short": "is shorter than {min_length} characters; give it a value.",
    "string_pattern_mismatch": "holds characters that are not allowed; use printable ones, as documented.",
    "timezone_aware": "has no time zone; add one, such as Z.",
}


def remedy(error: Mapping[str, Any]) -> str:
    """One sentence on an entry of `pydantic.ValidationError.errors()`; it goes after the field's name and a colon."""
    kind = str(error.get("type", ""))
    if kind in _REMEDIES:
        return _REMEDIES[kind].format_map(error.get("ctx") or {})
    message = str(error.get("msg", "is not valid")).removeprefix("Value error, ")
    message = f"{message[:1].lower()}{message[1:]}"
    return message if kind == "value_error" else f"{message}; correct it."
