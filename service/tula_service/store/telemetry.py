"""Stores a run's raw values per step in compressed chunks, and reads single columns."""

from __future__ import annotations

import struct
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import sqlalchemy as sa
import zstandard

from tula_service.domain import FloatArray, IntArray, NewChunk
from tula_service.errors import NotFound
from tula_service.store._base import Repository
from tula_service.store.tables import runs, telemetry_chunks, telemetry_columns

_COLUMNS = "run_key, rank, boot_id, sequence, first_step, last_step, num_steps, columns, payload"
_CONFLICT = "ON CONFLICT (run_key, rank, boot_id, sequence) DO NOTHING"
INSERT = {
    "sqlite": f"INSERT INTO telemetry_chunks ({_COLUMNS}) SELECT {', '.join('?' * 9)} WHERE EXISTS "
    f"(SELECT 1 FROM runs WHERE key = ? AND id = ?) {_CONFLICT}",
    "postgresql": f"INSERT INTO telemetry_chunks ({_COLUMNS}) VALUES ({', '.join(['%s'] * 9)}) {_CONFLICT}",
}
"""INSERT statements by dialect. On SQLite, the statement also checks that the run's key and id belong together.

SQLite may reuse the key of a deleted run, possibly for another tenant.
"""
_FIELDS: Final = ("num_steps", "newest_step", "newest_value")
_IS_NEWER: Final = "excluded.newest_step >= coalesce(telemetry_columns.newest_step, -1)"
_OF_OTHER_RANKS: Final = "ON CONFLICT (run_key, name) DO NOTHING"
_ADDED: Final = (
    "ON CONFLICT (run_key, name) DO UPDATE SET num_steps = telemetry_columns.num_steps + excluded.num_steps, "
    + ", ".join(
        f"{name} = CASE WHEN {_IS_NEWER} THEN excluded.{name} ELSE telemetry_columns.{name} END" for name in _FIELDS[1:]
    )
)
_NOTE: Final = {
    "sqlite": f"INSERT INTO telemetry_columns (run_key, name, {', '.join(_FIELDS)}) VALUES (?, ?, ?, ?, ?) ",
    "postgresql": f"INSERT INTO telemetry_columns (run_key, name, {', '.join(_FIELDS)}) SELECT %s, part.* FROM "
    f"unnest(%s::text[], %s::bigint[], %s::bigint[], %s::float8[]) AS part ",
}
GONE: Final = "The run of this chunk, or the telemetry of its month, was deleted: stop sending telemetry for this run."
_LAST_STEP: Final = 2**63 - 1
MOST_POINTS: Final = 400_000
"""Approximate maximum number of points that `read` returns; longer series are thinned while they are read."""
MAX_NAMES: Final = 1_000
"""Maximum number of columns per run; the store refuses any further column."""
MOST_CHUNKS: Final = 4_000
"""Maximum number of chunks to read for callers that must limit the time."""
_PER_FETCH: Final = {"yield_per": 64}
"""The execution option that limits the number of chunks in memory at the same time."""
_EXPLICIT_STEPS: Final = 1
_SINGLE_PRECISION: Final = 2
_LEVEL: Final = -1
"""Compression level. Compared with level 1, noisy columns become 3 % larger but compress in a quarter of the time."""

_ADMITTED: Final = sa.select(telemetry_columns.c.name).where(
    telemetry_columns.c.run_key == sa.bindparam("run"),
    telemetry_columns.c.name.in_(sa.bindparam("names", expanding=True)),
)

_Piece: TypeAlias = tuple[IntArray, FloatArray]


class Series(NamedTuple):
    """The values of a column and their steps, which are distinct and in ascending order.

    `total` is the number of points before thinning.
    """

    steps: IntArray
    values: FloatArray
    total: int


class _PerThread(threading.local):
    """A compressor and a decompressor for each thread, since threads must not share zstandard's objects."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _PerThread()


def chunk_row(run_key: int, chunk: NewChunk) -> tuple[object, ...]:
    """Return the table row for a chunk; call this before the transaction starts, since compression takes time."""
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
    """Return `steps` of shape (n,) and `values` of shape (columns, n) in compressed form; NaN is preserved.

    The layout is little-endian. The first byte contains flags; everything after it is compressed: either the first step
    and the stride (int64 each) or, if the first flag bit is set, all steps; then the columns in order, with their bytes
    shuffled by significance. Values are float64 or, if the second flag bit is set because this is lossless, float32.
    """
    stride = int(steps[1]) - int(steps[0]) if steps.size > 1 else 0
    if bool((steps[1:] - steps[:-1] == stride).all()):
        flags, head = 0, struct.pack("<qq", int(steps[0]), stride)
    else:
        flags, head = _EXPLICIT_STEPS, steps.astype("<i8").tobytes()
    values = np.ascontiguousarray(values, dtype="<f8")
    with np.errstate(over="ignore"):  # a value out of range becomes infinite, so it compares unequal
        single = values.astype("<f4")
    lossless = bool(((single == values) | (values != values)).all())
    if lossless:
        flags |= _SINGLE_PRECISION
    return bytes([flags]) + _zstd.compressor.compress(head + _shuffle(single if lossless else values))


def unpack(payload: bytes, num_steps: int, num_columns: int) -> tuple[IntArray, FloatArray]:
    """Return steps of shape (num_steps,) and values of shape (num_columns, num_steps) from a payload of `pack`."""
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
    """Return the first bytes of all values, then their second bytes, and so on, so that similar bytes are adjacent.

    This makes the exponents compress well.
    """
    planes: bytes = np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.dtype.itemsize).T.tobytes()
    return planes


class Telemetry(Repository):
    """The tables of telemetry chunks and of their columns."""

    def run_key(self, run_id: str) -> tuple[int, str, str]:
        """Return the run's integer key, job id and project id, which never change. Raises NotFound."""
        row = self._connection.execute(
            sa.select(runs.c.key, runs.c.job_id, runs.c.project_id).where(runs.c.id == run_id)
        ).first()
        if row is None:
            raise NotFound.of("run", run_id)
        return int(row[0]), str(row[1]), str(row[2])

    def add(self, run_id: str, chunk: NewChunk, row: tuple[object, ...]) -> bool:
        """Store a chunk of a run as `row` (see `chunk_row`); return False if the chunk was already stored.

        If the run was deleted, raises NotFound on SQLite, and sqlalchemy.exc.IntegrityError on Postgres (see
        `partitions.refusal`).
        """
        if self._postgres:
            stored = self._connection.exec_driver_sql(INSERT["postgresql"], row).rowcount == 1
        else:
            stored = self._connection.exec_driver_sql(INSERT["sqlite"], (*row, row[0], run_id)).rowcount == 1
            if not stored and self._row(sa.select(runs.c.key).where(runs.c.key == row[0], runs.c.id == run_id)) is None:
                raise NotFound(GONE)
        if stored:
            self._note_columns(row[0], chunk)
        return stored

    def admitted(self, run_key: int, names: Sequence[str]) -> list[str]:
        """Return the names that are already columns of the run or can be added without exceeding MAX_NAMES."""
        column = telemetry_columns.c
        has = set(self._connection.execute(_ADMITTED, {"run": run_key, "names": list(names)}).scalars())
        new = [name for name in names if name not in has]
        if new:
            count = int(self._scalar(sa.select(sa.func.count()).where(column.run_key == run_key)))
            has.update(new[: max(0, MAX_NAMES - count)])
        return [name for name in names if name in has]

    def columns(self, run_key: int) -> list[str]:
        """Return the sorted names of the run's columns."""
        column = telemetry_columns.c
        return sorted(self._connection.execute(sa.select(column.name).where(column.run_key == run_key)).scalars())

    def read(
        self,
        run_key: int,
        column: str,
        *,
        rank: int = 0,
        first_step: int | None = None,
        last_step: int | None = None,
        most_chunks: int | None = None,
    ) -> Series:
        """Return a column of one rank, by step; if a step was sent again after a restart, the later value is used.

        A series longer than MOST_POINTS is thinned evenly, but peaks and dips are kept. If `most_chunks` is set, only
        the first `most_chunks` chunks are read.
        """
        chunk = telemetry_chunks.c
        first, last = first_step or 0, _LAST_STEP if last_step is None else last_step
        within = (chunk.run_key == run_key, chunk.last_step >= first, chunk.first_step <= last)
        statement = _chunks(column, rank).where(*within).order_by(*_ORDER).limit(most_chunks)
        steps, values, total = _joined(self._connection.execute(statement, execution_options=_PER_FETCH), column)
        keep = (steps >= first) & (steps <= last)
        # The first and the last chunk may also contain steps outside the range.
        return Series(steps[keep], values[keep], total if keep.all() else int(np.count_nonzero(keep)))

    def newest(self, run_key: int, names: Collection[str]) -> dict[str, float | None]:
        """Return the newest value of each column from the run's first rank, or None for a column without values."""
        column = telemetry_columns.c
        values = sa.select(column.name, column.newest_value).where(column.run_key == run_key, column.name.in_(names))
        return dict.fromkeys(names) | {row.name: row.newest_value for row in self._connection.execute(values)}

    def num_steps(self, run_ids: Collection[str]) -> dict[str, dict[str, int]]:
        """Return, for each run, the columns that its first rank sent, each with its number of steps."""
        column = telemetry_columns.c
        rows = self._connection.execute(
            sa.select(runs.c.id, column.name, column.num_steps)
            .join_from(runs, telemetry_columns, runs.c.key == column.run_key)
            .where(runs.c.id.in_(run_ids), column.num_steps > 0)
        )
        counts: dict[str, dict[str, int]] = {}
        for run_id, name, count in rows:
            counts.setdefault(run_id, {})[name] = int(count)
        return counts

    def read_runs(self, run_ids: Collection[str], column: str) -> Iterator[tuple[str, IntArray, FloatArray]]:
        """Yield (id, steps, values) for each of these runs that has the column, using a single query."""
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
            steps, values, _ = _joined((row[:3] for row in rows), column)
            yield run_id, steps, values

    def purge(self, job_id: str, *, limit: int) -> int:
        """Delete up to `limit` chunks of a job, and return the number of deleted chunks."""
        return self._purge(telemetry_chunks, job_id, limit)

    def _note_columns(self, run_key: object, chunk: NewChunk) -> None:
        """Record the columns of a stored chunk; for rank 0, also count its steps and store its newest values."""
        rows = sorted(_noted(chunk))  # sorted, so that transactions lock rows in the same order
        on_conflict = _OF_OTHER_RANKS if chunk.rank else _ADDED
        if self._postgres:
            arguments = (run_key, *(list(part) for part in zip(*rows, strict=True)))
            self._connection.exec_driver_sql(_NOTE["postgresql"] + on_conflict, arguments)
        else:
            self._connection.exec_driver_sql(_NOTE["sqlite"] + on_conflict, [(run_key, *row) for row in rows])


_ORDER = (telemetry_chunks.c.first_step, telemetry_chunks.c.boot_id, telemetry_chunks.c.sequence)


def _noted(chunk: NewChunk) -> Iterator[tuple[str, int, int | None, float | None]]:
    """Yield the name of each column of a chunk, its number of steps, and its newest value with the value's step.

    For ranks other than the first, the number of steps is 0 and the value is missing.
    """
    for name, values in zip(chunk.names, chunk.values, strict=True):
        numbers = np.flatnonzero(~np.isnan(values))
        if chunk.rank or not numbers.size:
            yield name, 0 if chunk.rank else int(chunk.steps.size), None, None
        else:
            newest = numbers[np.argmax(chunk.steps[numbers])]
            yield name, int(chunk.steps.size), int(chunk.steps[newest]), float(values[newest])


def _chunks(column: str, rank: int) -> sa.Select[tuple[int, str, bytes]]:
    """Return a query for the chunks of a rank that contain the column.

    If a column is sent rarely, the query excludes most chunks, which are then neither read nor decompressed.
    """
    chunk = telemetry_chunks.c
    has_column = ("," + chunk.columns + ",").contains(f",{column},", autoescape=True)
    return sa.select(chunk.num_steps, chunk.columns, chunk.payload).where(chunk.rank == rank, has_column)


class _History:
    """Collects a column of any length in bounded memory, by evenly thinning columns longer than MOST_POINTS points.

    The minimum and maximum of every interval are kept, so that no peak is lost; thinning hardly changes medians.
    """

    def __init__(self) -> None:
        self._kept: list[_Piece] = []
        self._new: list[_Piece] = []
        self._num_new = 0
        self._stride = 1
        self._left_out = 0

    def add(self, steps: IntArray, values: FloatArray) -> None:
        """Add the points of one more chunk."""
        self._new.append((steps, values))
        self._num_new += steps.size
        if self._num_new >= MOST_POINTS // 4:
            self._thin()

    def points(self) -> Series:
        """Return the points that were kept, and the total number of points that were added."""
        self._thin()
        steps, values = _in_order(self._kept) if self._kept else (np.zeros(0, np.int64), np.zeros(0))
        return Series(steps, values, steps.size + self._left_out)

    def _thin(self) -> None:
        if self._new:
            self._kept.append(self._thinned(*_in_order(self._new), self._stride))
            self._new, self._num_new = [], 0
        if sum(steps.size for steps, _ in self._kept) > MOST_POINTS:
            self._stride *= 2
            self._kept = [self._thinned(*_in_order(self._kept), 2)]

    def _thinned(self, steps: IntArray, values: FloatArray, stride: int) -> _Piece:
        kept = _thinned(steps, values, stride)
        self._left_out += steps.size - kept[0].size
        return kept


def _thinned(steps: IntArray, values: FloatArray, stride: int) -> _Piece:
    """Return every `stride`-th point, and the minimum and maximum of each interval of 64 strides."""
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


def _joined(chunks: Iterable[Sequence[Any]], column: str) -> Series:
    """Return the steps and values of a column, concatenated from a rank's chunks."""
    history = _History()
    for num_steps, columns, payload in chunks:
        names = columns.split(",")
        if column in names:
            steps, values = unpack(bytes(payload), num_steps, len(names))
            history.add(steps, values[names.index(column)].copy())  # a view would keep all columns in memory
    return history.points()


def _in_order(pieces: Sequence[_Piece]) -> _Piece:
    """Return the distinct steps of all pieces in ascending order, with the corresponding values."""
    steps = np.concatenate([piece[0] for piece in pieces])
    values = np.concatenate([piece[1] for piece in pieces])
    if bool((np.diff(steps) > 0).all()):
        return steps, values
    # A missing value never replaces a number, since a later chunk may lack this column's value for some steps.
    order = np.lexsort((~np.isnan(values), steps))
    steps, values = steps[order], values[order]
    last = np.append(steps[1:] != steps[:-1], True)
    return steps[last], values[last]
