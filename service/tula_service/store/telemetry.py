"""Telemetry chunks: raw per-step series of a run, compressed, stored as sent and read back by column."""

from __future__ import annotations

import struct
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Final, TypeAlias

import numpy as np
import sqlalchemy as sa
import zstandard

from tula_service.domain import FloatArray, IntArray, NewChunk
from tula_service.errors import NotFound
from tula_service.store._base import Repository
from tula_service.store.tables import runs, telemetry_chunks

_COLUMNS = "run_key, rank, boot_id, sequence, first_step, last_step, num_steps, columns, payload"
_CONFLICT = "ON CONFLICT (run_key, rank, boot_id, sequence) DO NOTHING"
INSERT = {
    "sqlite": f"INSERT INTO telemetry_chunks ({_COLUMNS}) SELECT {', '.join('?' * 9)} WHERE EXISTS "
    f"(SELECT 1 FROM runs WHERE key = ? AND id = ?) {_CONFLICT}",
    "postgresql": f"INSERT INTO telemetry_chunks ({_COLUMNS}) VALUES ({', '.join(['%s'] * 9)}) {_CONFLICT}",
}
"""On SQLite the row, then the run's key and id: SQLite reuses the key of a deleted run, maybe for another tenant's."""
GONE: Final = "The run of this chunk, or the telemetry of its month, was deleted: stop sending for it."
_LAST_STEP: Final = 2**63 - 1
MOST_POINTS: Final = 400_000
"""Of one column that is read: a longer history is thinned while it is read."""
MAX_NAMES: Final = 1_000
"""Columns of a run that are listed."""
_PER_FETCH: Final = {"yield_per": 64}
"""Chunks that are in memory at once."""
_EXPLICIT_STEPS: Final = 1
_SINGLE_PRECISION: Final = 2
_LEVEL: Final = -1
"""On noisy columns the result is 3 % larger than at level 1, in a quarter of the time."""


_Piece: TypeAlias = tuple[IntArray, FloatArray]


class _PerThread(threading.local):
    """zstandard's objects may not be shared between threads."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _PerThread()


def chunk_row(run_key: int, chunk: NewChunk) -> tuple[object, ...]:
    """The row of a chunk, compressed before the transaction starts."""
    steps = chunk.steps
    return (
        run_key,
        chunk.rank,
        chunk.boot_id,
        chunk.sequence,
        int(steps.min()),
        int(steps.max()),
        int(steps.size),
        ",".join(chunk.names),
        pack(steps, chunk.values),
    )


def pack(steps: IntArray, values: FloatArray) -> bytes:
    """Compress `steps` of shape (n,) and `values` of shape (columns, n); NaN stays NaN.

    Layout, little-endian: `steps` as one flag byte, then either first step and stride (int64 each, flag 0) or all steps
    (flag 1), then the columns in order, their bytes shuffled by significance; float64, or float32 if that is lossless
    (the flag's second bit).
    """
    stride = int(steps[1]) - int(steps[0]) if steps.size > 1 else 0
    if bool((steps[1:] - steps[:-1] == stride).all()):
        flags, head = 0, struct.pack("<qq", int(steps[0]), stride)
    else:
        flags, head = _EXPLICIT_STEPS, steps.astype("<i8").tobytes()
    values = np.ascontiguousarray(values, dtype="<f8")
    with np.errstate(over="ignore"):  # a value beyond the range becomes infinite, and so unequal
        single = values.astype("<f4")
    lossless = bool(((single == values) | (values != values)).all())
    if lossless:
        flags |= _SINGLE_PRECISION
    return bytes([flags]) + _zstd.compressor.compress(head + _shuffle(single if lossless else values))


def unpack(payload: bytes, num_steps: int, num_columns: int) -> tuple[IntArray, FloatArray]:
    """The inverse of `pack`: steps of shape (num_steps,), values of shape (num_columns, num_steps)."""
    flags = payload[0]
    raw = _zstd.decompressor.decompress(payload[1:])
    if flags & _EXPLICIT_STEPS:
        steps = np.frombuffer(raw, "<i8", num_steps).astype(np.int64)
        offset = 8 * num_steps
    else:
        first, stride = struct.unpack_from("<qq", raw)
        steps = first + stride * np.arange(num_steps, dtype=np.int64)
        offset = 16
    kind = np.dtype("<f4" if flags & _SINGLE_PRECISION else "<f8")
    planes = np.frombuffer(raw, np.uint8, offset=offset).reshape(kind.itemsize, num_columns * num_steps)
    values = np.ascontiguousarray(planes.T).view(kind).reshape(num_columns, num_steps)
    return steps, values.astype(np.float64)


def _shuffle(values: np.ndarray[tuple[int, ...], np.dtype[np.floating]]) -> bytes:
    """All first bytes, then all second bytes, ...: exponents become neighbours and compress well."""
    planes: bytes = np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.dtype.itemsize).T.tobytes()
    return planes


class Telemetry(Repository):
    """The telemetry chunks of runs."""

    def run_key(self, run_id: str) -> tuple[int, str, str]:
        """The run's integer key, its job and its project, which never change. Raises NotFound."""
        row = self._connection.execute(
            sa.select(runs.c.key, runs.c.job_id, runs.c.project_id).where(runs.c.id == run_id)
        ).first()
        if row is None:
            raise NotFound.of("run", run_id)
        return int(row[0]), str(row[1]), str(row[2])

    def add(self, run_id: str, row: tuple[object, ...]) -> bool:
        """Store a row of `chunk_row` for the run `run_id`; False if it was stored before.

        Raises NotFound if the run was deleted; on Postgres sqlalchemy.exc.IntegrityError, see `partitions.refusal`.
        """
        if self._postgres:
            return self._connection.exec_driver_sql(INSERT["postgresql"], row).rowcount == 1
        if self._connection.exec_driver_sql(INSERT["sqlite"], (*row, row[0], run_id)).rowcount == 1:
            return True
        if self._row(sa.select(runs.c.key).where(runs.c.key == row[0], runs.c.id == run_id)) is None:
            raise NotFound(GONE)
        return False

    def columns(self, run_key: int) -> list[str]:
        """The names of the run's columns, sorted; the first MAX_NAMES of them."""
        chunk = telemetry_chunks.c
        sent = self._connection.execute(sa.select(chunk.columns).where(chunk.run_key == run_key).distinct())
        return sorted({name for names in sent.scalars() for name in names.split(",")})[:MAX_NAMES]

    def last_step(self, run_key: int) -> int | None:
        """The last step of which the first rank sent telemetry, None before its first chunk."""
        chunk = telemetry_chunks.c
        last = sa.select(sa.func.max(chunk.last_step)).where(chunk.run_key == run_key, chunk.rank == 0)
        found: int | None = self._scalar(last)
        return found

    def read(
        self,
        run_key: int,
        column: str,
        *,
        rank: int = 0,
        first_step: int | None = None,
        last_step: int | None = None,
    ) -> tuple[IntArray, FloatArray]:
        """Steps and values of one column of one rank, by step; of a step sent twice, the later boot's value.

        Of more than MOST_POINTS an even share, with all peaks and dips.
        """
        chunk = telemetry_chunks.c
        first, last = first_step or 0, _LAST_STEP if last_step is None else last_step
        within = (chunk.run_key == run_key, chunk.last_step >= first, chunk.first_step <= last)
        statement = _chunks(column, rank).where(*within).order_by(*_ORDER)
        steps, values = _joined(self._connection.execute(statement, execution_options=_PER_FETCH), column)
        keep = (steps >= first) & (steps <= last)
        return steps[keep], values[keep]

    def newest(self, run_key: int, column: str) -> float | None:
        """The last value of a column in the newest chunk of the first rank that has it; None without one."""
        statement = _chunks(column, 0).where(telemetry_chunks.c.run_key == run_key)
        newest = statement.order_by(*(place.desc() for place in _ORDER)).limit(1)
        _, values = _joined(self._connection.execute(newest), column)
        numbers = values[~np.isnan(values)]
        return float(numbers[-1]) if numbers.size else None

    def num_steps(self, run_ids: Collection[str]) -> dict[str, dict[str, int]]:
        """The columns that the first rank of each of these runs sent, each with the number of steps of its chunks."""
        chunk = telemetry_chunks.c
        rows = self._connection.execute(
            sa.select(runs.c.id, chunk.columns, sa.func.sum(chunk.num_steps))
            .join_from(runs, telemetry_chunks, runs.c.key == chunk.run_key)
            .where(runs.c.id.in_(run_ids), chunk.rank == 0)
            .group_by(runs.c.id, chunk.columns)
        )
        found: dict[str, dict[str, int]] = {}
        for run_id, names, count in rows:
            of_run = found.setdefault(run_id, {})
            for name in names.split(","):
                of_run[name] = of_run.get(name, 0) + int(count)
        return found

    def count(self, run_key: int, column: str, rank: int) -> int:
        """The number of steps that a rank's chunks hold of a column."""
        chunk = telemetry_chunks.c
        counted = sa.select(sa.func.sum(chunk.num_steps)).where(chunk.run_key == run_key, *_of_column(column, rank))
        return int(self._scalar(counted) or 0)

    def read_runs(self, run_ids: Collection[str], column: str) -> Iterator[tuple[str, IntArray, FloatArray]]:
        """Run id, steps and values, as `read` has them, of each of these runs that sent the column: one query."""
        statement = (
            _chunks(column, 0)
            .add_columns(runs.c.id)
            .join(runs, runs.c.key == telemetry_chunks.c.run_key)
            .where(runs.c.id.in_(run_ids))
            .order_by(runs.c.key, *_ORDER)
        )
        for run_id, rows in groupby(
            self._connection.execute(statement, execution_options=_PER_FETCH), key=lambda row: row[3]
        ):
            yield run_id, *_joined((row[:3] for row in rows), column)

    def purge(self, job_id: str, *, limit: int) -> int:
        """Delete up to `limit` chunks of a job; returns their number."""
        return self._purge(telemetry_chunks, job_id, limit)


_ORDER = (telemetry_chunks.c.first_step, telemetry_chunks.c.boot_id, telemetry_chunks.c.sequence)


def _chunks(column: str, rank: int) -> sa.Select[tuple[int, str, bytes]]:
    """Only the chunks that have the column are read and decompressed; some columns are sent rarely."""
    chunk = telemetry_chunks.c
    return sa.select(chunk.num_steps, chunk.columns, chunk.payload).where(*_of_column(column, rank))


def _of_column(column: str, rank: int) -> tuple[sa.ColumnElement[bool], ...]:
    chunk = telemetry_chunks.c
    return chunk.rank == rank, ("," + chunk.columns + ",").contains(f",{column},", autoescape=True)


class _History:
    """A column while it is read, of any length in a bounded memory: beyond MOST_POINTS an even share of its points.

    Minimum and maximum of every interval stay, so that no peak is lost; medians of the rest hardly move.
    """

    def __init__(self) -> None:
        self._kept: list[_Piece] = []
        self._new: list[_Piece] = []
        self._stride = 1

    def add(self, steps: IntArray, values: FloatArray) -> None:
        """Take the points of the next chunk."""
        self._new.append((steps, values))
        if _size(self._new) >= MOST_POINTS // 4:
            self._thin()

    def points(self) -> _Piece:
        """Steps, ascending and once each, and values."""
        self._thin()
        return _in_order(self._kept) if self._kept else (np.zeros(0, np.int64), np.zeros(0))

    def _thin(self) -> None:
        if self._new:
            self._kept.append(_thinned(*_in_order(self._new), self._stride))
            self._new = []
        if _size(self._kept) > MOST_POINTS:
            self._stride *= 2
            self._kept = [_thinned(*_in_order(self._kept), 2)]


def _size(pieces: Iterable[_Piece]) -> int:
    return sum(steps.size for steps, _ in pieces)


def _thinned(steps: IntArray, values: FloatArray, stride: int) -> _Piece:
    """Every `stride`-th point, with minimum and maximum of each interval of 64 of those."""
    if stride == 1:
        return steps, values
    keep = np.zeros(steps.size, bool)
    keep[::stride] = keep[-1] = True
    width = 64 * stride
    starts = np.arange(0, steps.size, width)
    rows = np.full((starts.size, width), np.nan)
    rows.flat[: steps.size] = values
    for bound, best in ((np.inf, np.argmin), (-np.inf, np.argmax)):
        keep[starts + best(np.where(np.isnan(rows), bound, rows), axis=1)] = True
    return steps[keep], values[keep]


def _joined(chunks: Iterable[Sequence[Any]], column: str) -> _Piece:
    """Steps and values of one column of these chunks of a rank."""
    history = _History()
    for num_steps, columns, payload in chunks:
        names = columns.split(",")
        if column in names:
            steps, values = unpack(bytes(payload), num_steps, len(names))
            history.add(steps, values[names.index(column)].copy())  # a view would keep all columns in memory
    return history.points()


def _in_order(pieces: Sequence[_Piece]) -> _Piece:
    """All steps of the pieces, ascending and once each."""
    steps = np.concatenate([piece[0] for piece in pieces])
    values = np.concatenate([piece[1] for piece in pieces])
    if bool((np.diff(steps) > 0).all()):
        return steps, values
    # A missing value never hides a number: a chunk that arrives late may lack this column's value for some steps.
    order = np.lexsort((~np.isnan(values), steps))
    steps, values = steps[order], values[order]
    last = np.append(steps[1:] != steps[:-1], True)
    return steps[last], values[last]
