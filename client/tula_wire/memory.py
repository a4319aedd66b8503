"""Computes the peak memory of one rank (equation 3), M(b) = M_static + A b at local batch b, for agent and service.

M_static is the sum of parameters, gradients, optimizer state and all other memory of the process on the device. A, the
bytes per additional example (activations and batch), is measured. All amounts are in bytes. The module is pure
arithmetic without numpy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

ALLOCATOR_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables that configure PyTorch's caching allocator, which reads the first variable that is set.

The second variable is for ROCm; the third is supported by torch 2.9 and later.
"""
GROWING_SEGMENTS: Final = "expandable_segments:True"
"""The setting that makes the allocator's segments expandable, which avoids fragmentation."""
ALLOCATOR_SLACK: Final = 0.02
"""The share of the capacity that is kept free because the allocator rounds sizes up."""


_CONTEXT_BYTES, _LARGEST_CONTEXT_SHARE = 0.75e9, 0.1
"""The assumed memory of a process's context, kernels and libraries on a device, and its maximum share of the capacity.

The assumption is used if the memory was not read. On accelerators, 0.5 to 1.25 GB are typical.
"""


RESERVED_RATIO: Final = 1.05
"""The assumed ratio of memory that the caching allocator reserves on a full device to allocated memory.

It is used if no replay has computed the ratio. It is the median of 13 measurements on an H100, which range from 0.98 to
1.28.
"""
SURE: Final = 0.85
"""The share of the available memory within which a batch is promised to fit without a run.

The estimate excludes the work space of kernels. In 13 measurements on an H100, the predicted largest batch was up to
3 % too high with expandable segments, and up to 17 % too high without them, when predicted by the replay.
"""


def assumed_context_bytes(capacity_bytes: float) -> float:
    """Return the bytes that a process is assumed to use outside the allocator on a device of this capacity."""
    return min(_CONTEXT_BYTES, _LARGEST_CONTEXT_SHARE * capacity_bytes)


def usable_bytes(capacity_bytes: float) -> float:
    """Return the capacity minus the share that is kept free for the allocator."""
    return capacity_bytes * (1.0 - ALLOCATOR_SLACK)


def room_bytes(capacity_bytes: float, context_bytes: float | None = None) -> float:
    """Return the bytes that remain for the allocator; `context_bytes` defaults to `assumed_context_bytes`."""
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
    """Return M_static, the bytes that do not depend on the batch size; an argument of None counts as 0.

    `context_bytes` is the memory that the process uses on the device outside the allocator. `fixed_bytes` is all other
    memory whose size does not depend on the batch, such as DDP's buckets.
    """
    counted = (parameter_bytes, gradient_bytes, optimizer_bytes, context_bytes)
    return sum(part or 0.0 for part in counted) + fixed_bytes


def bytes_per_sample(growing_bytes: Mapping[int, float]) -> float | None:
    """Return A, the bytes per example. `growing_bytes` contains measured peaks minus M_static, by local batch size.

    Returns None if there is no measurement or if memory does not grow with the batch.

    At every moment of a step, memory grows linearly with the batch, but the slope differs between moments. The peak,
    which is the maximum over all moments, is therefore a convex function of the batch, and only the slope at the
    largest batches shows how it continues. The slope is taken between the largest batch and the next batch of at most
    half its size, or the smallest batch if there is none. With a single batch, the whole peak is assumed to grow with
    the batch, which overestimates A by the part that is actually fixed (work space of kernels).
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
    """Return the largest batch for which M(b) times `reserved_ratio` fits in the usable capacity.

    The result is at least the largest batch that ran, or None if `bytes_per_sample` returns None. `static` is M_static
    with the context. `growing_bytes` contains measured peaks minus `static`, by local batch size. `reserved_ratio` is
    the ratio of memory that the allocator reserves on a full device to allocated memory.
    """
    slope = bytes_per_sample(growing_bytes)
    if slope is None:
        return None
    measured = max(growing_bytes)
    room = usable_bytes(capacity_bytes) / reserved_ratio - static - growing_bytes[measured]
    return max(measured, measured + math.floor(room / slope))
