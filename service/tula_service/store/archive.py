"""Archives each month of telemetry in Parquet files, with one row per value, before the month is dropped."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import sqlalchemy as sa

from tula_service.errors import InvalidInput, StoreUnavailable
from tula_service.store.telemetry import unpack

if TYPE_CHECKING:
    import pyarrow as pa

VALUES_AT_ONCE: Final = 2**20
VALUES_PER_FILE: Final = 2**27
"""Maximum number of values per file, for a file size of about 1 GB.

S3 cannot copy files above 5 GB, and pyarrow's multipart uploads cannot exceed 98 GB.
"""

_CHUNKS_AT_ONCE: Final = 100
_TEXTS: Final = ("job_id", "run_id", "boot_id")
_NUMBERS: Final = ("rank", "sequence")


class Archive:
    """An archive in a folder, or at a URL that pyarrow supports (`s3://`, `gs://`, `file://`).

    Raises InvalidInput for any other place.
    """

    def __init__(self, place: str, *, values_per_file: int = VALUES_PER_FILE) -> None:
        try:
            from pyarrow import fs
        except ImportError:
            raise InvalidInput("TULA_ARCHIVE requires pyarrow: run `pip install 'tula[archive]'`.") from None
        self._place = place
        self._values_per_file = values_per_file
        self._files: Any
        self._folder: str
        try:
            local = "://" not in place
            self._files, self._folder = (fs.LocalFileSystem(), place) if local else fs.FileSystem.from_uri(place)
            self._files.create_dir(self._folder)
        except (OSError, ValueError) as error:
            said = _without_secrets(" ".join(str(error).split()))
            raise InvalidInput(
                f"Cannot write to TULA_ARCHIVE ({said}): set it to a folder, or to the s3:// URL of an existing bucket "
                "to which the credentials in the AWS_ variables allow writing."
            ) from error

    def write(self, engine: sa.Engine, table: str) -> None:
        """Write a detached partition to `TABLE-00001.parquet` and further files, sorted by primary key.

        The columns are job_id, run_id, rank, boot_id, sequence (of the chunk), step, name and value. If an earlier
        attempt has already written all rows of the table, nothing is written. Raises StoreUnavailable if a file cannot
        be written.
        """
        try:
            for path in self._list_files(table, ".tmp"):  # files of an attempt that was killed
                self._files.delete_file(path)
            if sum(self._stored(table).values()) == _num_values(engine, table):
                return
            parts, sizes = _parts(engine, table, min(VALUES_AT_ONCE, self._values_per_file)), {}
            for number, first in enumerate(parts, 1):
                path = f"{self._folder}/{table}-{number:05}.parquet"
                sizes[path] = self._write_file(path, first, parts)
            for path in self._stored(table).keys() - sizes.keys():  # from an attempt before a job was deleted
                self._files.delete_file(path)
            if (stored := self._stored(table)) != sizes:
                raise OSError(f"{sum(stored.values())} of {sum(sizes.values())} rows were written")
        except Exception as error:
            said = f"Could not write to the archive {self._place} ({error})"
            raise StoreUnavailable(
                f"{_without_secrets(said)}: the telemetry remains in the table {table}, and the next `tula prune "
                "--yes` will try again."
            ) from error

    def _write_file(self, path: str, part: pa.Table, more: Iterator[pa.Table]) -> int:
        """Write parts to a temporary file until it is full, then rename it to `path`; return its number of rows."""
        from pyarrow import parquet

        unfinished = f"{path}.{secrets.token_hex(4)}.tmp"
        try:
            with (
                self._files.open_output_stream(unfinished) as file,
                parquet.ParquetWriter(file, part.schema, **_OPTIONS) as writer,
            ):
                if self._is_local:
                    Path(unfinished).chmod(0o600)  # like the database file
                writer.write_table(part)
                written: int = part.num_rows
                while written < self._values_per_file and (following := next(more, None)) is not None:
                    writer.write_table(following)
                    written += following.num_rows
            self._sync(unfinished)
            self._files.move(unfinished, path)
            self._sync(self._folder)
        except BaseException:
            with contextlib.suppress(OSError):  # the file does not exist, or cannot be reached
                self._files.delete_file(unfinished)
            raise
        return written

    def _stored(self, table: str) -> dict[str, int]:
        """Return the paths of a month's finished files, each with its number of rows."""
        from pyarrow import parquet

        paths = self._list_files(table, ".parquet")
        return {path: parquet.read_metadata(path, filesystem=self._files).num_rows for path in paths}

    def _list_files(self, table: str, ending: str) -> list[str]:
        from pyarrow import fs

        paths = (file.path for file in self._files.get_file_info(fs.FileSelector(self._folder)))
        return [path for path in paths if path.rpartition("/")[2].startswith(f"{table}-") and path.endswith(ending)]

    @property
    def _is_local(self) -> bool:
        return bool(self._files.type_name == "local")

    def _sync(self, path: str) -> None:
        """Flush a local file or folder to disk; on other file systems, a finished file is already durable."""
        if not self._is_local:
            return
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def _without_secrets(text: str) -> str:
    """Return the text without the user information of URLs (between `://` and `@`), which may contain a secret."""
    return re.sub(r"://[^/@\s]*@", "://", text)


_OPTIONS: Final[dict[str, Any]] = {
    "compression": "zstd",
    "use_dictionary": [*_TEXTS, "name"],
    "use_byte_stream_split": ["value"],
}


def _num_values(engine: sa.Engine, table: str) -> int:
    """Return the number of values in a table, which must equal the number of rows in its archive."""
    columns = "length(columns) - length(replace(columns, ',', '')) + 1"
    query = f"SELECT coalesce(sum(num_steps::bigint * ({columns})), 0) FROM {table} JOIN runs ON runs.key = run_key"
    with engine.begin() as connection:
        connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
        return int(connection.exec_driver_sql(query).scalar_one())


def _parts(engine: sa.Engine, table: str, values_at_once: int) -> Iterator[pa.Table]:
    """Yield the values of all chunks, sorted by primary key, in parts of at least `values_at_once` values.

    Each page of chunks is read in a separate transaction, which is safe because the table no longer changes. A single
    transaction could last for hours, during which Postgres could not remove dead rows from any table.
    """
    query = sa.text(
        "SELECT runs.job_id, runs.id AS run_id, run_key, rank, boot_id, sequence, num_steps, columns, payload"
        f" FROM {table} JOIN runs ON runs.key = run_key"
        " WHERE (run_key, rank, boot_id, sequence) > (:run_key, :rank, :boot_id, :sequence)"
        f" ORDER BY run_key, rank, boot_id, sequence LIMIT {_CHUNKS_AT_ONCE}"
    )
    waiting: list[sa.Row[Any]] = []
    size = 0
    last = {"run_key": -1, "rank": -1, "boot_id": "", "sequence": -1}
    while True:
        with engine.connect() as connection:
            page = connection.execute(query, last).all()
        for row in page:
            waiting.append(row)
            size += row.num_steps * (row.columns.count(",") + 1)
            if size >= values_at_once:
                yield _part(waiting)
                waiting, size = [], 0
        if len(page) < _CHUNKS_AT_ONCE:
            break
        last = {name: page[-1]._mapping[name] for name in last}
    if waiting:
        yield _part(waiting)


def _part(chunks: Sequence[sa.Row[Any]]) -> pa.Table:
    """Return a table with one row for each value in these chunks."""
    import pyarrow as pa

    names: list[str] = []
    steps, values, widths = [np.zeros(0, np.int64)], [np.zeros(0)], []
    for chunk in chunks:
        own = chunk.columns.split(",")
        at, columns = unpack(bytes(chunk.payload), chunk.num_steps, len(own))
        names += own
        widths += [at.size] * len(own)
        steps.append(np.tile(at, len(own)))
        values.append(columns.ravel())
    of_chunk = np.repeat(np.arange(len(chunks)), [part.size for part in values[1:]])
    columns_of_chunks: dict[str, Any] = {
        name: pa.array([getattr(chunk, name) for chunk in chunks]).take(of_chunk) for name in (*_TEXTS, *_NUMBERS)
    }
    return pa.table(
        columns_of_chunks
        | {
            "step": np.concatenate(steps),
            "name": pa.array(names, pa.string()).take(np.repeat(np.arange(len(names)), widths)),
            "value": np.concatenate(values),
        }
    )
