"""Reading a job's specification from a TOML file."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tula_client._faults import faults
from tula_client.launch._errors import SpecError
from tula_wire import JobSpec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["idempotency_key", "load_spec"]


def load_spec(path: Path) -> JobSpec:
    """The job that `path` describes; raises `SpecError` naming every field that is wrong, and its remedy."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path} cannot be read ({error.strerror}): give the path of a job's TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} is not valid TOML: {error}") from None
    try:
        return JobSpec.model_validate(document)
    except ValidationError as error:
        raise SpecError(_wrong(path, document, error)) from None


def _wrong(path: Path, document: dict[str, Any], error: ValidationError) -> str:
    """Every field that is wrong, with its remedy; each on a line of its own where there are several."""
    told = []
    for place, said in faults(error, JobSpec):
        parts = list(place)
        if parts[:2] == ["cluster", 0] and isinstance(document["cluster"], dict):
            del parts[1]  # one cluster may be written as a table; it has no number there
        where = ".".join(str(part) for part in parts)
        told.append(f"{where}: {said}" if where else said)
    if len(told) == 1:
        return f"{path}: {told[0]}"
    return "\n  ".join([f"{path}: {len(told)} fields are wrong:", *told])


def idempotency_key(spec: JobSpec) -> str:
    """The same for the same specification, so that registering it again finds the job and its plan."""
    return "tune-" + hashlib.sha256(spec.model_dump_json().encode()).hexdigest()
