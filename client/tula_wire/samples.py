"""Samples of steps, as columns, and memory readings."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import Field, model_validator
from typing_extensions import Self

from tula_wire._base import Bytes, Count, Name, WireModel

MAX_STEPS = 10_000

TimingMethod = Literal["wall", "ddp_logger", "no_sync", "comm_hook", "cuda_events"]
MemoryMethod = Literal["cuda_allocator", "peak_rss", "estimate", "reported"]

Seconds = Annotated[float, Field(ge=0, le=1e6)]
StepTime = Annotated[float, Field(gt=0, le=1e6)]
Number = Annotated[int, Field(ge=0, le=2**53)]
Rank = Annotated[int, Field(ge=0, le=2**20)]

T = TypeVar("T")
Column = Annotated[list[T], Field(max_length=MAX_STEPS, fail_fast=True)]
"""One entry per step. Validation stops at the first error: reporting all would take hundreds of times the memory of the
body."""


class MemoryBreakdown(WireModel):
    """Memory of one rank by component (equation 3 of the paper); `method` says how it was read."""

    method: MemoryMethod
    peak_bytes: Bytes
    parameter_bytes: Bytes | None = None
    gradient_bytes: Bytes | None = None
    optimizer_bytes: Bytes | None = None
    activation_bytes: Bytes | None = None
    batch_bytes: Bytes | None = None
    reserved_bytes: Bytes | None = None
    context_bytes: Bytes | None = None
    capacity_bytes: Bytes | None = None


class SampleBatch(WireModel):
    """Samples of one rank; row i is the i-th entry of every column. Identity: (run, rank, boot id, sequence)."""

    rank: Rank
    boot_id: Name = Field(description="Random per process start, so that a restart never collides.")
    world_size: Count | None = Field(None, description="As the process saw it.")
    local_batch_size: Count | None = Field(None, description="As the process saw it, which may ignore the plan.")
    grad_accum_steps: Count | None = None
    timing_method: TimingMethod = "wall"
    memory: MemoryBreakdown | None = None
    warmup: bool = Field(False, description="True: discarded by the fit.")
    epochs_before: Annotated[float, Field(ge=0, le=1e6)] | None = Field(
        None, description="Epochs that the training had finished when this process started; null: unknown."
    )
    sequence: Annotated[Column[Number], Field(min_length=1)]
    step: Column[Number]
    step_time_s: Column[StepTime]
    compute_time_s: Column[Seconds | None] | None = None
    comm_time_s: Column[Seconds | None] | None = None
    exposed_comm_time_s: Column[Seconds | None] | None = None
    input_time_s: Column[Seconds | None] | None = None
    skew_s: Column[Seconds | None] | None = None
    straggler_rank: Column[Rank | None] | None = None

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        rows = len(self.sequence)
        for name, column in self:
            if isinstance(column, list) and len(column) != rows:
                raise ValueError(f"{name} has {len(column)} entries but sequence has {rows}: send equal lengths")
        return self


class SamplesAccepted(WireModel):
    """What was stored; a resend counts as duplicates."""

    stored: int
    duplicates: int
    stop: bool = Field(False, description="True: the run is known precisely enough, or was cancelled; end it.")
    reason: str | None = None


class StepSample(WireModel):
    """One step of one rank as it is stored; None where nothing was measured."""

    run_id: str
    rank: int
    boot_id: str
    sequence: int
    step: int
    warmup: bool
    step_time_s: float
    compute_time_s: float | None = None
    comm_time_s: float | None = None
    exposed_comm_time_s: float | None = None
    input_time_s: float | None = None
    skew_s: float | None = None
    straggler_rank: int | None = None


class SamplePage(WireModel):
    """Samples of a job, process after process; `next_cursor` is None on the last page."""

    samples: list[StepSample]
    next_cursor: str | None = None
