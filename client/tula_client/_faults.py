"""Which fields of a document are wrong, each with a remedy. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from tula_wire.remedies import UNKNOWN_FIELD, remedy


def faults(error: ValidationError, model: type[BaseModel] = BaseModel) -> list[tuple[tuple[str | int, ...], str]]:
    """(location of the field, what is wrong and what to do) for each error in a document of `model`.

    With `model`, a similar field is suggested for one that is not known.
    """
    found = error.errors(include_url=False, include_input=False)
    return [(tuple(one["loc"]), _remedy(one, model)) for one in found]


def fields_of(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """Dotted names of all fields of `model`, including those of nested models."""
    for name, field in model.model_fields.items():
        yield f"{path}{name}"
        inner = model_in(field.annotation)
        if inner is not None:
            yield from fields_of(inner, f"{path}{name}.")


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The model in the type of a field, possibly in a list or a union; None for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((inner for one in get_args(annotation) if (inner := model_in(one)) is not None), None)


def _remedy(error: Mapping[str, Any], model: type[BaseModel]) -> str:
    if error["type"] in UNKNOWN_FIELD and (near := _similar(error["loc"], model)):
        return f"is not known; did you mean {' or '.join(near)}?"
    return remedy(error)


def _similar(place: Sequence[str | int], model: type[BaseModel]) -> list[str]:
    """The field of the same table that an unknown one resembles, else those of that name in other tables."""
    table: type[BaseModel] | None = model
    for part in place[:-1]:
        if isinstance(part, str) and table is not None:
            field = table.model_fields.get(part)
            table = None if field is None else model_in(field.annotation)
    name = str(place[-1])
    near = difflib.get_close_matches(name.lower(), [] if table is None else table.model_fields, n=1)
    return near or [path for path in fields_of(model) if path.rpartition(".")[2] == name]
