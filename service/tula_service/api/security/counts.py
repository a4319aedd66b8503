"""Counts of a minute in memory that all workers of a replica share, as a storage of the library `limits`."""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from limits.storage import Storage

__all__ = ["SharedCounts"]

_SLOT: Final = struct.Struct("<16sdQ")  # the key's digest, when its window ends, and the count
_SLOTS: Final = 16_384
_PROBES: Final = 8
_NOBODY: Final = bytes(16)


class SharedCounts(Storage):
    """A table of fixed size in a file that every worker maps, or in memory alone for one worker.

    Bounded: where eight keys meet in one place, the one whose window ends first makes room. The library's own storage
    in memory belongs to one process, and starts a thread for every count; its other storages are servers to run.
    """

    STORAGE_SCHEME = None

    def __init__(self, path: Path | None = None) -> None:
        super().__init__()
        size = _SLOTS * _SLOT.size
        self._thread_lock = threading.Lock()
        self._file = None
        if path is not None:
            self._file = path.open("a+b")  # everyone's to open, nobody's to empty
            self._file.truncate(size)
        self._table = mmap.mmap(-1 if self._file is None else self._file.fileno(), size)

    @property
    def base_exceptions(self) -> type[Exception]:
        """What may go wrong here."""
        return OSError

    def incr(self, key: str, expiry: float, amount: int = 1) -> int:
        """Count; a key that is new, or whose window has ended, starts a window of `expiry` seconds."""
        return self.count(key, expiry, amount)[0]

    def count(self, key: str, expiry: float, amount: int = 1) -> tuple[int, float]:
        """The same; the count, and when its window ends, which `take_back` asks for."""
        now = time.time()
        with self._held():
            at, digest, ends, count = self._find(key, now)
            count, ends = (count + amount, ends) if ends > now else (amount, now + expiry)
            _SLOT.pack_into(self._table, at, digest, ends, count)
        return count, ends

    def take_back(self, key: str, window_ends: float) -> None:
        """Count one less, where the window in which it was counted is still open."""
        with self._held():
            at, digest, ends, count = self._find(key, time.time())
            if count and ends == window_ends:
                _SLOT.pack_into(self._table, at, digest, ends, count - 1)

    def get(self, key: str) -> int:
        """The count in the present window."""
        with self._held():
            return self._find(key, time.time())[3]

    def get_expiry(self, key: str) -> float:
        """When the present window ends; now, where there is none."""
        now = time.time()
        with self._held():
            return max(self._find(key, now)[2], now)

    def check(self) -> bool:
        """Memory answers always."""
        return True

    def reset(self) -> int | None:
        """Forget every count."""
        with self._held():
            self._table[:] = bytes(len(self._table))
        return None

    def clear(self, key: str) -> None:
        """Forget one count."""
        with self._held():
            at, *_ = self._find(key, time.time())
            _SLOT.pack_into(self._table, at, _NOBODY, 0.0, 0)

    def close(self) -> None:
        """Let go of the file; what it counts stays for the other workers."""
        self._table.close()
        if self._file is not None:
            self._file.close()

    @contextmanager
    def _held(self) -> Iterator[None]:
        with self._thread_lock:
            if self._file is None:
                yield
                return
            fcntl.flock(self._file, fcntl.LOCK_EX)  # a killed worker gives it back
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _find(self, key: str, now: float) -> tuple[int, bytes, float, int]:
        """Place, digest, end of the window and count of a key; its count is 0 where no window is open."""
        digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
        first = int.from_bytes(digest[:4], "little")
        oldest, oldest_ends = 0, float("inf")
        for probe in range(_PROBES):
            at = (first + probe) % _SLOTS * _SLOT.size
            owner, ends, count = _SLOT.unpack_from(self._table, at)
            if owner == digest:
                return (at, digest, ends, count) if ends > now else (at, digest, 0.0, 0)
            if ends < oldest_ends:
                oldest, oldest_ends = at, ends
        return oldest, digest, 0.0, 0
