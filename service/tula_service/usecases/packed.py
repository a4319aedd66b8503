"""The packed form of a telemetry chunk: MessagePack whose columns are little-endian arrays, checked as arrays.

The same members as `tula_wire.TelemetryChunk`, with `steps` as int64 bytes (or a list) and each column as float64 or
float32 bytes (or a list, where a value is missing). See docs/wire.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from tula_service.errors import InvalidInput
from tula_service.store import NewChunk
from tula_service.store.records import FloatArray, IntArray
from tula_service.usecases.ingest import chunk_from_wire
from tula_wire import MAX_STEPS, TelemetryChunk

__all__ = ["chunk_from_packed"]

_LARGEST: Final = 2**53


def chunk_from_packed(members: object) -> NewChunk:
    """A chunk from unpacked MessagePack; a value at fault is named, as with JSON.

    Raises InvalidInput or pydantic.ValidationError. Members without bytes go through the wire's own model.
    """
    if not isinstance(members, Mapping):
        raise InvalidInput("The body must be a map with rank, boot_id, sequence, steps and columns.", field="body")
    steps, columns = members.get("steps"), members.get("columns")
    if not isinstance(columns, Mapping) or not any(isinstance(one, bytes) for one in (steps, *columns.values())):
        return chunk_from_wire(TelemetryChunk.model_validate(members))
    checked_steps = _steps(steps)
    # Names, rank, boot id and sequence are the wire model's business: one step of zeros stands for the numbers.
    frame = TelemetryChunk.model_validate({**members, "steps": [0], "columns": {name: [0.0] for name in columns}})
    values = _values(columns, checked_steps.size)
    finite = np.isfinite(values)
    if not finite.all():
        row, at = (int(index) for index in np.argwhere(~finite)[0])
        name = list(columns)[row]
        if isinstance(columns[name], bytes) or not np.isnan(values[row, at]):
            raise InvalidInput(
                f"columns.{name}[{at}] is NaN or infinite: send a finite number, or the column as a list with null.",
                field=f"columns.{name}",
            )
        _refuse_packed_nan(columns, finite)
    return NewChunk(frame.rank, frame.boot_id, frame.sequence, checked_steps, list(columns), values)


def _values(columns: Mapping[Any, Any], count: int) -> FloatArray:
    """Shape (columns, count)."""
    if all(isinstance(one, bytes) and len(one) == 8 * count for one in columns.values()):
        return np.frombuffer(b"".join(columns.values()), "<f8").reshape(len(columns), count)
    return np.stack([_column(name, column, count) for name, column in columns.items()])


def _steps(steps: Any) -> IntArray:
    if isinstance(steps, bytes):
        if len(steps) % 8:
            raise InvalidInput(
                "steps must hold 8 bytes a step (little-endian int64): check the packing.", field="steps"
            )
        array = np.frombuffer(steps, "<i8")
    else:
        array = np.asarray(TelemetryChunk.model_validate(_frame_of(steps)).steps, np.int64)
    if not 1 <= array.size <= MAX_STEPS:
        raise InvalidInput(f"steps has {array.size} entries: send 1 to {MAX_STEPS} in a chunk.", field="steps")
    if int(array.view("<u8").max()) > _LARGEST:  # which the negative ones are too, without their sign
        raise InvalidInput("steps must lie between 0 and 2**53: check the packing.", field="steps")
    return array


def _frame_of(steps: Any) -> dict[str, Any]:
    count = len(steps) if isinstance(steps, list) else 0
    return {"boot_id": "-", "sequence": 0, "steps": steps, "columns": {"x": [0.0] * count}}


def _column(name: Any, column: Any, count: int) -> FloatArray:
    if isinstance(column, bytes):
        if len(column) == 8 * count:
            return np.frombuffer(column, "<f8")
        if len(column) == 4 * count:
            return np.frombuffer(column, "<f4").astype(np.float64)
        raise InvalidInput(
            f"columns.{name} has {len(column)} bytes for {count} steps: pack 8 (float64) or 4 (float32) a step.",
            field=f"columns.{name}",
        )
    members = {"boot_id": "-", "sequence": 0, "steps": [0] * count, "columns": {name: column}}
    return np.array(TelemetryChunk.model_validate(members).columns[name], np.float64)


def _refuse_packed_nan(columns: Mapping[Any, Any], finite: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
    """Only a list may leave a value out; looks at every packed column, not just the first fault."""
    for row, (name, column) in enumerate(columns.items()):
        if isinstance(column, bytes) and not finite[row].all():
            at = int(np.argmin(finite[row]))
            raise InvalidInput(
                f"columns.{name}[{at}] is NaN or infinite: send a finite number, or the column as a list with null.",
                field=f"columns.{name}",
            )
