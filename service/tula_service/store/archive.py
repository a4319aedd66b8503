"""The archive of telemetry: each dropped month as a Parquet file, one row for each value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import sqlalchemy as sa

from tula_service.errors import InvalidInput, StoreUnavailable
from tula_service.store.telemetry_codec import unpack

if TYPE_CHECKING:
    import pyarrow as pa

VALUES_AT_ONCE: Final = 2**18
_TEXTS: Final = ("job_id", "run_id", "boot_id")
_NUMBERS: Final = ("rank", "sequence")


class Archive:
    """A folder, or a URL that pyarrow knows (`s3://`, `gs://`, `file://`). Raises InvalidInput for any other."""

    def __init__(self, place: str) -> None:
        try:
            from pyarrow import fs
        except ImportError:
            raise InvalidInput("TULA_ARCHIVE needs pyarrow: run `pip install 'tula[archive]'`.") from None
        self._place = place
        self._files: Any
        self._folder: str
        try:
            local = "://" not in place
            self._files, self._folder = (fs.LocalFileSystem(), place) if local else fs.FileSystem.from_uri(place)
            self._files.create_dir(self._folder)
        except (OSError, ValueError) as error:
            raise InvalidInput(f"TULA_ARCHIVE cannot be written ({error}): give a folder or an s3:// URL.") from error

    def write(self, engine: sa.Engine, table: str) -> None:
        """Write a detached partition to `TABLE.parquet`, over a file that an interrupted attempt has left there.

        Columns: job_id, run_id, rank, boot_id, sequence (of the chunk), step, name, value. Raises StoreUnavailable and
        leaves no file when a part cannot be written.
        """
        from pyarrow import parquet

        path = f"{self._folder}/{table}.parquet"
        try:
            written = 0
            with self._files.open_output_stream(path) as file:
                writer = None
                for part in _parts(engine, table):
                    writer = writer or parquet.ParquetWriter(file, part.schema, **_OPTIONS)
                    writer.write_table(part)
                    written += part.num_rows
                (writer or parquet.ParquetWriter(file, _part([]).schema)).close()
            stored = parquet.read_metadata(path, filesystem=self._files).num_rows
            if stored != written:
                raise OSError(f"{stored} of {written} rows are in the file")
        except Exception as error:
            self._remove(path)
            raise StoreUnavailable(
                f"The archive {self._place} could not be written ({error}): the telemetry stays in the table {table}, "
                "and the next `tula prune --yes` tries again."
            ) from error

    def _remove(self, path: str) -> None:
        try:
            self._files.delete_file(path)
        except OSError:
            return  # it was never made, or is out of reach like the rest


_OPTIONS: Final[dict[str, Any]] = {
    "compression": "zstd",
    "use_dictionary": [*_TEXTS, "name"],
    "use_byte_stream_split": ["value"],
}


def _parts(engine: sa.Engine, table: str) -> Iterator[pa.Table]:
    """The values of all chunks in the order in which they arrived, a few hundred thousand at a time."""
    query = sa.text(
        "SELECT runs.job_id, runs.id AS run_id, boot_id, rank, sequence, num_steps, columns, payload"
        f" FROM {table} JOIN runs ON runs.key = run_key"
    )
    waiting: list[sa.Row[Any]] = []
    size = 0
    with engine.connect().execution_options(yield_per=100) as connection:
        for row in connection.execute(query):
            waiting.append(row)
            size += row.num_steps * (row.columns.count(",") + 1)
            if size >= VALUES_AT_ONCE:
                yield _part(waiting)
                waiting, size = [], 0
    if waiting:
        yield _part(waiting)


def _part(chunks: Sequence[sa.Row[Any]]) -> pa.Table:
    """One row for each value of these chunks."""
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
        name: pa.array([getattr(chunk, name) for chunk in chunks], pa.string()).take(of_chunk) for name in _TEXTS
    }
    for name in _NUMBERS:
        columns_of_chunks[name] = pa.array([getattr(chunk, name) for chunk in chunks], pa.int64()).take(of_chunk)
    return pa.table(
        columns_of_chunks
        | {
            "step": np.concatenate(steps),
            "name": pa.array(names, pa.string()).take(np.repeat(np.arange(len(names)), widths)),
            "value": np.concatenate(values),
        }
    )
