"""The payload of a telemetry chunk: float columns, their bytes shuffled by significance, compressed.

Layout, little-endian: `steps` as one flag byte, then either first step and stride (int64 each, flag 0) or all steps
(flag 1), then the columns in order; float64, or float32 if that is lossless (the flag's second bit).
"""

from __future__ import annotations

import struct
import threading
from typing import Final

import numpy as np
import zstandard

from tula_service.store.records import FloatArray, IntArray

_EXPLICIT_STEPS: Final = 1
_SINGLE_PRECISION: Final = 2
_LEVEL: Final = -1
"""On noisy columns the result is 3 % larger than at level 1, in a quarter of the time."""


class _PerThread(threading.local):
    """zstandard's objects may not be shared between threads."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _PerThread()


def pack(steps: IntArray, values: FloatArray) -> bytes:
    """Compress `steps` of shape (n,) and `values` of shape (columns, n); NaN stays NaN."""
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
