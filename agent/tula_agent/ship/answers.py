"""What an answer of the service may say: exact types and ranges, checked before a training thread sees it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, get_args

from tula_wire.bounds import THRESHOLDS, WHOLE_THRESHOLDS, ScalingPolicy

_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "policy": get_args(ScalingPolicy),
    "granularity": ("tensor", "element"),
}
_ETAG = re.compile(r'(?:W/)?"[\x21\x23-\x7e]{0,200}"')


def thresholds_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The thresholds of gradient scaling in an answer, without those that are null or absent.

    Raises ValueError naming the first field of a wrong type or out of its range. Fields of a newer service are ignored.
    """
    found: dict[str, Any] = {}
    for name, (least, most) in THRESHOLDS.items():
        value = body.get(name)
        if value is None:
            continue
        kinds = (int,) if name in WHOLE_THRESHOLDS else (int, float)
        if type(value) not in kinds or not least <= value <= most:
            raise ValueError(f"{name} must be a number from {least:g} to {most:g}, not {value!r:.40}")
        found[name] = value if name in WHOLE_THRESHOLDS else float(value)
    for name, known in _WORDS.items():
        value = body.get(name)
        if value is not None and value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r:.40}")
        if value is not None:
            found[name] = "tensor" if value == "channel" else value
    return found


def etag_of(header: str | None) -> str | None:
    """An entity tag that can be sent back (RFC 9110, section 8.8.3), None for anything else."""
    return header if header is not None and _ETAG.fullmatch(header) else None
