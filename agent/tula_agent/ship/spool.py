"""Stores requests on disk while the service is unavailable, in a bounded append-only file that survives a crash."""

from __future__ import annotations

import errno
import json
import os
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_HEAD = struct.Struct("<4sII")  # magic, length, CRC-32 of the payload
_MAGIC = b"TUL1"
_MAX_RECORD = 16 * 2**20
SUFFIX = ".spool"
TAKEN = ".uploading"  # follows a random part, so that the name is unique
_RUN = r"/v1/runs/[\w-][\w.:-]{0,199}"
_AGENTS_ROUTES = re.compile(rf"PATCH {_RUN}|POST {_RUN}/(samples|telemetry)", re.ASCII)
"""The only requests that `tula upload` sends with the user's token, since a job can write any record to its spool."""


@dataclass(frozen=True)
class SpooledRequest:
    """A request without its token.

    `values`: the number of measurements that are lost if the request is dropped. `keep`: whether to write the request
    to disk while the service is unavailable (False for a heartbeat). `lease`: the number of the lease under which the
    values were measured; once the run has a newer lease, the service refuses the request, even days later.
    """

    method: Literal["POST", "PATCH"]
    path: str
    body: bytes
    values: int = 0
    keep: bool = True
    lease: int | None = None

    def to_record(self) -> bytes:
        """Return the payload of one spool record."""
        head = json.dumps({"method": self.method, "path": self.path, "values": self.values, "lease": self.lease})
        return head.encode() + b"\n" + self.body

    @classmethod
    def from_record(cls, payload: bytes) -> SpooledRequest:
        """Return the request in a payload that `to_record` created. Raises ValueError for any other payload."""
        head, _, body = payload.partition(b"\n")
        fields = json.loads(head)
        method, path = fields.get("method"), fields.get("path")
        if not isinstance(path, str) or not _AGENTS_ROUTES.fullmatch(f"{method} {path}"):
            raise ValueError(f"a spool record contains {method!r} {path!r}, which is not a request that agents send")
        lease = fields.get("lease")
        if not isinstance(lease, int | None):
            raise ValueError(f"a spool record has the lease {lease!r}, which is not a whole number")
        return cls(method, path, body, int(fields.get("values", 0)), lease=lease)


def encode(body: dict[str, Any]) -> bytes:
    """Return `body` as compact JSON. Raises ValueError for NaN and infinity, which JSON does not support."""
    return json.dumps(body, allow_nan=False, separators=(",", ":")).encode()


class Spool:
    """File of one process, created with the first record and deleted once all its records have been sent.

    A record is written with one `write` call, so `kill -9` leaves at most one incomplete record at the end, which
    `read_records` skips. `tula upload` may take the file at any time by renaming it. A record that was written after
    the renaming might never be uploaded, so it is written again to a new file. Methods raise OSError if the disk fails;
    `append` returns False once the size limit is reached.
    """

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self.path = path
        self.limit_bytes = limit_bytes
        self.size = 0

    @property
    def empty(self) -> bool:
        """Return True if the spool is empty."""
        return self.size == 0

    def append(self, request: SpooledRequest) -> bool:
        """Add one request; return False if it would exceed the spool's size limit."""
        payload = request.to_record()
        record = _HEAD.pack(_MAGIC, len(payload), zlib.crc32(payload)) + payload
        if len(payload) > _MAX_RECORD or self.size + len(record) > self.limit_bytes:
            return False
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self._write(record):
            self._write(record)
        return True

    def _write(self, record: bytes) -> bool:
        """Append a record to the file; return False if the file was renamed in the meantime."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            opened = os.fstat(descriptor)
            try:
                if os.write(descriptor, record) != len(record):
                    raise OSError(errno.ENOSPC, "short write: the disk is full", str(self.path))
            except OSError:
                os.ftruncate(descriptor, opened.st_size)  # an incomplete record would hide the records after it
                raise
            self.size = opened.st_size + len(record)
            with suppress(FileNotFoundError):
                return os.path.samestat(opened, self.path.stat())
        finally:
            os.close(descriptor)
        return False

    def requests(self) -> Iterator[SpooledRequest]:
        """Yield the requests in the spool, oldest first."""
        if self.path.exists():
            yield from read_records(self.path)

    def clear(self) -> None:
        """Delete all requests after they have been sent."""
        self.path.unlink(missing_ok=True)
        self.size = 0


def read_records(path: Path) -> Iterator[SpooledRequest]:
    """Yield every intact request in the file `path`, oldest first; skip incomplete or damaged records."""
    data = path.read_bytes()
    at = 0
    while 0 <= at <= len(data) - _HEAD.size:
        magic, length, checksum = _HEAD.unpack_from(data, at)
        payload = data[at + _HEAD.size : at + _HEAD.size + length]
        if magic == _MAGIC and length <= _MAX_RECORD and len(payload) == length and zlib.crc32(payload) == checksum:
            at += _HEAD.size + length
            try:
                yield SpooledRequest.from_record(payload)
            except ValueError:
                continue
        else:
            at = data.find(_MAGIC, at + 1)


def spool_files(directory: Path) -> list[Path]:
    """Return the spool files in `directory`, oldest first."""
    paths = [path for path in directory.iterdir() if path.suffix in (SUFFIX, TAKEN)]
    return sorted(paths, key=lambda path: (path.stat().st_mtime, path.name))
