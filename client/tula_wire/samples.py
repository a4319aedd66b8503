"""Models of measurements by runs and probes: all-reduces, columns of step samples, and series by step (telemetry)."""

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
    """Repeated all-reduces of one size."""

    size_bytes: Annotated[int, Field(ge=1, le=2**40)] = Field(description="Bytes that each rank holds.")
    time_s: Seconds = Field(description="Seconds of one all-reduce, the median.")
    relative_sd: Annotated[float, Field(ge=0, le=100)] = Field(
        0.0, description="Standard deviation of the repeats, from their median deviation, as a share of the median."
    )
    repeats: Count = Field(1, description="How often it was measured.")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.size_bytes > self.time_s * MAX_BYTES_PER_S:
            raise ValueError(f"time_s is less than {self.size_bytes} bytes take on any link: give seconds")
        return self


Readings = Annotated[list[AllReduceReading], Field(min_length=3, max_length=64)]


class AllReduces(WireModel):
    """All-reduces that ranks measured together."""

    backend: Backend = Field(description="The backend that reduced the bytes.")
    num_nodes: Count = Field(description="Nodes that took part.")
    ranks_per_node: Count = Field(description="Ranks of each node.")
    launch_time_s: Seconds | None = optional("Seconds that one kernel takes to launch, the mean over ranks.")
    all_ranks: Readings = Field(description="All-reduces over all ranks, by size.")
    in_node: Readings | None = optional(
        "All-reduces over the ranks of one node; null with one node, or one rank per node."
    )

    @model_validator(mode="after")
    def _several(self) -> Self:
        if self.num_nodes * self.ranks_per_node < 2:
            raise ValueError("one rank reduces nothing: two ranks or more make a probe")
        if self.in_node is not None and 1 in (self.num_nodes, self.ranks_per_node):
            raise ValueError("in_node needs several nodes of several ranks: leave it out")
        return self


class FabricProbe(AllReduces):
    """The measurements of one probe on nodes of an instance type; the newest for each number of nodes and ranks is
    used.

    A job uses the probe if `instance_type`, `accelerator` and `network_gbps` are equal to those of its cluster; without
    an accelerator, `default` nodes are considered equal only if they have as many ranks.
    """

    instance_type: Word = Field(DEFAULT_INSTANCE_TYPE, description="As in the job's cluster.")
    accelerator: Name | None = optional("As in the job's cluster.")
    network_gbps: Gbps | None = optional("Gigabits per second, as in the job's cluster.")


class AllReduceCost(WireModel):
    """Seconds of an all-reduce of any size: `latency_s + seconds_per_byte * size`, with 90 % intervals."""

    latency_s: Estimate = Field(description="Seconds that any size takes.")
    seconds_per_byte: Estimate = Field(description="Seconds for each further byte of a rank.")


class Fabric(WireModel):
    """A stored probe and the line through its readings."""

    probe: FabricProbe = Field(description="What was measured.")
    all_ranks: AllReduceCost = Field(description="Over all ranks.")
    in_node: AllReduceCost | None = optional("Over the ranks of one node, if measured separately.")
    created_at: Timestamp = Field(description="When it was stored (RFC 3339, with time zone).")
    job_id: str | None = optional(
        "The job whose run measured it: it counts for other jobs once a probe of theirs agrees; null: a user's probe."
    )


class FabricList(WireModel):
    """The fabrics of a project, newest first."""

    fabrics: list[Fabric] = Field(description="Fabrics, newest first.")


LEASE_HEADER = "Tula-Lease"
"""Header in which agents send the number of their lease."""
MAX_BODY_BYTES = 2**20
"""Largest body of samples or telemetry in bytes; agents do not send a larger one, and the service refuses it."""
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

Validation stops at the first error, since reporting all of them would take hundreds of times the memory of the body.
"""
Times = Column[Elapsed | None] | None
_BUCKETS = Field(min_length=1, max_length=MAX_BUCKETS, fail_fast=True)


def _check_lengths(of: str, length: int, columns: Iterable[tuple[str, object]]) -> None:
    for name, column in columns:
        if isinstance(column, list) and len(column) != length:
            raise ValueError(f"{name} has {len(column)} entries but {of} has {length}: send equal lengths")


class BucketTimeline(WireModel):
    """The times on one rank at which the gradients in each bucket of DistributedDataParallel were complete."""

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
    """Samples of one rank; row i is the i-th entry of every column, identified by (run, rank, boot id, sequence)."""

    rank: Rank = Field(description="Global rank of the process.")
    boot_id: Name = Field(description="Random per process start, so that a restart never collides.")
    world_size: Count | None = optional("As the process saw it.")
    local_batch_size: Count | None = optional("As the process saw it, which may ignore the plan.")
    grad_accum_steps: Count | None = optional("Micro-steps per optimizer step, as the process saw them.")
    timing_method: TimingMethod = Field("wall", description="How step times were split.")
    memory: MemoryBreakdown | None = optional("Memory of this rank.")
    energy_per_step_j: Annotated[float, Field(gt=0, le=1e12)] | None = optional(
        "Joules that its device used per step, the mean over its measured steps so far."
    )
    machine: HostFacts | None = optional(
        "What the rank knows about its script and its host, for the verdict and the run."
    )
    timeline: BucketTimeline | None = optional("When its gradients were ready to be reduced.")
    all_reduces: AllReduces | None = optional(
        "Measurements of a probe within the run; stored as a fabric of its cluster."
    )
    warmup: bool = Field(False, description="True: discarded by the fit.")
    epochs_before: Annotated[float, Field(ge=0, le=1e6)] | None = optional("Epochs trained before the process started.")
    sequence: Annotated[Column[Number], Field(min_length=1)] = Field(
        description="Number of each sample of this process, increasing; identifies it when resent."
    )
    step: Column[Number] = Field(description="Optimizer step of each sample.")
    step_time_s: Column[StepTime] = Field(description="Wall-clock seconds of each step.")
    compute_time_s: Times = optional("Seconds of forward, backward and optimizer.")
    comm_time_s: Times = optional("Seconds of collectives.")
    exposed_comm_time_s: Times = optional("Seconds of communication not hidden behind compute.")
    input_time_s: Times = optional("Seconds of waiting for data.")
    optimizer_time_s: Times = optional(
        "Seconds of the optimizer, which steps once, however many micro-steps there are."
    )
    skew_s: Times = optional("Seconds of waiting for the slowest rank.")
    straggler_rank: Column[Rank | None] | None = optional("The slowest rank, if one stands out.")

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        _check_lengths("sequence", len(self.sequence), self)
        return self


class SamplesAccepted(WireModel):
    """The numbers of stored rows and of duplicates from repeated requests."""

    stored: int = Field(description="Number of samples stored.")
    duplicates: int = Field(description="Number of samples that were stored before.")
    stop: bool = Field(
        False,
        description="True: end the run, since it is over, or has measured as long or as precisely as asked.",
    )
    run_ended: bool = Field(False, description="True: the run was cancelled or has ended in another way.")
    reason: str | None = optional("Why to stop, in one sentence.")


class StepSample(WireModel):
    """A stored step of one rank; fields without a measurement are None."""

    run_id: str = Field(description="The run.")
    rank: int = Field(description="Global rank of the process.")
    boot_id: str = Field(description="The process that measured it.")
    sequence: int = Field(description="Number of the sample within that process.")
    step: int = Field(description="Optimizer step.")
    warmup: bool = Field(description="True: discarded by the fit.")
    step_time_s: float = Field(description="Wall-clock seconds of the step.")
    compute_time_s: float | None = optional("Seconds of forward, backward and optimizer.")
    comm_time_s: float | None = optional("Seconds of collectives.")
    exposed_comm_time_s: float | None = optional("Seconds of communication not hidden behind compute.")
    input_time_s: float | None = optional("Seconds of waiting for data.")
    optimizer_time_s: float | None = optional("Seconds of the optimizer.")
    skew_s: float | None = optional("Seconds of waiting for the slowest rank.")
    straggler_rank: int | None = optional("The slowest rank, if one stands out.")


class SamplePage(WireModel):
    """Samples of a job, process after process; `next_cursor` is None on the last page."""

    samples: list[StepSample] = Field(description="The samples, ordered by process, then by sequence.")
    next_cursor: str | None = optional("Send it as `cursor` to get the next page; null on the last.")


COLUMN_NAME = r"[a-z][a-z0-9_]{0,63}"
"""The name of a column; a column with any other name is left out of its chunk, and named in the answer."""

COLUMNS = (
    "step_time_s", "grad_norm", "gradient_variability", "scale", "scaled_share", "gradient_noise_scale", "loss",
    "accuracy", "validation_accuracy", "lr", "memory_bytes", "skew_s", "tokens_per_example", "small_batch_size",
    "directions",
)  # fmt: skip
"""Columns that the service interprets; it stores and charts any other column too."""


class ChunkIdentity(WireModel):
    """The identity of a process's chunk; a chunk whose identity is stored already counts as a resend."""

    rank: Rank = Field(0, description="Global rank of the process.")
    boot_id: Name = Field(description="Random per process start, so that a restart never collides.")
    sequence: Number = Field(description="Number of the chunk within this process; identifies it when resent.")


class TelemetryChunk(ChunkIdentity):
    """Steps and named float columns of one rank; a missing value is null."""

    steps: Annotated[Column[Number], Field(min_length=1)] = Field(description="Optimizer step of each row.")
    columns: Annotated[dict[str, Column[float | None]], Field(min_length=1)] = Field(
        description="Values by name of the metric, one per step; units are in the names."
    )

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        _check_lengths("steps", len(self.steps), ((f"columns.{name}", column) for name, column in self.columns.items()))
        return self


class TelemetryAccepted(WireModel):
    """The number of stored step values (a number of one column at one step), or 0 for a resend."""

    stored: int = Field(description="Number of step values stored.")
    duplicate: bool = Field(False, description="True: the chunk was stored before.")
    refused: list[str] = Field(
        [], description="Columns that were left out: no metric may have their names, or the run has a thousand."
    )


class TelemetrySeries(WireModel):
    """A column, downsampled if it has more points than requested."""

    run_id: str = Field(description="The run.")
    column: str = Field(description="Name of the metric.")
    rank: int = Field(description="Global rank of the process.")
    steps: list[int] = Field(description="Optimizer step of each point.")
    values: list[float | None] = Field(description="Value of each point, in the unit of the column's name.")
    total_points: int = Field(description="Number of points before downsampling.")
    downsampled: bool = Field(description="True: points were left out.")
    available: list[str] = Field([], description="Names of all metrics of the run.")
