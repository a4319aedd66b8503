"""A run: one execution of a job at one configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tula_wire._base import Count, Id, Message, Name, Share, Timestamp, WireModel
from tula_wire.configurations import Configuration

RunKind = Literal["profile", "train"]
RunOrigin = Literal["plan", "user"]
EndCause = Literal["vanished", "superseded", "no_samples"]
RunState = Literal["pending", "claimed", "running", "succeeded", "out_of_memory", "failed", "cancelled"]


class Instruction(WireModel):
    """How many steps the agent of a profiling run discards and measures, and its precision."""

    profiling_warmup_steps: int
    measuring_steps: int
    precision: Share


class Run(WireModel):
    """A run and its state."""

    id: Id
    job_id: Id
    kind: RunKind
    state: RunState
    configuration: Configuration
    origin: RunOrigin = Field("plan", description="Who asked for it: the profiling plan or the user.")
    purpose: str = Field("", description="Why the plan contains it.")
    instruction: Instruction | None = Field(None, description="Only for profiling runs.")
    message: str | None = Field(None, description="Why it failed, in one sentence.")
    end_cause: EndCause | None = Field(
        None,
        description="Why the service ended it otherwise than its holder reported: its lease expired, another run "
        "continued it, or it reported success without a sample.",
    )
    configuration_mismatch: str | None = Field(
        None, description="One sentence, if the run's process saw another configuration than `configuration`."
    )
    method: str | None = Field(None, description="Quality method: lbt, lrs, lars, post_local_sgd, ags, gain...")
    created_at: Timestamp
    started_at: Timestamp | None = None
    finished_at: Timestamp | None = None
    lease_expires_at: Timestamp | None = None
    num_samples: int = 0
    step_time_s: float | None = Field(None, description="Robust mean over the measuring steps.")
    predicted_step_time_s: float | None = None
    dropped: int = Field(0, description="Measurements that the agent had to drop.")
    straggler_rank: int | None = None
    drifted: bool = False


class RunList(WireModel):
    """Runs of a job, newest first."""

    runs: list[Run]
    next_cursor: str | None = None


class ClaimRequest(WireModel):
    """A request to lease the next run of the plan for `lease_s`."""

    holder: Name
    lease_s: Annotated[float, Field(ge=5, le=86_400)] = 120.0
    max_nodes: Count | None = Field(None, description="Claim only runs that need at most this many nodes.")


class RunClaimed(WireModel):
    """The leased run, or None with the reason: all runs are done, or leased by others."""

    run: Run | None
    reason: str
    retry_after_s: float | None = None


class RunCreate(WireModel):
    """A run outside the plan: a training, or a profiling run of a chosen configuration."""

    kind: RunKind
    configuration: Configuration
    method: Name | None = None
    continues: Name | None = Field(None, description="The training run that this one resumes.")
    holder: Name | None = None
    lease_s: Annotated[float, Field(ge=5, le=86_400)] = 120.0


class RunPatch(WireModel):
    """A change of state. A repeated `running` renews the lease; a final state ends the run."""

    state: RunState
    message: Message | None = None
    failed_local_batch_size: Count | None = Field(None, description="The batch that ran out of memory.")
    holder: Name | None = Field(None, description="The holder of the lease; a patch of another holder is rejected.")
    lease_s: Annotated[float, Field(ge=5, le=86_400)] | None = None
    dropped: Annotated[int, Field(ge=0, le=2**53)] | None = None
