"""What is wrong with a description, field by field and with a remedy, in the words that the service uses: pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

__all__ = ["faults", "fields_of", "model_in"]


def faults(error: ValidationError, model: type[BaseModel] = BaseModel) -> list[tuple[tuple[str | int, ...], str]]:
    """(place of the field, what is wrong with it and what to do) for everything wrong in a document of `model`.

    Without `model` no field is suggested for one that is not known.
    """
    found = error.errors(include_url=False, include_input=False)
    return [(tuple(one["loc"]), _remedy(one, model)) for one in found]


def fields_of(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """Dotted names of all fields that a document of `model` may hold, tables within tables included."""
    for name, field in model.model_fields.items():
        yield f"{path}{name}"
        inner = model_in(field.annotation)
        if inner is not None:
            yield from fields_of(inner, f"{path}{name}.")


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The model that a field holds, alone, in a list or as one of several; None for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((inner for one in get_args(annotation) if (inner := model_in(one)) is not None), None)


def _remedy(error: Mapping[str, Any], model: type[BaseModel]) -> str:
    kind, context = str(error["type"]), error.get("ctx") or {}
    said = str(error["msg"]).removeprefix("Value error, ")
    sentences = {
        "missing": "is required; add it.",
        "finite_number": "is NaN or infinite; give a finite number.",
        "greater_than_equal": f"must be at least {context.get('ge')}; give a larger value.",
        "greater_than": f"must be above {context.get('gt')}; give a larger value.",
        "less_than_equal": f"must be at most {context.get('le')}; give a smaller value.",
        "less_than": f"must be below {context.get('lt')}; give a smaller value.",
        "literal_error": f"must be one of {context.get('expected')}; choose one.",
        "too_long": f"has more than {context.get('max_length')} entries; leave some out.",
        "too_short": f"has fewer than {context.get('min_length')} entries; give at least that many.",
        "string_too_long": f"is longer than {context.get('max_length')} characters; shorten it.",
        "string_too_short": f"is shorter than {context.get('min_length')} characters; give it a value.",
        "string_pattern_mismatch": "holds characters that are not allowed; use printable ones, as documented.",
        "model_type": "must be a table of fields; give it as one.",
        "dataclass_type": "must be a table of fields; give it as one.",
    }
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"is not known; {_meant(error['loc'], model)}"
    if kind in sentences:
        return sentences[kind]
    if kind == "value_error":
        return f"{said[:1].lower()}{said[1:]}"
    return f"{said[:1].lower()}{said[1:]}; correct it."


def _meant(place: Sequence[str | int], model: type[BaseModel]) -> str:
    """The field of the same table that an unknown one resembles, else the one of that name in another table."""
    here: type[BaseModel] | None = model
    for part in place[:-1]:
        if isinstance(part, str) and here is not None:
            field = here.model_fields.get(part)
            here = None if field is None else model_in(field.annotation)
    name = str(place[-1])
    near = difflib.get_close_matches(name.lower(), [] if here is None else here.model_fields, n=1)
    near = near or [path for path in fields_of(model) if path.rpartition(".")[2] == name]
    return f"did you mean {' or '.join(near)}?" if near else "check its spelling or leave it out."
