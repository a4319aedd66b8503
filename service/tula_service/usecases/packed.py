"""The packed form of a telemetry chunk: MessagePack whose columns are little-endian arrays, checked as arrays.

The same members as `tula_wire.TelemetryChunk`, with `steps` as int64 bytes (or a list) and each column as float64 or
float32 bytes (or a list, where a value is missing). See docs/wire.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import numpy as np
from pydantic import Field

from tula_service.errors import InvalidInput
from tula_service.store import NewChunk
from tula_service.store.records import FloatArray, IntArray
from tula_service.usecases.ingest import chunk_from_wire
from tula_wire import MAX_STEPS, TelemetryChunk
from tula_wire._base import WireModel
from tula_wire.samples import Column, Number
from tula_wire.telemetry import ChunkIdentity, ColumnName

_MAX_STEP: Final = 2**53


class _PackedChunk(ChunkIdentity):
    """A chunk whose arrays are not checked yet: bytes or lists."""

    steps: Any
    columns: Annotated[dict[ColumnName, Any], Field(min_length=1, max_length=64)]


class _Lists(WireModel):
    """The members of a packed chunk that are lists."""

    steps: Column[Number] = []
    columns: dict[str, Column[float | None]] = {}


def chunk_from_packed(members: object) -> NewChunk:
    """A chunk from unpacked MessagePack. Raises InvalidInput or pydantic.ValidationError, which name the field."""
    if not isinstance(members, Mapping):
        raise InvalidInput("The body must be a map with rank, boot_id, sequence, steps and columns.", field="body")
    steps, columns = members.get("steps"), members.get("columns")
    if not isinstance(columns, Mapping) or not any(isinstance(one, bytes) for one in (steps, *columns.values())):
        return chunk_from_wire(TelemetryChunk.model_validate(members))
    chunk = _PackedChunk.model_validate(members)
    lists = _lists(chunk)
    checked_steps = _steps(chunk.steps if isinstance(chunk.steps, bytes) else lists.steps)
    values = _values(chunk.columns, lists.columns, checked_steps.size)
    return NewChunk(chunk.rank, chunk.boot_id, chunk.sequence, checked_steps, list(chunk.columns), values)


def _lists(chunk: _PackedChunk) -> _Lists:
    lists: dict[str, Any] = {} if isinstance(chunk.steps, bytes) else {"steps": chunk.steps}
    columns = {name: column for name, column in chunk.columns.items() if not isinstance(column, bytes)}
    if not lists and not columns:
        return _Lists()
    return _Lists.model_validate({**lists, "columns": columns})


def _steps(steps: bytes | list[int]) -> IntArray:
    if isinstance(steps, bytes) and len(steps) % 8:
        raise InvalidInput("steps must hold 8 bytes a step (little-endian int64): check the packing.", field="steps")
    array = np.frombuffer(steps, "<i8") if isinstance(steps, bytes) else np.asarray(steps, np.int64)
    if not 1 <= array.size <= MAX_STEPS:
        raise InvalidInput(f"steps has {array.size} entries: send 1 to {MAX_STEPS} in a chunk.", field="steps")
    if int(array.view("<u8").max()) > _MAX_STEP:  # as unsigned numbers, negative ones are larger too
        raise InvalidInput("steps must lie between 0 and 2**53: check the packing.", field="steps")
    return array


def _values(columns: Mapping[str, Any], lists: Mapping[str, list[float | None]], count: int) -> FloatArray:
    """Shape (columns, count); null in a list becomes NaN, and a packed column must be finite."""
    if all(isinstance(column, bytes) and len(column) == 8 * count for column in columns.values()):
        values = np.frombuffer(b"".join(columns.values()), "<f8").reshape(len(columns), count)
    else:
        values = np.stack(
            [
                _from_list(name, lists[name], count) if name in lists else _from_bytes(name, column, count)
                for name, column in columns.items()
            ]
        )
    finite = np.isfinite(values)
    if not finite.all():
        for row, name in enumerate(columns):
            if name not in lists and not finite[row].all():
                at = int(np.argmin(finite[row]))
                raise InvalidInput(
                    f"columns.{name}[{at}] is NaN or infinite: send a finite number, or the column as a list with "
                    "null.",
                    field=f"columns.{name}",
                )
    return values


def _from_bytes(name: str, column: bytes, count: int) -> FloatArray:
    if len(column) == 8 * count:
        return np.frombuffer(column, "<f8")
    if len(column) == 4 * count:
        return np.frombuffer(column, "<f4").astype(np.float64)
    raise InvalidInput(
        f"columns.{name} has {len(column)} bytes for {count} steps: pack 8 (float64) or 4 (float32) a step.",
        field=f"columns.{name}",
    )


def _from_list(name: str, column: list[float | None], count: int) -> FloatArray:
    if len(column) != count:
        raise InvalidInput(
            f"columns.{name} has {len(column)} values but steps has {count}: send one value a step.",
            field=f"columns.{name}",
        )
    return np.array(column, np.float64)
