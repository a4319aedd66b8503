"""Peak memory of one rank (equation 3), M(b) = M_static + A b at local batch b, for the agent and the service.

M_static is counted: parameters, gradients, optimizer state and all other memory of the process on the device. A, the
bytes of one more example (activations and batch), is measured. All amounts are in bytes. This module is pure arithmetic
without numpy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

ALLOCATOR_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables that configure PyTorch's caching allocator, which reads the first that is set; the second is for ROCm,
and the third is supported from torch 2.9 on.
"""
GROWING_SEGMENTS: Final = "expandable_segments:True"
"""The setting that lets the allocator's segments grow, so that they do not fragment."""
ALLOCATOR_SLACK: Final = 0.02
"""Share of the capacity that stays free for the allocator's rounding."""


_CONTEXT_BYTES, _LARGEST_CONTEXT_SHARE = 0.75e9, 0.1
"""Assumed size of a process's context, kernels and libraries on a device without a reading: 0.5 to 1.25 GB on
accelerators, and never a large share of the capacity.
"""


RESERVED_RATIO: Final = 1.05
"""The ratio of memory that the caching allocator takes from a full device to allocated memory, without a replay:
the median of 13 rows on an H100, which range from 0.98 to 1.28.
"""
SURE: Final = 0.85
"""Share of the available memory within which a batch is promised without a run.

Work space of kernels is not counted: on 13 rows of an H100, the predicted largest batch was up to 3 % too high with
growing segments, and up to 17 % by the replay without.
"""


def assumed_context_bytes(capacity_bytes: float) -> float:
    """Return the bytes that a process is assumed to use on a device outside the allocator, without a reading."""
    return min(_CONTEXT_BYTES, _LARGEST_CONTEXT_SHARE * capacity_bytes)


def usable_bytes(capacity_bytes: float) -> float:
    """Return the capacity without the share that the allocator needs."""
    return capacity_bytes * (1.0 - ALLOCATOR_SLACK)


def room_bytes(capacity_bytes: float, context_bytes: float | None = None) -> float:
    """Return the bytes that the context leaves for the allocator; without a reading, its size is assumed."""
    context = assumed_context_bytes(capacity_bytes) if context_bytes is None else context_bytes
    return usable_bytes(capacity_bytes) - context


def static_bytes(
    parameter_bytes: float | None,
    gradient_bytes: float | None,
    optimizer_bytes: float | None,
    *,
    context_bytes: float | None = None,
    fixed_bytes: float = 0.0,
) -> float:
    """Return M_static, the bytes that do not grow with the batch; None counts as 0.

    `context_bytes` is the memory of the process on the device outside the allocator, and `fixed_bytes` is all other
    memory that is allocated at every batch size (DDP's buckets).
    """
    counted = (parameter_bytes, gradient_bytes, optimizer_bytes, context_bytes)
    return sum(part or 0.0 for part in counted) + fixed_bytes


def bytes_per_sample(growing_bytes: Mapping[int, float]) -> float | None:
    """Return A, from peaks minus M_static by local batch size, or None without a reading or if nothing grows.

    A peak is the maximum over several moments, at each of which memory grows along a different line. So it bends
    upwards, and only the line through the largest batches shows how it continues: the line through the largest batch
    and the next one of at most half its size (else the smallest). If there is a single batch, its whole peak is assumed
    to grow; the answer then errs on the safe side by the part that is actually fixed (work space of kernels).
    """
    if not growing_bytes:
        return None
    largest = max(growing_bytes)
    lower = max((batch for batch in growing_bytes if 2 * batch <= largest), default=min(growing_bytes))
    if lower < largest:
        slope = (growing_bytes[largest] - growing_bytes[lower]) / (largest - lower)
    else:
        slope = growing_bytes[largest] / largest
    return slope if slope > 0.0 else None


def largest_local_batch_size(
    capacity_bytes: float, static: float, growing_bytes: Mapping[int, float], reserved_ratio: float = 1.0
) -> int | None:
    """Return the largest batch with M(b) times `reserved_ratio` in the usable capacity; at least the largest that ran.

    `static` is M_static with the context; `growing_bytes` are measured peaks without it, by local batch size;
    `reserved_ratio` is the ratio of memory that an allocator takes from a full device to allocated memory. Returns None
    if `bytes_per_sample` is None.
    """
    slope = bytes_per_sample(growing_bytes)
    if slope is None:
        return None
    measured = max(growing_bytes)
    room = usable_bytes(capacity_bytes) / reserved_ratio - static - growing_bytes[measured]
    return max(measured, measured + math.floor(room / slope))
