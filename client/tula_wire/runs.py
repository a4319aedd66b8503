"""A run: one execution of a job at one configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tula_wire._base import Count, Name, Share, Timestamp, WireModel
from tula_wire.configurations import Configuration

RunKind = Literal["profile", "train"]
RunState = Literal["pending", "claimed", "running", "succeeded", "out_of_memory", "failed", "cancelled"]


class Instruction(WireModel):
    """What the agent of a profiling run does: discard, measure, then end."""

    profiling_warmup_steps: int
    measuring_steps: int
    precision: Share


class Run(WireModel):
    """A run as the service knows it."""

    id: str
    job_id: str
    kind: RunKind
    state: RunState
    configuration: Configuration
    origin: Literal["plan", "user"] = Field("plan", description="Who asked for it: the profiling plan or the user.")
    purpose: str = Field("", description="Why the plan wants it.")
    instruction: Instruction | None = Field(None, description="Only for profiling runs.")
    message: str | None = Field(None, description="Why it failed, in one sentence.")
    end_cause: Literal["vanished", "superseded", "no_samples"] | None = Field(
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
    """Who asks for work and how long it will hold it without renewing."""

    holder: Name
    lease_s: Annotated[float, Field(ge=5, le=86_400)] = 120.0
    max_nodes: Count | None = Field(None, description="Claim only runs that need at most so many nodes.")


class RunClaimed(WireModel):
    """The leased run, or None with the reason: all done, or all at work elsewhere."""

    run: Run | None
    reason: str
    retry_after_s: float | None = None


class RunCreate(WireModel):
    """Registers a run outside the plan: training, or a measurement of the user's own choice."""

    kind: RunKind
    configuration: Configuration
    method: Name | None = None
    continues: Name | None = Field(None, description="The training run that this one goes on from.")
    holder: Name | None = None
    lease_s: Annotated[float, Field(ge=5, le=86_400)] = 120.0


class RunPatch(WireModel):
    """Moves a run on. `running` again renews the lease; a final state ends it."""

    state: RunState
    message: Annotated[str, Field(max_length=2000)] | None = None
    failed_local_batch_size: Count | None = Field(None, description="The batch that ran out of memory.")
    holder: Name | None = Field(None, description="As given when claiming; another holder's patch is refused.")
    lease_s: Annotated[float, Field(ge=5, le=86_400)] | None = None
    dropped: Annotated[int, Field(ge=0)] | None = None
