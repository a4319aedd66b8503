"""A job: the specification that a user registers, its state, and its events."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from tula_wire._base import Bytes, Count, Id, Name, Positive, Seconds, Share, Timestamp, UsdPerHour, WireModel, optional
from tula_wire.bounds import MAX_DURATION_S, MAX_EPOCHS, MIN_EPOCHS
from tula_wire.configurations import DEFAULT_INSTANCE_TYPE, Configuration
from tula_wire.enums import Objective, Search, StepTimeForm
from tula_wire.recommendations import Recommendation
from tula_wire.runs import MeasuringSteps, Run, WarmupSteps

JOBS_COUNTED: Final = 1000
"""The total of a list of jobs is counted up to this number, to bound the time that a list takes."""

Optimizer = Literal["sgd", "momentum", "adam", "other"]
JobState = Literal["planning", "ready", "training", "finished", "archived"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Sharding = Literal["none", "zero1", "zero2", "zero3"]
Gbps = Annotated[float, Field(ge=1e-6, le=1e9)]
EventKind = Literal["job", "run", "samples", "recommendation", "scaling", "drift", "advice"]


class ModelSpec(WireModel):
    """The network; every field but the name improves the first prediction."""

    name: Name = Field(description="Name of the network; jobs with the same name and device share what was learnt.")
    parameters: Annotated[int, Field(ge=1, le=2**50)] | None = optional("Number of trainable parameters.")
    flops_per_sample: Positive | None = optional("Forward and backward, floating point operations.")
    precision: Precision | None = optional("Of most arithmetic; `bf16` and `fp16` also where mixed with `fp32`.")
    activation_bytes_per_sample: Bytes | None = optional("Bytes of activations of one example; the service refuses 0.")
    tokens_per_example: Annotated[float, Field(ge=1, le=1e12)] | None = optional(
        "Tokens of an example, the mean where lengths differ; null: the length that the agent sees."
    )
    activation_checkpointing: bool = Field(
        False,
        description="True: the backward pass recomputes activations; then `activation_bytes_per_sample` is of what is "
        "kept, and `flops_per_sample` leaves the recomputation out.",
    )
    sharding: Sharding = Field(
        "none",
        description="What the ranks share instead of each holding a copy: `zero1` optimizer state, `zero2` gradients "
        "too, `zero3` parameters too (FSDP).",
    )
    pipeline_stages: Count = Field(1, description="Stages of a pipeline; a rank is then a whole replica.")
    tensor_parallel_size: Count = Field(1, description="Devices that share each layer; a rank is then a whole replica.")
    micro_batch_size: Count | None = optional("Examples that a pipeline passes on at a time.")
    optimizer: Optimizer = Field(
        "momentum",
        description="Optimizer, for the bytes of its state per parameter and the rule for the learning rate.",
    )
    batch_normalization: bool | None = optional(
        "Whether layers normalize over the batch, for the rule for the learning rate; null: unknown."
    )

    @model_validator(mode="after")
    def _pipelined(self) -> Self:
        if self.pipeline_stages > 1 and self.micro_batch_size is None:
            raise ValueError("micro_batch_size is missing: a pipeline's step time depends on it; give it too")
        return self


class DatasetSpec(WireModel):
    """The data set."""

    size: Count = Field(description="Examples per epoch.")
    name: Name | None = optional("Name of the data set, for people.")


class SpotPrice(WireModel):
    """Price and interruptions of pre-emptible capacity."""

    usd_per_node_hour: Annotated[UsdPerHour, Field(gt=0)] = Field(description="US dollars per hour of one node.")
    interruptions_per_node_hour: Annotated[float, Field(ge=0, le=60)] = Field(
        description="Expected interruptions per hour of one node."
    )
    restart_s: Annotated[float, Field(ge=0, le=MAX_DURATION_S)] = Field(
        300.0, description="Seconds from an interruption until training runs again."
    )
    checkpoint_interval_s: Seconds = Field(1800.0, description="Seconds of training between two checkpoints.")


class Price(WireModel):
    """Price of an instance type: per node-hour, per GB-hour of accelerator memory used, or both."""

    usd_per_node_hour: UsdPerHour | None = optional("US dollars per hour of one node.")
    usd_per_gb_hour: UsdPerHour | None = optional("US dollars per hour of 1e9 bytes of accelerator memory.")
    spot: SpotPrice | None = optional("The same instance type as pre-emptible capacity; null: on demand only.")


class ClusterSpec(WireModel):
    """Nodes of one instance type that the job may use."""

    instance_type: Name = Field(DEFAULT_INSTANCE_TYPE, description="Name of the instance type, unique in the job.")
    min_nodes: Count = Field(1, description="Fewest nodes to consider.")
    max_nodes: Count = Field(description="Most nodes to consider.")
    ranks_per_node: Count = Field(1, description="Processes (accelerators) per node.")
    memory_bytes_per_rank: Bytes | None = optional("Bytes of memory that one rank may use; null: read from the device.")
    accelerator: Name | None = optional("For example V100-16GB; used only before the first measurement.")
    network_gbps: Gbps | None = optional("Gigabits per second between nodes; used only before the first measurement.")
    price: Price = Field(Price(), description="Price of one node; without any, costs are null.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_nodes > self.max_nodes:
            raise ValueError(f"min_nodes ({self.min_nodes}) is above max_nodes ({self.max_nodes}): swap them")
        return self


class BatchSpec(WireModel):
    """Batches to consider; `global_batch_size` fixes the global batch."""

    min_local_batch_size: Count = Field(32, description="Fewest examples per rank and micro-step.")
    max_local_batch_size: Count | None = optional("Most examples per rank and micro-step. Default: bounded by memory.")
    global_batch_size: Count | None = optional("Examples per optimizer step, if it is fixed; null: it is chosen.")
    max_grad_accum_steps: Count = Field(1, description="Most micro-steps per optimizer step; 1 does not accumulate.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_local_batch_size is not None and self.min_local_batch_size > self.max_local_batch_size:
            raise ValueError("min_local_batch_size is above max_local_batch_size: swap them")
        return self


class Limits(WireModel):
    """Limits of a recommendation; None means unlimited."""

    budget_usd: Positive | None = optional("US dollars that the whole training may cost.")
    deadline_s: Seconds | None = optional("Seconds that the whole training may take.")
    max_global_batch_size: Count | None = optional("Most examples per optimizer step.")
    on_breach: Literal["warn", "stop"] = Field(
        "warn",
        description="What happens to a training that exceeds its deadline or budget: an event says so, or `stop`: its "
        "loop ends on all ranks at the same step.",
    )


class ProfilingSpec(WireModel):
    """Limits and precision of profiling."""

    profiling_warmup_steps: WarmupSteps = Field(
        5,
        description="Steps that a profiling run discards first; at most 3 of a launch's second batch and those after "
        "it.",
    )
    measuring_steps: MeasuringSteps = Field(30, description="Steps that a profiling run measures at most.")
    precision: Share = Field(0.02, description="Relative error of the step time at which a run ends early.")
    columns: bool = Field(
        True,
        description="One launch measures every local batch that the plan wants on a cluster, and `max_runs` counts "
        "launches; false: one batch per launch.",
    )
    max_runs: Count | None = optional("Most launches, without `columns` runs; null: the planner decides.")
    max_gpu_seconds: Positive | None = optional("Most seconds of all ranks together; null: unlimited.")
    memory_safety: Share = Field(0.95, description="Required probability that a recommended batch fits in memory.")


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, (dict, ClusterSpec)) else value


class JobSpec(WireModel):
    """The specification of a job: the body of `POST /v1/jobs` and the content of `job.toml`."""

    name: Name = Field(description="Name of the job, for people.")
    model: ModelSpec = Field(description="The network.")
    dataset: DatasetSpec = Field(description="The data that an epoch consists of.")
    epochs: Annotated[float, Field(ge=MIN_EPOCHS, le=MAX_EPOCHS)] = Field(
        1, description="Epochs of the whole training."
    )
    cluster: Annotated[list[ClusterSpec], BeforeValidator(_one_or_many), Field(min_length=1, max_length=16)] = Field(
        description="The instance types that the job may use; a single one may be given without a list."
    )
    batch: BatchSpec = Field(BatchSpec(), description="The batches to consider.")
    objective: Objective = Field("balanced", description="What to optimize; limits hold for each.")
    usd_per_hour_of_waiting: Annotated[UsdPerHour, Field(gt=0)] | None = optional(
        "US dollars per hour that the training's duration costs you; `balanced` then minimizes both."
    )
    search: Search = Field(
        "adaptive",
        description="What is profiled: `full` every candidate, `partial` the corners, `adaptive` the most informative, "
        "`paper` two points: the smallest batch on the smallest cluster, the largest on the largest.",
    )
    step_time_model: StepTimeForm = Field(
        "overlap",
        description="overlap: communication hides behind compute. ring, parameter_server: equation 2 of the paper.",
    )
    limits: Limits = Field(Limits(), description="What a recommendation must keep within.")
    profiling: ProfilingSpec = Field(ProfilingSpec(), description="How runs are measured, and how many.")

    @model_validator(mode="after")
    def _distinct_types(self) -> Self:
        names = [cluster.instance_type for cluster in self.cluster]
        if len(set(names)) != len(names):
            raise ValueError("cluster: two entries have the same instance_type; give each another one")
        return self

    @model_validator(mode="after")
    def _two_points_suffice(self) -> Self:
        if self.search == "paper" and self.step_time_model == "overlap":
            raise ValueError('search "paper" needs step_time_model "ring" or "parameter_server": give one of them')
        return self


class JobPatch(WireModel):
    """Changes of a registered job; omitted fields do not change."""

    objective: Objective | None = optional("What to optimize from now on.")
    usd_per_hour_of_waiting: Annotated[UsdPerHour, Field(gt=0)] | None = optional(
        "US dollars per hour, from now on; null takes it out."
    )
    limits: Limits | None = optional("Limits from now on; replaces all of them.")
    prices: Annotated[dict[str, Price], Field(title="Prices")] | None = optional("By instance type.")
    columns: bool | None = optional("`profiling.columns` from now on.")
    archived: bool | None = optional("True hides the job from lists, false shows it again.")
    retry_failed: bool = Field(False, description="True: failed runs no longer rule out their configuration.")


class JobSummary(WireModel):
    """A job in a list."""

    id: Id = Field(description="Identifier that the service assigned.")
    name: str = Field(description="Name of the job.")
    model_name: str = Field(description="Name of the network.")
    state: JobState = Field(description="Where the job stands.")
    objective: Objective = Field(description="What is optimized.")
    created_at: Timestamp = Field(description="When it was registered (RFC 3339, with time zone).")
    runs_done: int = Field(description="Number of profiling runs that ended.")
    runs_planned: int = Field(description="Number of profiling runs that are planned or ended.")
    recommended: Configuration | None = optional("What is recommended; null: no candidate is within the limits.")
    predicted_time_s: float | None = optional("Predicted seconds of the whole training.")
    predicted_cost_usd: float | None = optional("Predicted US dollars of the whole training; null without a price.")
    saving_vs_smallest_batch: float | None = optional("Fraction of time saved on as many nodes.")
    saving_vs_largest_batch: float | None = optional("The same against the largest batch.")
    prediction_error: float | None = optional("Measured over predicted step time, minus one.")


class JobPage(WireModel):
    """One page of jobs; `next_cursor` is None on the last."""

    jobs: list[JobSummary] = Field(description="Jobs, newest first.")
    total: int = Field(
        description=f"Number of matching jobs, counted up to {JOBS_COUNTED:,}: that number means at least as many."
    )
    next_cursor: str | None = optional("Send it as `cursor` to get the next page; null on the last.")


class ProfilingCost(WireModel):
    """What profiling has taken, and what is left of the plan as it is now, launch after launch, start-up included.

    What is left rests on predicted step times and on the start-up of earlier launches, before the first on 30 s. An
    interrupted launch counts as taken until its lease expired, and no longer once its runs are leased again.
    """

    spent_gpu_seconds: float = Field(description="Seconds of all ranks together, so far.")
    spent_usd: float | None = Field(description="US dollars of the nodes on demand, so far; null without prices.")
    launches_left: int = Field(description="Launches that wait or are in progress.")
    runs_left: int = Field(description="Runs that these launches measure.")
    left_s: float = Field(description="Seconds that these launches take one after another.")
    left_gpu_seconds: float = Field(description="Seconds of all their ranks together.")
    left_usd: float | None = Field(description="US dollars of their nodes on demand; null without prices.")


class Job(JobSummary):
    """A job with its specification and plan."""

    spec: JobSpec = Field(description="The specification as registered and changed since.")
    plan: list[Run] = Field(description="The profiling runs, those that ended included.")
    plan_reason: str = Field(description="Why these runs are planned, or why profiling stopped.")
    profiling_cost: ProfilingCost | None = optional("What profiling costs; null from a service of an earlier version.")


class JobCreated(WireModel):
    """Answer to a registration."""

    job: Job = Field(description="The job, registered or found.")
    recommendation: Recommendation = Field(description="The recommendation as of now.")
    runs: list[Run] = Field(description="To be profiled next.")


class Event(WireModel):
    """A change of a job. Ids increase, so that a reader resumes after the last event it received."""

    id: int = Field(description="Position in the job's stream; increases.")
    kind: EventKind = Field(description="What changed.")
    job_id: str = Field(description="The job.")
    run_id: str | None = optional("The run that changed, if one did.")
    at: Timestamp = Field(description="When it happened (RFC 3339, with time zone).")
    data: dict[str, Any] = Field({}, description="Details, by kind.")
