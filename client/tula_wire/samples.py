"""Defines models of measurements: all-reduces, columns of step samples, and series by step (telemetry)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, model_validator

from tula_wire._base import Bytes, Count, Name, Seconds, Timestamp, WireModel, Word, optional
from tula_wire.bounds import MAX_BYTES_PER_S
from tula_wire.configurations import DEFAULT_INSTANCE_TYPE
from tula_wire.host_facts import HostFacts
from tula_wire.jobs import Estimate, Gbps
from tula_wire.memory_breakdown import MemoryBreakdown

Backend = Literal["gloo", "nccl"]


class AllReduceReading(WireModel):
    """The duration of an all-reduce of one size, measured repeatedly."""

    size_bytes: Annotated[int, Field(ge=1, le=2**40)] = Field(description="Bytes that each rank contributes.")
    time_s: Seconds = Field(description="Median time of one all-reduce in seconds.")
    relative_sd: Annotated[float, Field(ge=0, le=100)] = Field(
        0.0,
        description="Standard deviation of the time divided by the median, estimated from the median absolute "
        "deviation.",
    )
    repeats: Count = Field(1, description="Number of repetitions.")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.size_bytes > self.time_s * MAX_BYTES_PER_S:
            raise ValueError(f"time_s is shorter than any link needs for {self.size_bytes} bytes: give it in seconds")
        return self


Readings = Annotated[list[AllReduceReading], Field(min_length=3, max_length=64)]


class AllReduces(WireModel):
    """The durations of all-reduces, which several ranks measured together."""

    backend: Backend = Field(description="The torch.distributed backend that performed the all-reduces.")
    num_nodes: Count = Field(description="Number of nodes that took part.")
    ranks_per_node: Count = Field(description="Number of ranks on each node.")
    launch_time_s: Seconds | None = optional("Seconds needed to launch one kernel, averaged over ranks.")
    all_ranks: Readings = Field(description="All-reduces over all ranks, by size.")
    in_node: Readings | None = optional(
        "All-reduces over the ranks of one node; null with only one node or one rank per node."
    )

    @model_validator(mode="after")
    def _several(self) -> Self:
        if self.num_nodes * self.ranks_per_node < 2:
            raise ValueError("a probe with one rank cannot measure an all-reduce: use at least two ranks")
        if self.in_node is not None and 1 in (self.num_nodes, self.ranks_per_node):
            raise ValueError("in_node requires several nodes with several ranks each: omit it")
        return self


class FabricProbe(AllReduces):
    """The measurements of one probe on nodes of one instance type.

    A job uses the newest probe for each number of nodes and ranks whose `instance_type`, `accelerator` and
    `network_gbps` equal those of the job's cluster. If no accelerator is named, nodes of the type `default` count as
    equal only if they have the same number of ranks.
    """

    instance_type: Word = Field(DEFAULT_INSTANCE_TYPE, description="The instance type, as in a job's cluster.")
    accelerator: Name | None = optional("The accelerator, as in a job's cluster.")
    network_gbps: Gbps | None = optional("Gigabits per second between nodes, as in a job's cluster.")


class AllReduceCost(WireModel):
    """The line `latency_s + seconds_per_byte * size`, which predicts how many seconds an all-reduce takes."""

    latency_s: Estimate = Field(
        description="Seconds that an all-reduce takes regardless of its size, with a 90 % interval."
    )
    seconds_per_byte: Estimate = Field(description="Seconds for each additional byte per rank, with a 90 % interval.")


class Fabric(WireModel):
    """A stored probe and the line that was fitted to its measurements."""

    probe: FabricProbe = Field(description="The measurements of the probe.")
    all_ranks: AllReduceCost = Field(description="Cost of an all-reduce over all ranks.")
    in_node: AllReduceCost | None = optional("Cost of an all-reduce within one node, if it was measured separately.")
    created_at: Timestamp = Field(description="When the probe was stored (RFC 3339, with time zone).")
    job_id: str | None = optional(
        "The job that ran the probe, or null if a user sent the probe. Any other job uses the probe only if a probe "
        "from a third job agrees with it."
    )


class FabricList(WireModel):
    """The probed fabrics of a project, newest first."""

    fabrics: list[Fabric] = Field(description="The fabrics, newest first.")


LEASE_HEADER = "Tula-Lease"
"""The header in which agents send the number of their lease."""
MAX_BODY_BYTES = 2**20
"""The maximum size in bytes of a body with samples or telemetry; agents respect it, and the service enforces it."""
MAX_STEPS = 10_000
MAX_BUCKETS = 4096

TimingMethod = Literal["wall", "ddp_logger", "cuda_events"]

Elapsed = Annotated[float, Field(ge=0, le=1e6)]
StepTime = Annotated[float, Field(gt=0, le=1e6)]
Number = Annotated[int, Field(ge=0, le=2**53)]
Rank = Annotated[int, Field(ge=0, le=2**20)]

T = TypeVar("T")
Column = Annotated[list[T], Field(max_length=MAX_STEPS, fail_fast=True)]
"""A column with one entry per step.

Validation stops at the first error, since a report of all errors would need hundreds of times the memory of the body.
"""
Times = Column[Elapsed | None] | None
_BUCKETS = Field(min_length=1, max_length=MAX_BUCKETS, fail_fast=True)


def _check_lengths(of: str, length: int, columns: Iterable[tuple[str, object]]) -> None:
    for name, column in columns:
        if isinstance(column, list) and len(column) != length:
            raise ValueError(f"{name} has {len(column)} entries but {of} has {length}: send columns of equal length")


class BucketTimeline(WireModel):
    """The times at which the gradients in each DistributedDataParallel bucket were complete on one rank."""

    bucket_bytes: Annotated[list[Bytes], _BUCKETS] = Field(
        description="Bytes of each bucket, in the order of reduction."
    )
    ready_s: Annotated[list[Elapsed], _BUCKETS] = Field(
        description="Seconds from the start of the micro-step until all gradients of the bucket were complete."
    )

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        _check_lengths("bucket_bytes", len(self.bucket_bytes), [("ready_s", self.ready_s)])
        return self


class SampleBatch(WireModel):
    """Samples of one rank; row i consists of the i-th entry of every column.

    A row is identified by run, rank, boot id and sequence.
    """

    rank: Rank = Field(description="Global rank of the process.")
    boot_id: Name = Field(description="Random id of the process, which is different after a restart.")
    world_size: Count | None = optional("World size that the process observed.")
    local_batch_size: Count | None = optional("Local batch that the process observed; it may differ from the plan.")
    grad_accum_steps: Count | None = optional("Micro-steps per optimizer step that the process observed.")
    timing_method: TimingMethod = Field("wall", description="How step times were split into parts.")
    memory: MemoryBreakdown | None = optional("Memory of this rank.")
    energy_per_step_j: Annotated[float, Field(gt=0, le=1e12)] | None = optional(
        "Joules that the rank's device used per step, averaged over the steps measured to date."
    )
    machine: HostFacts | None = optional("Facts about the rank's script and host, for the verdict and the run.")
    timeline: BucketTimeline | None = optional("When the rank's gradients were ready to be reduced.")
    all_reduces: AllReduces | None = optional(
        "Measurements of a probe during the run; the service stores them as a fabric of the run's cluster."
    )
    warmup: bool = Field(False, description="Whether the fit discards these samples.")
    epochs_before: Annotated[float, Field(ge=0, le=1e6)] | None = optional("Epochs trained before the process started.")
    sequence: Annotated[Column[Number], Field(min_length=1)] = Field(
        description="Increasing number of each sample of this process, by which the service recognizes duplicates."
    )
    step: Column[Number] = Field(description="Optimizer step of each sample.")
    step_time_s: Column[StepTime] = Field(description="Wall-clock seconds of each step.")
    compute_time_s: Times = optional("Seconds of the forward pass, the backward pass and the optimizer.")
    comm_time_s: Times = optional("Seconds of collectives.")
    exposed_comm_time_s: Times = optional("Seconds of communication not hidden behind compute.")
    input_time_s: Times = optional("Seconds spent waiting for data.")
    optimizer_time_s: Times = optional(
        "Seconds of the optimizer step, which runs once per row regardless of the number of micro-steps."
    )
    skew_s: Times = optional("Seconds spent waiting for the slowest rank.")
    straggler_rank: Column[Rank | None] | None = optional("The slowest rank, if one stands out.")

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        _check_lengths("sequence", len(self.sequence), self)
        return self


class SamplesAccepted(WireModel):
    """The response to samples, which says how many were stored and whether the run should stop."""

    stored: int = Field(description="Number of samples that this request added.")
    duplicates: int = Field(description="Number of samples that had already been stored.")
    stop: bool = Field(
        False,
        description="Whether to end the run, because it is over, has enough steps, or has a precise enough step time.",
    )
    run_ended: bool = Field(False, description="Whether the run was cancelled or has ended in another way.")
    reason: str | None = optional("Why the run should stop, in one sentence.")


class StepSample(WireModel):
    """A stored step of one rank; a time that was not measured is None."""

    run_id: str = Field(description="Id of the run.")
    rank: int = Field(description="Global rank of the process.")
    boot_id: str = Field(description="Boot id of the process that measured the step.")
    sequence: int = Field(description="Number of the sample within that process.")
    step: int = Field(description="Optimizer step.")
    warmup: bool = Field(description="Whether the fit discards the step.")
    step_time_s: float = Field(description="Wall-clock seconds of the step.")
    compute_time_s: float | None = optional("Seconds of the forward pass, the backward pass and the optimizer.")
    comm_time_s: float | None = optional("Seconds of collectives.")
    exposed_comm_time_s: float | None = optional("Seconds of communication not hidden behind compute.")
    input_time_s: float | None = optional("Seconds spent waiting for data.")
    optimizer_time_s: float | None = optional("Seconds of the optimizer.")
    skew_s: float | None = optional("Seconds spent waiting for the slowest rank.")
    straggler_rank: int | None = optional("The slowest rank, if one stands out.")


class SamplePage(WireModel):
    """One page of a job's samples, ordered by process; `next_cursor` is None on the last page."""

    samples: list[StepSample] = Field(description="The samples, ordered by process, then by sequence.")
    next_cursor: str | None = optional("The `cursor` of the next page; null on the last page.")


COLUMN_NAME = r"[a-z][a-z0-9_]{0,63}"
"""Matches valid names of columns; the service omits a column with any other name, and lists it in the response."""

COLUMNS = (
    "step_time_s", "grad_norm", "gradient_variability", "scale", "scaled_share", "gradient_noise_scale", "loss",
    "accuracy", "validation_accuracy", "lr", "memory_bytes", "skew_s", "tokens_per_example", "small_batch_size",
    "directions",
)  # fmt: skip
"""The columns that the service interprets; it also stores and charts all other columns."""


class ChunkIdentity(WireModel):
    """The fields that identify a chunk; a second chunk with the same identity is a duplicate."""

    rank: Rank = Field(0, description="Global rank of the process.")
    boot_id: Name = Field(description="Random id of the process, which is different after a restart.")
    sequence: Number = Field(
        description="Number of the chunk within this process, by which the service recognizes duplicates."
    )


class TelemetryChunk(ChunkIdentity):
    """A chunk of telemetry from one rank, with steps and named columns of floats; a missing value is null."""

    steps: Annotated[Column[Number], Field(min_length=1)] = Field(description="Optimizer step of each row.")
    columns: Annotated[dict[str, Column[float | None]], Field(min_length=1)] = Field(
        description="Values of each metric, one per step, by the metric's name, which includes the unit."
    )

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        _check_lengths("steps", len(self.steps), ((f"columns.{name}", column) for name, column in self.columns.items()))
        return self


class TelemetryAccepted(WireModel):
    """The response to a telemetry chunk, which says how many values were stored.

    A value is the number in one column at one step; for a duplicate, `stored` is 0.
    """

    stored: int = Field(description="Number of values that were stored.")
    duplicate: bool = Field(False, description="Whether the chunk had already been stored.")
    refused: list[str] = Field(
        [], description="Columns omitted because their names are invalid or the run already has a thousand columns."
    )


class TelemetrySeries(WireModel):
    """One telemetry column of a rank, downsampled if it has more points than requested."""

    run_id: str = Field(description="Id of the run.")
    column: str = Field(description="Name of the metric.")
    rank: int = Field(description="Global rank of the process.")
    steps: list[int] = Field(description="Optimizer step of each point.")
    values: list[float | None] = Field(description="Value of each point, in the unit that the column's name states.")
    total_points: int = Field(description="Number of points before downsampling.")
    downsampled: bool = Field(description="Whether points were omitted.")
    available: list[str] = Field([], description="Names of all metrics of the run.")
