"""A job: the specification that a user registers, its state, and its events."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import Self

from tula_wire._base import Bytes, Count, Id, Name, Positive, Seconds, Share, Timestamp, UsdPerHour, WireModel
from tula_wire.bounds import MAX_DURATION_S, MAX_EPOCHS, MIN_EPOCHS
from tula_wire.configurations import DEFAULT_INSTANCE_TYPE, Configuration
from tula_wire.recommendations import Recommendation
from tula_wire.runs import Run

JOBS_COUNTED: Final = 1000
"""The total of a list of jobs is counted up to this number, to bound the time that a list takes."""

Objective = Literal["time", "cost", "knee", "time_to_quality"]
Search = Literal["full", "partial", "adaptive"]
StepTimeModel = Literal["overlap", "ring", "parameter_server"]
JobState = Literal["planning", "ready", "training", "finished", "archived"]
EventKind = Literal["job", "run", "samples", "recommendation", "scaling", "drift", "advice"]


class ModelSpec(WireModel):
    """The network; every field but the name improves the first prediction."""

    name: Name
    parameters: Annotated[int, Field(ge=1, le=2**50)] | None = None
    flops_per_sample: Positive | None = Field(None, description="Forward and backward, floating point operations.")
    activation_bytes_per_sample: Bytes | None = None
    optimizer: Literal["sgd", "momentum", "adam", "other"] = "momentum"


class DatasetSpec(WireModel):
    """The data set."""

    size: Count = Field(description="Examples per epoch.")
    name: Name | None = None


class SpotPrice(WireModel):
    """Price and interruptions of pre-emptible capacity."""

    usd_per_node_hour: Annotated[UsdPerHour, Field(gt=0)]
    interruptions_per_node_hour: Annotated[float, Field(ge=0, le=60)]
    restart_s: Annotated[float, Field(ge=0, le=MAX_DURATION_S)] = 300.0
    checkpoint_interval_s: Seconds = 1800.0


class Price(WireModel):
    """Price of an instance type: per node-hour, per GB-hour of accelerator memory used, or both."""

    usd_per_node_hour: UsdPerHour | None = None
    usd_per_gb_hour: UsdPerHour | None = None
    spot: SpotPrice | None = None


class ClusterSpec(WireModel):
    """Nodes of one instance type that the job may use."""

    instance_type: Name = DEFAULT_INSTANCE_TYPE
    min_nodes: Count = 1
    max_nodes: Count
    ranks_per_node: Count = 1
    memory_bytes_per_rank: Bytes | None = None
    accelerator: Name | None = Field(None, description="For example V100-16GB; used only before the first measurement.")
    network_gbps: Annotated[float, Field(ge=1e-6, le=1e9)] | None = None
    price: Price = Price()

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_nodes > self.max_nodes:
            raise ValueError(f"min_nodes ({self.min_nodes}) is above max_nodes ({self.max_nodes}): swap them")
        return self


class BatchSpec(WireModel):
    """Batches to consider; `global_batch_size` fixes the global batch."""

    min_local_batch_size: Count = 32
    max_local_batch_size: Count | None = Field(None, description="Default: bounded by memory.")
    global_batch_size: Count | None = None
    max_grad_accum_steps: Count = 1

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_local_batch_size is not None and self.min_local_batch_size > self.max_local_batch_size:
            raise ValueError("min_local_batch_size is above max_local_batch_size: swap them")
        return self


class Limits(WireModel):
    """Limits of a recommendation; None means unlimited."""

    budget_usd: Positive | None = None
    deadline_s: Seconds | None = None
    max_global_batch_size: Count | None = None


class ProfilingSpec(WireModel):
    """Limits and precision of profiling."""

    profiling_warmup_steps: Annotated[int, Field(ge=0, le=10_000)] = 5
    measuring_steps: Annotated[int, Field(ge=2, le=100_000)] = 30
    precision: Share = Field(0.02, description="Relative error of the step time at which a run ends early.")
    max_runs: Count | None = None
    max_gpu_seconds: Positive | None = None
    memory_safety: Share = Field(0.95, description="Required probability that a recommended batch fits in memory.")


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, (dict, ClusterSpec)) else value


class JobSpec(WireModel):
    """The specification of a job: the body of `POST /v1/jobs` and the content of `job.toml`."""

    name: Name
    model: ModelSpec
    dataset: DatasetSpec
    epochs: Annotated[float, Field(ge=MIN_EPOCHS, le=MAX_EPOCHS)] = 1
    cluster: Annotated[list[ClusterSpec], BeforeValidator(_one_or_many), Field(min_length=1, max_length=16)]
    batch: BatchSpec = BatchSpec()
    objective: Objective = "knee"
    search: Search = "adaptive"
    step_time_model: StepTimeModel = Field(
        "overlap",
        description="overlap: communication hides behind compute. ring, parameter_server: equation 2 of the paper.",
    )
    collective: Literal["ring", "tree", "parameter_server", "hierarchical"] | None = Field(
        None, deprecated=True, description="Ignored, and refused from the next release on; see step_time_model."
    )
    limits: Limits = Limits()
    profiling: ProfilingSpec = ProfilingSpec()

    @model_validator(mode="after")
    def _distinct_types(self) -> Self:
        names = [cluster.instance_type for cluster in self.cluster]
        if len(set(names)) != len(names):
            raise ValueError("cluster: two entries have the same instance_type; give each another one")
        return self


class JobPatch(WireModel):
    """Changes of a registered job; omitted fields do not change."""

    objective: Objective | None = None
    limits: Limits | None = None
    prices: dict[str, Price] | None = Field(None, description="By instance type.")
    archived: bool | None = None


class JobSummary(WireModel):
    """A job in a list."""

    id: Id
    name: str
    model_name: str
    state: JobState
    objective: Objective
    created_at: Timestamp
    runs_done: int
    runs_planned: int
    recommended: Configuration | None = None
    predicted_time_s: float | None = None
    predicted_cost_usd: float | None = None
    saving_vs_smallest_batch: float | None = Field(None, description="Fraction of time saved, on as many nodes.")
    saving_vs_largest_batch: float | None = None
    prediction_error: float | None = Field(None, description="Measured over predicted step time, minus one.")


class JobPage(WireModel):
    """One page of jobs; `next_cursor` is None on the last."""

    jobs: list[JobSummary]
    total: int = Field(
        description=f"Number of matching jobs, counted up to {JOBS_COUNTED:,}: that number means at least as many."
    )
    next_cursor: str | None = None


class Job(JobSummary):
    """A job with its specification and plan."""

    spec: JobSpec
    plan: list[Run]
    plan_reason: str = Field(description="Why these runs are planned, or why profiling stopped.")


class JobCreated(WireModel):
    """Answer to a registration."""

    job: Job
    recommendation: Recommendation
    runs: list[Run] = Field(description="To be profiled next.")


class Event(WireModel):
    """A change of a job. Ids increase, so that a reader resumes after the last event it received."""

    id: int
    kind: EventKind
    job_id: str
    run_id: str | None = None
    at: Timestamp
    data: dict[str, Any] = {}
