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

_PROBE: Final = 16
"""The first steps usually show that a chunk needs double precision, so that the others need not be converted."""

_DIGITS_OF_DOUBLE: Final = np.uint64(2**29 - 1)
_local = threading.local()  # zstandard's objects may not be shared between threads


def stride_of(steps: IntArray) -> int | None:
    """The distance between all neighbours of `steps`, 0 for a single one; None where they differ."""
    if steps.size < 2:
        return 0
    stride = int(steps[1]) - int(steps[0])
    return stride if bool((steps[1:] - steps[:-1] == stride).all()) else None


def pack(steps: IntArray, values: FloatArray, stride: int | None) -> bytes:
    """Compress `steps` of shape (n,), whose `stride_of` is given, and `values` of shape (columns, n); NaN stays NaN."""
    if stride is not None:
        flags, head = 0, struct.pack("<qq", int(steps[0]), stride)
    else:
        flags, head = _EXPLICIT_STEPS, steps.astype("<i8").tobytes()
    values = np.ascontiguousarray(values, dtype="<f8")
    single = None if _is_double(values[:, :_PROBE]) else _single(values)
    if single is not None:
        flags |= _SINGLE_PRECISION
        body = _shuffle(single)
    else:
        body = _shuffle(values)
    return bytes([flags]) + _compressor().compress(head + body)


def unpack(payload: bytes, num_steps: int, num_columns: int) -> tuple[IntArray, FloatArray]:
    """The inverse of `pack`: steps of shape (num_steps,), values of shape (num_columns, num_steps)."""
    flags = payload[0]
    raw = _decompressor().decompress(payload[1:])
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


def _is_double(values: FloatArray) -> bool:
    """True if some value has digits beyond single precision."""
    return bool((values.view("<u8") & _DIGITS_OF_DOUBLE).any())


def _single(values: FloatArray) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]] | None:
    """The values as float32, None if that is lossy."""
    with np.errstate(over="ignore"):  # a value beyond the range becomes infinite, and so unequal
        single = values.astype("<f4")
    return single if bool(((single == values) | (values != values)).all()) else None


def _shuffle(values: np.ndarray[tuple[int, ...], np.dtype[np.floating]]) -> bytes:
    """All first bytes, then all second bytes, ...: exponents become neighbours and compress well."""
    planes: bytes = np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.dtype.itemsize).T.tobytes()
    return planes


def _compressor() -> zstandard.ZstdCompressor:
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=_LEVEL)
    compressor: zstandard.ZstdCompressor = _local.compressor
    return compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    decompressor: zstandard.ZstdDecompressor = _local.decompressor
    return decompressor
