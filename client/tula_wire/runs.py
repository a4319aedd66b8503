"""A run: one execution of a job at one configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tula_wire._base import Base64, Count, Id, Message, Name, Seconds, Share, Timestamp, WireModel, optional
from tula_wire.configurations import Configuration
from tula_wire.enums import EndCause, RunKind, RunOrigin, RunState

WarmupSteps = Annotated[int, Field(ge=0, le=10_000)]
LeaseSeconds = Annotated[float, Field(ge=5, le=86_400)]
MeasuringSteps = Annotated[int, Field(ge=2, le=100_000)]


class Instruction(WireModel):
    """How many steps the agent of a profiling run discards and measures, its precision, and whether it probes."""

    profiling_warmup_steps: WarmupSteps = Field(
        description="Steps to discard first; at most 3 of a launch's second batch and those after it."
    )
    measuring_steps: MeasuringSteps = Field(description="Steps to measure at most.")
    precision: Share = Field(description="Relative error of the step time at which the run may end early.")
    probe_s: Annotated[float, Field(ge=0, le=60)] = Field(
        0.0, description="Seconds for which its ranks time all-reduces, where no fabric of as many is stored; 0: not."
    )


class Run(WireModel):
    """A run and its state."""

    id: Id = Field(description="Identifier that the service assigned.")
    job_id: Id = Field(description="The job.")
    kind: RunKind = Field(description="`profile` measures a configuration, `train` is a training.")
    state: RunState = Field(description="Where the run stands.")
    configuration: Configuration = Field(description="The configuration that it is to run.")
    origin: RunOrigin = Field("plan", description="Who asked for it: the profiling plan or the user.")
    purpose: str = Field("", description="Why the plan contains it.")
    instruction: Instruction | None = optional("Only for profiling runs.")
    message: str | None = optional("Why it failed, in one sentence.")
    end_cause: EndCause | None = optional(
        "Why it ended: its lease expired, another run continued it, it reported success without a sample, "
        "or its `time_limit_s` was over; null: as its holder reported."
    )
    configuration_mismatch: str | None = optional("One sentence, if its process saw another `configuration`.")
    method: str | None = optional("Quality method: lbt, lrs, lars, post_local_sgd, ags, gain...")
    created_at: Timestamp = Field(description="When it was planned or registered (RFC 3339, with time zone).")
    started_at: Timestamp | None = optional("When it first reported `running`.")
    finished_at: Timestamp | None = optional("When it reached a final state.")
    lease_expires_at: Timestamp | None = optional("When its lease expires, unless it is renewed.")
    num_samples: int = Field(0, description="Number of samples stored.")
    step_time_s: float | None = optional("Seconds per optimizer step: robust mean over the measuring steps.")
    predicted_step_time_s: float | None = optional("Seconds per optimizer step, as predicted before the run.")
    dropped: int = Field(0, description="Measurements that the agent had to drop.")
    straggler_rank: int | None = optional("The rank that the others wait for; null: none stands out.")
    time_limit_s: Seconds | None = optional(
        "Seconds after which a training ends its loop, from what is left of deadline and budget; null "
        'unless the job has `limits.on_breach = "stop"`.'
    )
    drifted: bool = Field(False, description="True: its step time changed while it ran.")


class RunList(WireModel):
    """Runs of a job, newest first."""

    runs: list[Run] = Field(description="The runs, newest first.")
    next_cursor: str | None = optional("Send it as `cursor` to get the next page; null on the last.")


class ClaimRequest(WireModel):
    """A request to lease the next run of the plan for `lease_s`."""

    holder: Name = Field(description="Who leases the run, for example host and process id.")
    lease_s: LeaseSeconds = Field(120.0, description="Seconds until the lease expires, unless it is renewed.")
    max_nodes: Count | None = optional("Claim only runs that need at most this many nodes.")
    column: bool = Field(False, description="True: also claim runs that differ in the local batch alone.")


class RunClaimed(WireModel):
    """The leased run, or None with the reason: all runs are done, or leased by others."""

    run: Run | None = Field(description="The leased run, of a column that of the largest batch; null: see `reason`.")
    smaller: list[Run] = Field([], description="The other leased runs of the column, the smallest batch first.")
    reason: str = Field(description="Why this run, or why none, in one sentence.")
    retry_after_s: float | None = optional("Seconds after which to ask again; null: do not.")


class RunCreate(WireModel):
    """A run outside the plan: a training, or a profiling run of a chosen configuration."""

    kind: RunKind = Field(description="`profile` or `train`.")
    configuration: Configuration = Field(
        description="The configuration that it runs. Without an `instance_type` it is of the job's only one, or of the "
        "only one with as many ranks per node."
    )
    method: Name | None = optional("Quality method, for comparison on the quality page.")
    continues: Name | None = optional("The training run that this one resumes.")
    holder: Name | None = optional("Who holds the run's lease; null: no lease.")
    lease_s: LeaseSeconds = Field(120.0, description="Seconds until the lease expires, unless it is renewed.")


class RunPatch(WireModel):
    """A change of state. A repeated `running` renews the lease; a final state ends the run."""

    state: RunState = Field(description="The new state.")
    message: Message | None = optional("Why it failed, in one sentence.")
    end_cause: Literal["time_limit"] | None = optional("Only of a cancelled training: `time_limit_s` was over.")
    failed_local_batch_size: Count | None = optional("The batch that ran out of memory.")
    holder: Name | None = optional("The holder of the lease; a patch of another holder is rejected.")
    lease_s: LeaseSeconds | None = optional("Seconds from now until the lease expires.")
    dropped: Annotated[int, Field(ge=0, le=2**53)] | None = optional("Measurements dropped by the agent so far.")
    output: Annotated[Base64, Field(max_length=87_384)] | None = optional(
        "Base64 of the last 64 KiB (UTF-8) that the run has written so far; replaces the ones before."
    )
