"""Reads a job's specification from a TOML file or a mapping."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tula_client._errors import UsageError
from tula_client._faults import faults
from tula_wire import JobSpec


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
