"""Reading a job's specification from a TOML file."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from pydantic import ValidationError

from tula_client.launch._errors import SpecError
from tula_wire import JobSpec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["idempotency_key", "load_spec"]


def load_spec(path: Path) -> JobSpec:
    """The job that `path` describes; raises `SpecError` naming the field that is wrong."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path} cannot be read ({error.strerror}): give the path of a job's TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} is not valid TOML: {error}") from None
    try:
        return JobSpec.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        loc = list(first["loc"])
        if loc[:2] == ["cluster", 0] and isinstance(document["cluster"], dict):
            del loc[1]  # one cluster may be written as a table; it has no number there
        where = ".".join(str(part) for part in loc) or "the document"
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        said = first["msg"].removeprefix("Value error, ")
        raise SpecError(f"{path}: {where}: {said[:1].lower()}{said[1:]}{more}") from None


def idempotency_key(spec: JobSpec) -> str:
    """The same for the same specification, so that registering it again finds the job and its plan."""
    return "tune-" + hashlib.sha256(spec.model_dump_json().encode()).hexdigest()
