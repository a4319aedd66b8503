"""Requests kept on disk while the service is away: append-only, bounded, and readable up to any torn byte."""

from __future__ import annotations

import errno
import os
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from tula_agent.ship.envelope import Envelope

__all__ = ["REJECTED", "SUFFIX", "TAKEN", "Spool", "lock", "read_records", "spool_files"]

_HEAD = struct.Struct("<4sII")  # magic, length, CRC-32 of the payload
_MAGIC = b"TUL1"
_MAX_RECORD = 16 * 2**20
SUFFIX = ".spool"
REJECTED = ".rejected"
TAKEN = ".uploading"
LOCK_WITHIN_S = 0.5
"""How long a write waits for another one; `tula upload` locks for longer, but a file that it has moved away first."""


class Spool:
    """One file of this process. Created with the first record; gone once everything in it has been sent.

    A write is one `write` call, so that `kill -9` leaves a torn tail at most, which `read_records` leaves out.
    Raises OSError when the disk refuses; returns False from `append` when the bound is reached.
    """

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self.path = path
        self._limit = limit_bytes
        self._size = 0

    @property
    def empty(self) -> bool:
        """True when nothing waits."""
        return self._size == 0

    def append(self, envelope: Envelope) -> bool:
        """Add one request; False when there is no room."""
        payload = envelope.to_record()
        record = _HEAD.pack(_MAGIC, len(payload), zlib.crc32(payload)) + payload
        if len(payload) > _MAX_RECORD or self._size + len(record) > self._limit:
            return False
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = self._open()
        try:
            start = os.fstat(descriptor).st_size
            try:
                written = os.write(descriptor, record)
                if written != len(record):
                    raise OSError(28, "short write: the disk is full", str(self.path))
            except OSError:
                os.ftruncate(descriptor, start)  # a torn record in the middle would hide what follows it
                raise
        finally:
            os.close(descriptor)
        self._size = start + len(record)
        return True

    def _open(self) -> int:
        ends = time.monotonic() + LOCK_WITHIN_S
        while True:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                # `tula upload` moves a file away before it locks it, and may have done so since it was opened.
                if lock(descriptor, wait=False) and self.path.stat().st_ino == os.fstat(descriptor).st_ino:
                    return descriptor
            except FileNotFoundError:
                pass
            os.close(descriptor)
            if time.monotonic() > ends:
                raise OSError(errno.EAGAIN, "another process holds the spool's lock", str(self.path))
            time.sleep(0.001)

    def envelopes(self) -> Iterator[Envelope]:
        """What waits, oldest first."""
        if self.path.exists():
            yield from read_records(self.path)

    def clear(self) -> None:
        """Forget everything: it has been sent."""
        self.path.unlink(missing_ok=True)
        self._size = 0


def lock(descriptor: int, *, wait: bool) -> bool:
    """Have the file alone: once another has done with it, or, without waiting, False while another has it.

    Where the file system has no locks, go on without.
    """
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (OSError, ImportError):
        pass
    return True


def read_records(path: Path) -> Iterator[Envelope]:
    """Every whole record of `path`, oldest first; a torn or damaged one is skipped and reading goes on at the next."""
    data = path.read_bytes()
    at = 0
    while 0 <= at <= len(data) - _HEAD.size:
        magic, length, checksum = _HEAD.unpack_from(data, at)
        payload = data[at + _HEAD.size : at + _HEAD.size + length]
        if magic == _MAGIC and length <= _MAX_RECORD and len(payload) == length and zlib.crc32(payload) == checksum:
            at += _HEAD.size + length
            try:
                yield Envelope.from_record(payload)
            except ValueError:
                continue
        else:
            at = data.find(_MAGIC, at + 1)


def spool_files(directory: Path, rejected: bool = False) -> list[Path]:
    """Spool files in `directory`, oldest first; with `rejected`, what the service once refused too."""
    endings = (SUFFIX, TAKEN, REJECTED) if rejected else (SUFFIX, TAKEN)
    found = [path for path in directory.iterdir() if path.suffix in endings]
    return sorted(found, key=lambda path: (path.stat().st_mtime, path.name))
