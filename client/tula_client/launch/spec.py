"""Reads a job's specification from a TOML file."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tula_client._errors import UsageError
from tula_client._faults import faults
from tula_wire import JobSpec


def load_spec(path: Path) -> JobSpec:
    """The job that `path` describes; raises `UsageError` with each wrong field and its remedy."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): give the path of a job's TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    try:
        return JobSpec.model_validate(document)
    except ValidationError as error:
        raise UsageError(_explain(path, document, error)) from None


def _explain(path: Path, document: dict[str, Any], error: ValidationError) -> str:
    """Each wrong field with its remedy; several fields take one line each."""
    lines = []
    for place, message in faults(error, JobSpec):
        parts = list(place)
        if parts[:2] == ["cluster", 0] and isinstance(document["cluster"], dict):
            del parts[1]  # a single cluster may be a table, whose path has no index
        where = ".".join(str(part) for part in parts)
        lines.append(f"{where}: {message}" if where else message)
    if len(lines) == 1:
        return f"{path}: {lines[0]}"
    return "\n  ".join([f"{path}: {len(lines)} fields are wrong:", *lines])


def idempotency_key(spec: JobSpec) -> str:
    """A key that is equal for equal specifications, so that registering one again finds its job."""
    return "tune-" + hashlib.sha256(spec.model_dump_json().encode()).hexdigest()
