"""Reads a job's specification from a TOML file or a mapping, and reports which of its fields are wrong."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from tula_client._errors import UsageError
from tula_wire import JobSpec
from tula_wire.problems import remedy


def load_spec(spec: Path | Mapping[str, Any] | JobSpec) -> JobSpec:
    """Return the job specification that a TOML file, a mapping or a `JobSpec` contains.

    Raises a `UsageError` that names each wrong field and its remedy. If several fields are wrong, the message has one
    line for each field.
    """
    if isinstance(spec, JobSpec):
        return spec
    document, name = (
        (read_toml(spec, "give the path of a job's TOML file"), spec) if isinstance(spec, Path) else (spec, "spec")
    )
    try:
        return JobSpec.model_validate(document)
    except ValidationError as error:
        wrong = faults(error)
    if isinstance(document.get("cluster"), dict):  # a single cluster may be a table, whose path has no index
        wrong = [re.sub(r"^cluster\.0\b", "cluster", message) for message in wrong]
    if len(wrong) == 1:
        raise UsageError(f"{name}: {wrong[0]}")
    raise UsageError("\n  ".join([f"{name}: {len(wrong)} fields are wrong:", *wrong]))


def read_toml(path: Path, if_unreadable: str) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises `UsageError` if the file cannot be used; if it cannot be read, the message ends with `if_unreadable`.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): {if_unreadable}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text: save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None


def faults(error: ValidationError) -> list[str]:
    """Return one line for each validation error: the field in dotted notation, the error and the remedy."""
    sentences = []
    for fault in error.errors(include_url=False, include_input=False):
        place = ".".join(map(str, fault["loc"]))
        sentences.append(f"{place}: {remedy(fault)}" if place else remedy(fault))
    return sentences


def model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the Pydantic model in a field's type annotation, searching lists and unions, or None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((inner for argument in get_args(annotation) if (inner := model_in(argument)) is not None), None)
