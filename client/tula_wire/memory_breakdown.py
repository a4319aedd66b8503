"""Defines the model of the memory that a rank reports; the formula is in `memory.py`, which does not need Pydantic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from tula_wire._base import Bytes

MemoryMethod = Literal["cuda_allocator", "peak_rss", "estimate", "reported"]


@dataclass(frozen=True)
class MemoryBreakdown:
    """The memory of one rank by component (equation 3 of the paper).

    A component is None if it was not read. As with `Configuration`, the constructor validates nothing.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", revalidate_instances="always")

    method: Annotated[MemoryMethod, Field(description="How the memory was read.")]
    peak_bytes: Annotated[Bytes, Field(description="Largest number of bytes in use at one time.")]
    parameter_bytes: Annotated[Bytes | None, Field(description="Bytes of parameters.")] = None
    gradient_bytes: Annotated[Bytes | None, Field(description="Bytes of gradients.")] = None
    optimizer_bytes: Annotated[Bytes | None, Field(description="Bytes of optimizer state.")] = None
    activation_bytes: Annotated[Bytes | None, Field(description="Bytes of activations.")] = None
    batch_bytes: Annotated[Bytes | None, Field(description="Bytes of the input batch.")] = None
    reserved_bytes: Annotated[Bytes | None, Field(description="Bytes that the allocator reserved.")] = None
    context_bytes: Annotated[Bytes | None, Field(description="Bytes of the process's context on the device.")] = None
    capacity_bytes: Annotated[Bytes | None, Field(description="Total memory of the device in bytes.")] = None
    growing_segments: Annotated[
        bool | None, Field(description="Whether the allocator's segments are expandable (`expandable_segments:True`).")
    ] = None
    alloc_retries: Annotated[
        int | None, Field(ge=0, le=2**53, description="Number of allocations that had to free cached memory first.")
    ] = None
