"""Reads a job's specification from a TOML file or a mapping, and says which fields of it are wrong."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from tula_client._errors import UsageError
from tula_wire import JobSpec
from tula_wire.problems import UNKNOWN_FIELD, remedy


def read_spec(spec: Path | Mapping[str, Any] | JobSpec) -> JobSpec:
    """The specification in a TOML file, a mapping or a model; raises `UsageError` with each wrong field."""
    if isinstance(spec, JobSpec):
        return spec
    return load_spec(spec) if isinstance(spec, Path) else check_spec(spec)


def load_spec(path: Path) -> JobSpec:
    """The job that `path` describes; raises `UsageError` with each wrong field and its remedy."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): give the path of a job's TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    return check_spec(document, str(path))


def check_spec(document: Mapping[str, Any], name: str = "spec") -> JobSpec:
    """The job that `document` describes; raises `UsageError` with `name`, each wrong field and its remedy."""
    try:
        return JobSpec.model_validate(document)
    except ValidationError as error:
        raise UsageError(_explain(name, document, error)) from None


def _explain(name: str, document: Mapping[str, Any], error: ValidationError) -> str:
    """Each wrong field with its remedy; several fields take one line each."""
    lines = []
    for place, message in faults(error, JobSpec):
        parts = list(place)
        if parts[:2] == ["cluster", 0] and isinstance(document["cluster"], dict):
            del parts[1]  # a single cluster may be a table, whose path has no index
        where = ".".join(str(part) for part in parts)
        lines.append(f"{where}: {message}" if where else message)
    if len(lines) == 1:
        return f"{name}: {lines[0]}"
    return "\n  ".join([f"{name}: {len(lines)} fields are wrong:", *lines])


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
