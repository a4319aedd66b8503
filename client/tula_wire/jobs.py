"""Defines models of jobs: a job's specification, runs, predictions, recommendations and events."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, Strict, model_validator

from tula_wire._base import (
    Bytes,
    Count,
    Id,
    Message,
    Name,
    Positive,
    Seconds,
    Share,
    Timestamp,
    UsdPerHour,
    WireModel,
    Word,
    optional,
)
from tula_wire.bounds import MAX_DURATION_S, MAX_EPOCHS, MIN_EPOCHS
from tula_wire.configurations import DEFAULT_INSTANCE_TYPE, Configuration
from tula_wire.devices import known_device
from tula_wire.enums import Basis, EndCause, Objective, RunKind, RunOrigin, RunState, Search, StepTimeForm
from tula_wire.host_facts import HostFacts
from tula_wire.options import MAX_OPTIONS, OptionName, Options, OptionValues, combinations, complete
from tula_wire.text import printable_lines

WarmupSteps = Annotated[int, Field(ge=0, le=10_000)]
LeaseSeconds = Annotated[float, Field(ge=5, le=86_400)]
MeasuringSteps = Annotated[int, Field(ge=2, le=100_000)]


class Instruction(WireModel):
    """Instructions for the agent of a profiling run: steps to discard and to measure, precision, and probe time."""

    profiling_warmup_steps: WarmupSteps = Field(
        description="Steps to discard first; for a launch's second and later batches, at most 3 are discarded."
    )
    measuring_steps: MeasuringSteps = Field(
        description="Steps to measure, or up to eight times as many if slow steps make the mean uncertain."
    )
    precision: Share = Field(description="Relative error of the step time at which the run may end early.")
    probe_s: Annotated[float, Field(ge=0, le=60)] = Field(
        0.0, description="Seconds that the ranks spend timing all-reduces; 0 if they need not time any."
    )


class Run(WireModel):
    """One run of a job, with its state and results."""

    id: Id = Field(description="Identifier that the service assigned.")
    job_id: Id = Field(description="Id of the job.")
    kind: RunKind = Field(description="`profile` if the run measures a configuration, `train` for a training run.")
    state: RunState = Field(description="State of the run.")
    configuration: Configuration = Field(description="The configuration with which the command is launched.")
    origin: RunOrigin = Field("plan", description="Whether the profiling plan or the user requested the run.")
    purpose: str = Field("", description="Why the plan contains the run.")
    instruction: Instruction | None = optional("Instructions for the agent; only for profiling runs.")
    message: str | None = optional("Why the run failed, in one sentence.")
    end_cause: EndCause | None = optional(
        "The cause, if `state` does not show why the run ended: the lease expired, another run continued this run, the "
        "run reported success without a sample, or it reached its `time_limit_s`."
    )
    configuration_mismatch: str | None = optional(
        "If the process used another configuration, one sentence on how it differs from `configuration`."
    )
    method: str | None = optional("Quality method, such as lbt, lrs, lars, post_local_sgd, ags or gain.")
    created_at: Timestamp = Field(description="When the run was planned or registered (RFC 3339, with time zone).")
    started_at: Timestamp | None = optional("When the run first reported `running`.")
    finished_at: Timestamp | None = optional("When the run reached a final state.")
    lease_expires_at: Timestamp | None = optional("When the run's lease expires, unless it is renewed.")
    lease: int = Field(
        0, description="Number of the run's lease, which agents send; each new lease has a higher number."
    )
    num_samples: int = Field(0, description="Number of stored samples.")
    num_steps: int | None = optional("Number of measured steps, without warm-up.")
    step_time_s: float | None = optional("Seconds per optimizer step, as a robust mean over the measured steps.")
    predicted_step_time_s: float | None = optional("Seconds per optimizer step, as predicted before the run.")
    dropped: int = Field(0, description="Number of measurements that the agent had to drop.")
    straggler_rank: int | None = optional("The slowest rank, for which all others wait; null if no rank stands out.")
    time_limit_s: Seconds | None = optional(
        "Seconds after which `tula run` ends a training run, computed from the remaining deadline and budget; null "
        'unless the job has `limits.on_breach = "stop"`.'
    )
    drifted: bool = Field(False, description="Whether the run's speed differs from the prediction.")
    machine: HostFacts | None = optional(
        "Facts that the first rank reported about its script and host; null before the report, and in lists of runs."
    )


class RunList(WireModel):
    """Runs of a job, newest first."""

    runs: list[Run] = Field(description="The runs, newest first.")
    next_cursor: str | None = optional("The `cursor` of the next page; null on the last page.")


class Progress(WireModel):
    """The progress of a training run, including the examples and the cost of the runs that it continues."""

    done: float | None = optional("Share of the examples that have been read, from 0 to 1; null before the first step.")
    left_s: float | None = optional("Estimated seconds remaining, at the speed of the newest steps.")
    spent_usd: float | None = optional("US dollars spent on nodes to date; null without prices.")
    step_time_s: float | None = optional("Seconds per optimizer step, as a robust mean over the newest steps.")


class ClaimRequest(WireModel):
    """A request to lease the next run of the plan for `lease_s` seconds."""

    holder: Name = Field(description="Name of the lease's holder, such as a host name and process id.")
    lease_s: LeaseSeconds = Field(120.0, description="Seconds until the lease expires, unless it is renewed.")
    max_nodes: Count | None = optional("Claim only runs that need at most this many nodes.")
    whole_launch: bool = Field(False, description="Whether to also claim runs that differ only in the local batch.")


class RunClaimed(WireModel):
    """The leased run, or None with the reason, for example that all runs are done or leased to others."""

    run: Run | None = Field(
        description="The leased run, which has the largest batch of its launch; null if there is none."
    )
    smaller: list[Run] = Field([], description="The other leased runs of the launch, smallest batch first.")
    reason: str = Field(description="Why this run was chosen, or why there is no run, in one sentence.")
    retry_after_s: float | None = optional(
        "Seconds after which to repeat the request; null if repeating it is useless."
    )


class RunCreate(WireModel):
    """A request for a run outside the plan: a training run, or a profiling run of a chosen configuration."""

    kind: RunKind = Field(description="`profile` or `train`.")
    configuration: Configuration = Field(
        description="The configuration to run. An omitted `instance_type` means the job's only type, or the job's only "
        "type with the given number of ranks per node; an omitted option has its first value."
    )
    method: Name | None = optional("Quality method, for comparison on the quality page.")
    continues: Name | None = optional("The training run that this run continues.")
    holder: Name | None = optional("Holder of the run's lease; null for a run without a lease.")
    lease_s: LeaseSeconds = Field(120.0, description="Seconds until the lease expires, unless it is renewed.")


class RunPatch(WireModel):
    """A change to a run's state; `running` renews the lease, and a final state ends the run."""

    state: RunState = Field(description="The new state.")
    message: Message | None = optional("Why the run failed, in one sentence.")
    end_cause: Literal["time_limit"] | None = optional("`time_limit` if the run was cancelled at its `time_limit_s`.")
    failed_local_batch_size: Count | None = optional("The local batch that ran out of memory.")
    holder: Name | None = optional("The holder of the lease; a patch from another holder is rejected.")
    lease_s: LeaseSeconds | None = optional("Seconds from now until the lease expires.")
    dropped: Annotated[int, Field(ge=0, le=2**53)] | None = optional("Total number of measurements that were dropped.")
    output: Annotated[str, AfterValidator(printable_lines), Field(max_length=65_536)] | None = optional(
        "The tail of the run's output to date, which replaces the stored tail."
    )


class Estimate(WireModel):
    """A predicted quantity with its 90 % prediction interval."""

    value: float = Field(description="The median, in the unit that the field's name states.")
    low: float = Field(description="Lower end of the interval (5th percentile).")
    high: float = Field(description="Upper end of the interval (95th percentile).")


class Terms(WireModel):
    """The parts of the predicted step time in seconds; the step time is their sum."""

    compute_time_s: float = Field(description="Seconds of the forward pass, the backward pass and the optimizer.")
    exposed_comm_time_s: float = Field(description="Seconds of communication not hidden behind compute.")
    input_time_s: float = Field(0.0, description="Seconds spent waiting for data, estimated from profiled runs.")
    skew_s: float = Field(0.0, description="Seconds spent waiting for the slowest rank.")


class Candidate(WireModel):
    """A configuration with its predictions."""

    configuration: Configuration = Field(description="The configuration.")
    global_batch_size: int = Field(description="Examples per optimizer step.")
    step_time_s: Estimate = Field(description="Seconds per optimizer step.")
    epoch_time_s: Estimate = Field(description="Seconds per epoch.")
    total_time_s: Estimate = Field(description="Duration of the whole training in seconds.")
    cost_usd: Estimate | None = optional("Cost of the whole training in US dollars; null without a price.")
    tokens_per_step: float | None = optional("Tokens per optimizer step; null if tokens are unknown.")
    tokens_per_s: Estimate | None = optional("Tokens per second of all ranks together.")
    usd_per_million_tokens: Estimate | None = optional("US dollars per million tokens; null without a price.")
    energy_kwh: Estimate | None = optional(
        "Energy of the accelerators for the whole training in kilowatt-hours; null if no run has reported energy."
    )
    joules_per_example: Estimate | None = optional("Joules that the accelerators use per example.")
    energy_usd: Estimate | None = optional("Price of `energy_kwh` in US dollars; null without `usd_per_kwh`.")
    energy_gco2: Estimate | None = optional("CO2 emissions of `energy_kwh` in grams; null without `gco2_per_kwh`.")
    memory_bytes: Estimate | None = optional("Peak memory of one rank in bytes; null if it cannot be predicted yet.")
    memory_fits: float | None = optional("Probability that the candidate fits in memory.")
    unproved: bool = Field(
        False, description="Whether no run has completed three steps with this or a larger local batch."
    )
    terms: Terms | None = optional("Parts of the step time.")
    spot: bool = Field(False, description="Whether the cost and time apply to pre-emptible capacity.")
    profiled: bool = Field(False, description="Whether the configuration was measured.")
    extrapolated: bool = Field(False, description="Whether the configuration lies outside the measured range.")
    dominated: bool = Field(
        False, description="Whether another candidate is at least as good in time and cost, and better in one of them."
    )
    excluded_by: str | None = optional("The limit that excludes the candidate, in one sentence.")
    statistical_efficiency: float | None = optional(
        "Progress per example relative to the base batch (see `quality`); null if the gradient noise scale is unknown."
    )
    learning_rate_factor: float | None = optional(
        "Learning rate divided by that of the base batch (see `quality`), according to `scaling_rule`; null if the "
        "rule needs the gradient noise scale and that scale is unknown."
    )
    measured_step_time_s: float | None = optional("Measured seconds per optimizer step; null if not profiled.")


ScalingRule = Literal["gain"]


class Knee(WireModel):
    """The knee of the frontier of cost over time (by Kneedle), or the reason why there is none."""

    found: bool = Field(description="Whether the frontier has a knee.")
    configuration: Configuration | None = optional("The candidate at the knee.")
    global_batch_size: int | None = optional("Examples per optimizer step at the knee.")
    reason: str = Field(description="Where the knee is, or why there is none, in one sentence.")


class MenuPoint(WireModel):
    """A point on the frontier of time and cost, with the price of each hour saved relative to the next slower point."""

    configuration: Configuration = Field(description="The configuration.")
    spot: bool = Field(False, description="Whether the cost and time apply to pre-emptible capacity.")
    global_batch_size: int = Field(description="Examples per optimizer step.")
    total_time_s: Estimate = Field(description="Duration of the whole training in seconds.")
    cost_usd: Estimate | None = optional("Cost of the whole training in US dollars; null without a price.")
    usd_per_hour_saved: float | None = optional(
        "Price in US dollars per hour saved, compared with the next slower point; null for the slowest point or "
        "without a price."
    )
    energy_kwh: Estimate | None = optional("Energy of the accelerators in kilowatt-hours; null if no run reported it.")
    energy_usd: Estimate | None = optional("Price of `energy_kwh` in US dollars; null without `usd_per_kwh`.")
    energy_gco2: Estimate | None = optional("CO2 emissions of `energy_kwh` in grams; null without `gco2_per_kwh`.")
    recommended: bool = Field(False, description="Whether this is the recommended point.")


class Quality(WireModel):
    """Whether the chosen batch is expected to preserve the accuracy of the base batch.

    The learning rate was tuned for the base batch.
    """

    kept: bool = Field(
        description="True if most comparable training runs lost at most one percentage point of accuracy; false if the "
        "accuracy is at risk."
    )
    steps: int = Field(description="Number of optimizer steps in the training at the chosen batch.")
    base_batch_size: int = Field(description="The script's `small_batch_size`, or the smallest candidate, in examples.")
    base_steps: int = Field(description="Number of optimizer steps in the training at the base batch.")
    noise_scale: float | None = optional(
        "Gradient noise scale in examples; null until it has been measured over 100 steps."
    )
    sentence: str = Field(description="The expected effect in words, with a remedy if the accuracy is at risk.")


class OptionEffect(WireModel):
    """Compares the best candidate that has a value of an option with the best candidate that has the first value.

    The two candidates may differ in nodes and batch; a factor of 0.5 halves the time. The candidates' other options are
    those of the two launches that differ only in this option and are most similar to the recommended options. Without
    such launches, the other options have their recommended values.
    """

    option: str = Field(description="Name of the option.")
    value: str = Field(description="The value.")
    base: str = Field(description="The option's first value, with which `value` is compared.")
    launched: bool = Field(description="True if a run with this value was measured; false if the factors are guesses.")
    recommended: bool = Field(description="Whether this is the recommended value.")
    time: Estimate | None = optional("Time of the whole training divided by that with the first value.")
    cost: Estimate | None = optional(
        "Cost of the whole training divided by that with the first value; null without a price."
    )
    memory: Estimate | None = optional(
        "Peak memory of one rank divided by that with the first value at the same batch; null if unknown."
    )
    most_gain: float | None = optional(
        "Maximum saving of a value that was never launched, as a share of the recommendation's time or cost (0.01 is "
        "1 %)."
    )
    left_out: str | None = optional("Why no candidate has this value, in one sentence; null if any candidate has it.")
    sentence: str = Field(description="The effect of the value, in words.")


class ModelReport(WireModel):
    """A report on the model behind the predictions, with its data and its error."""

    form: str = Field(description="Name of the step-time model.")
    version: str = Field(description="Version of the fit, which changes with the data.")
    num_runs: int = Field(description="Number of runs used in the fit.")
    num_samples: int = Field(description="Number of samples used in the fit.")
    cross_validated_error: float | None = optional(
        "Median relative error of leave-one-run-out cross-validation; null with too few runs."
    )
    warnings: list[str] = Field([], description="Warnings to read before trusting the predictions, one sentence each.")


class Recommendation(WireModel):
    """The recommended configuration with all candidates and reasons."""

    id: str = Field(description="Identifier of this recommendation, as in the ledger.")
    job_id: str = Field(description="Id of the job.")
    created_at: Timestamp = Field(description="When the recommendation was computed (RFC 3339, with time zone).")
    basis: Basis = Field(
        description="What the predictions are based on: the specification (`prior`), earlier jobs (`transfer`), this "
        "job's runs on one node and a probe of the network (`probed`), or this job's runs (`profiled`)."
    )
    objective: str = Field(description="The objective that was optimized.")
    chosen: Candidate | None = optional("The recommended candidate; null if no candidate is within the limits.")
    runner_up: Candidate | None = optional("The next best candidate.")
    least_time: Candidate | None = optional("The candidate with the shortest expected time.")
    least_cost: Candidate | None = optional("The candidate with the lowest expected cost; null without a price.")
    balanced: Candidate | None = optional("The candidate that the objective `balanced` would choose.")
    with_base_options: Candidate | None = optional(
        "The best candidate in which each option has its first value, as the script runs today; null without options."
    )
    options: list[OptionEffect] = Field(
        [], description="The effect of each option's values except the first; empty until a run has been measured."
    )
    knee: Knee = Field(description="The knee of the frontier of cost over time.")
    quality: Quality | None = optional("The effect of the chosen batch on the accuracy; null if nothing is chosen.")
    why: str = Field(description="The reason for the choice, the runner-up, and the candidates that limits excluded.")
    scaling_rule: ScalingRule | None = optional(
        "How to adapt the learning rate of the smallest global batch: `gain` means that `TulaOptimizer` scales the "
        "rate according to the noise scale; null if no larger batch is chosen or no experiment covers the optimizer."
    )
    candidates: list[Candidate] = Field(description="All candidates, including those that a limit excludes.")
    frontier: list[Configuration] = Field(description="The candidates that are not dominated in time and cost.")
    menu: list[MenuPoint] = Field(
        [],
        description="Up to five points to choose from, fastest first: the ends of the frontier of permitted "
        "candidates, the recommended point, and the points farthest from these.",
    )
    max_local_batch_size: dict[str, int] = Field(
        {},
        description="Maximum number of examples per micro-step by instance type, according to the memory model, with "
        "the options of `chosen` or, if nothing is chosen, the first value of each option.",
    )
    max_sensible_batch_size: int | None = optional(
        "Batch in examples beyond which a step makes hardly any more progress; null until a training run, or a "
        "profiling run of 100 steps, has measured the noise."
    )
    model: ModelReport = Field(description="The model behind the predictions.")


class Predictions(WireModel):
    """The predictions that a what-if request returns."""

    job_id: str = Field(description="Id of the job.")
    basis: Basis = Field(description="Basis of the predictions.")
    candidates: list[Candidate] = Field(description="One prediction for each requested combination.")
    model: ModelReport = Field(description="The model behind the predictions.")


class BatchStage(WireModel):
    """One stage of a batch schedule, which lasts until the next stage begins."""

    first_step: int = Field(description="Optimizer step at which the stage begins, counted from 0.")
    first_example: int = Field(description="Number of examples on which the earlier stages train.")
    first_share: float = Field(description="`first_example` as a share of all examples.")
    steps: int = Field(description="Number of optimizer steps in the stage.")
    configuration: Configuration = Field(
        description="The best configuration for the stage, according to the objective."
    )
    global_batch_size: int = Field(description="Examples per optimizer step.")
    noise_scale: float = Field(
        description="Lowest gradient noise scale in this stage and all later stages, in examples."
    )
    learning_rate_factor: float | None = optional(
        "Learning rate divided by that of the base batch, computed from the gain at this noise scale; `TulaOptimizer` "
        "applies the factor itself."
    )
    beta2: float | None = optional(
        "Adam's beta2 at which the half-life in examples stays constant; null for other optimizers."
    )
    time_s: Estimate = Field(description="Duration of this stage in seconds, without its relaunch.")
    cost_usd: Estimate | None = optional(
        "Cost of this stage in US dollars, without its relaunch; null without a price."
    )


class BatchSchedule(WireModel):
    """A schedule in which the batch grows over up to four stages, each with the best number of nodes for its batch."""

    job_id: str = Field(description="Id of the job.")
    objective: str = Field(description="The objective that was optimized.")
    stages: list[BatchStage] = Field(description="Two to four stages, or none if the constant batch is better.")
    steps: int = Field(0, description="Total number of optimizer steps in all stages.")
    constant: Configuration | None = optional("The recommended configuration, with which the schedule is compared.")
    spot: bool = Field(False, description="Whether the cost and time apply to pre-emptible capacity.")
    base_batch_size: int | None = optional("The batch for which the learning rate was tuned, in examples.")
    tokens_per_example: float | None = optional("Tokens per example; null if unknown or if the data are not text.")
    noise_run_id: str | None = optional(
        "The training run whose gradient noise the schedule follows; null if no run measured it throughout."
    )
    relaunch_s: float = Field(0.0, description="Seconds that each later stage needs to restart from a checkpoint.")
    time_s: Estimate | None = optional("Duration of all stages and relaunches in seconds.")
    cost_usd: Estimate | None = optional("Cost of all stages and relaunches in US dollars; null without a price.")
    saved_s: Estimate | None = optional(
        "Seconds saved compared with the constant batch; negative if the schedule is slower."
    )
    saved_usd: Estimate | None = optional("US dollars saved compared with the constant batch; null without a price.")
    sentence: str = Field(description="The schedule's saving, or the reason why there is no schedule and the remedy.")
    risk: str | None = optional("How the schedule may affect the accuracy; null without stages.")


class LedgerEntry(WireModel):
    """A past recommendation with the prices at that time, and the measurement of the training run that followed."""

    recommendation_id: str = Field(description="Id of the recommendation.")
    created_at: Timestamp = Field(description="When the recommendation was made (RFC 3339, with time zone).")
    objective: str = Field(description="The objective that was optimized.")
    basis: Basis = Field(description="The basis of the recommendation.")
    configuration: Configuration | None = Field(description="The recommended configuration, or null if there was none.")
    prices: dict[str, object] = Field(description="Prices at that time, by instance type (US dollars).")
    model_version: str = Field(description="Version of the fit.")
    predicted_step_time_s: Estimate | None = Field(description="Predicted seconds per optimizer step.")
    predicted_cost_usd: Estimate | None = optional("Predicted cost of the whole training in US dollars.")
    run_id: str | None = optional("The training run that followed the recommendation, if there was one.")
    measured_step_time_s: float | None = optional("Seconds per optimizer step, measured in the run `run_id`.")
    error: float | None = optional("Measured step time divided by predicted step time, minus one.")
    within_interval: bool | None = optional("Whether the measurement lies inside the prediction interval.")


class Ledger(WireModel):
    """Past recommendations with their measurements, newest first."""

    entries: list[LedgerEntry] = Field(description="The entries, newest first.")


JOBS_COUNTED: Final = 1000
"""The maximum to which the total number of jobs in a list is counted, which bounds the time for a list."""

Optimizer = Literal["sgd", "momentum", "adam", "other"]
JobState = Literal["planning", "ready", "training", "finished", "archived"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Sharding = Literal["none", "zero1", "zero2", "zero3"]
Gbps = Annotated[float, Field(ge=1e-6, le=1e9)]
EventKind = Literal["job", "run", "samples", "recommendation", "scaling", "drift", "advice"]


class ModelSpec(WireModel):
    """A description of the network; every field except the name improves the first prediction."""

    name: Name = Field(description="Name of the network; jobs with the same name and device share measurements.")
    parameters: Annotated[int, Field(ge=1, le=2**50)] | None = optional("Number of trainable parameters.")
    flops_per_sample: Positive | None = optional("Floating-point operations per example, forward and backward.")
    precision: Precision | None = optional("Precision of most arithmetic; for mixed precision, state `bf16` or `fp16`.")
    activation_bytes_per_sample: Bytes | None = optional(
        "Bytes of activations that each additional example needs at the peak of a step; the service rejects 0."
    )
    operations_per_step: Annotated[int, Field(ge=1, le=2**31)] | None = optional(
        "Number of operations in a forward and backward pass that start a kernel, which affects the step time of small "
        "batches."
    )
    convolution_elements_per_sample: Annotated[int, Field(ge=1, le=2**50)] | None = optional(
        "Maximum number of elements per example in the input or output of any convolution; null if there is none or "
        "if the number is unknown."
    )
    transposed_elements_per_sample: Annotated[int, Field(ge=0, le=2**50)] | None = optional(
        "Elements per example that the convolutions of a step read or write in channels-first memory, which GPUs "
        "convert in half precision; 0 with channels-last memory."
    )
    reserved_ratio: Annotated[float, Field(ge=1, le=10)] | None = optional(
        "Ratio of reserved to allocated memory when the caching allocator has filled the device; `estimate_memory` "
        "computes it."
    )
    tokens_per_example: Annotated[float, Field(ge=1, le=1e12)] | None = optional(
        "Tokens per example, or the mean if lengths differ; null to use the number that the agent observes."
    )
    activation_checkpointing: bool = Field(
        False,
        description="Whether the backward pass recomputes activations; `flops_per_sample` excludes the recomputation.",
    )
    sharding: Sharding = Field(
        "none",
        description="What is sharded across the ranks: `zero1` the optimizer state, `zero2` also the gradients, "
        "`zero3` also the parameters (FSDP).",
    )
    pipeline_stages: Count = Field(
        1, description="Number of pipeline stages; if there are several, each rank of the job is a whole replica."
    )
    tensor_parallel_size: Count = Field(
        1,
        description="Number of devices that share each layer; if there are several, each rank of the job is a whole "
        "replica.",
    )
    micro_batch_size: Count | None = optional("Number of examples that a pipeline stage processes at a time.")
    optimizer: Optimizer = Field(
        "momentum",
        description="Optimizer, which determines the state per parameter and the learning rate rule.",
    )
    batch_normalization: bool | None = optional(
        "Whether layers normalize over the batch, which affects the learning rate rule; null if unknown."
    )

    @model_validator(mode="after")
    def _pipelined(self) -> Self:
        if self.pipeline_stages > 1 and self.micro_batch_size is None:
            raise ValueError("micro_batch_size is missing: add it, because a pipeline's step time depends on it")
        return self


class DatasetSpec(WireModel):
    """A description of the data set."""

    size: Count = Field(description="Examples per epoch.")
    name: Name | None = optional("Display name of the data set.")


class SpotPrice(WireModel):
    """The price and the expected interruptions of pre-emptible capacity."""

    usd_per_node_hour: Annotated[UsdPerHour, Field(gt=0)] = Field(description="US dollars per hour of one node.")
    interruptions_per_node_hour: Annotated[float, Field(ge=0, le=60)] = Field(
        description="Expected interruptions per hour of one node."
    )
    restart_s: Annotated[float, Field(ge=0, le=MAX_DURATION_S)] = Field(
        300.0, description="Seconds from an interruption until training runs again."
    )
    checkpoint_interval_s: Seconds = Field(1800.0, description="Seconds of training between two checkpoints.")


class Price(WireModel):
    """The price of an instance type, per node-hour, per GB-hour of used accelerator memory, or both."""

    usd_per_node_hour: UsdPerHour | None = optional("US dollars per hour of one node.")
    usd_per_gb_hour: UsdPerHour | None = optional("US dollars per hour of 1e9 bytes of accelerator memory.")
    spot: SpotPrice | None = optional("Price of the same instance type as pre-emptible capacity, if it is available.")


class ClusterSpec(WireModel):
    """The nodes of one instance type that a job may use."""

    instance_type: Word = Field(DEFAULT_INSTANCE_TYPE, description="Name of the instance type, unique in the job.")
    min_nodes: Count = Field(1, description="Minimum number of nodes to consider.")
    max_nodes: Count = Field(description="Maximum number of nodes to consider.")
    ranks_per_node: Count = Field(1, description="Processes (accelerators) per node.")
    memory_bytes_per_rank: Bytes | None = optional(
        "Bytes of memory that one rank may use; null to use the capacity of the device."
    )
    accelerator: Name | None = optional("Accelerator, such as V100-16GB; used only before the first measurement.")
    network_gbps: Gbps | None = optional("Gigabits per second between nodes; used only before the first measurement.")
    price: Price = Field(Price(), description="Price of one node; if it is omitted, costs are null.")

    @property
    def device(self) -> str | None:
        """Return the name of the accelerator in `DEVICES`, or None if that table lacks the accelerator."""
        return known_device(self.accelerator)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_nodes > self.max_nodes:
            raise ValueError(f"min_nodes ({self.min_nodes}) is greater than max_nodes ({self.max_nodes}): swap them")
        return self


class BatchSpec(WireModel):
    """The range of batches to consider; `global_batch_size` fixes the global batch."""

    min_local_batch_size: Count = Field(32, description="Minimum number of examples per rank and micro-step.")
    max_local_batch_size: Count | None = optional(
        "Maximum number of examples per rank and micro-step; null if only memory limits it."
    )
    global_batch_size: Count | None = optional("Examples per optimizer step; null to let Tula choose the number.")
    max_grad_accum_steps: Count = Field(
        1, description="Maximum number of micro-steps per optimizer step; 1 for no accumulation."
    )
    grad_accum_steps: Count | None = optional(
        "Micro-steps per optimizer step of a script that accumulates on its own; null to let Tula choose the number."
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.grad_accum_steps is not None and self.max_grad_accum_steps > 1:
            raise ValueError("grad_accum_steps and max_grad_accum_steps are mutually exclusive: use only one")
        if self.max_local_batch_size is not None and self.min_local_batch_size > self.max_local_batch_size:
            raise ValueError("min_local_batch_size is greater than max_local_batch_size: swap them")
        return self


class Limits(WireModel):
    """The limits that a recommendation must meet; None means unlimited."""

    budget_usd: Positive | None = optional("Maximum cost of the whole training in US dollars.")
    deadline_s: Seconds | None = optional("Maximum duration of the whole training in seconds.")
    max_global_batch_size: Count | None = optional("Maximum number of examples per optimizer step.")
    on_breach: Literal["warn", "stop"] = Field(
        "warn",
        description="What happens if a training run exceeds its deadline or budget: with `warn`, an event reports it; "
        "with `stop`, `tula run` also ends the command.",
    )


_OptionNames = Annotated[list[OptionName], Field(min_length=1, max_length=MAX_OPTIONS)]


class ProfilingSpec(WireModel):
    """Limits and precision of profiling."""

    profiling_warmup_steps: WarmupSteps = Field(
        5,
        description="Steps that a profiling run discards first; for a launch's second and later batches, at most 3 are "
        "discarded.",
    )
    measuring_steps: MeasuringSteps = Field(
        30,
        description="Steps that a profiling run measures, or up to eight times as many if slow steps make the mean "
        "uncertain by more than 7 %, unless `precision` is 0.",
    )
    precision: Share = Field(0.02, description="Relative error of the step time at which a run ends early.")
    share_launches: bool = Field(
        True,
        description="If true, one launch measures all local batches that the plan contains for a cluster, and "
        "`max_runs` counts launches; if false, each launch measures one batch.",
    )
    max_runs: Count | None = optional(
        "Maximum number of launches, or of runs if `share_launches` is false; null to let the planner decide."
    )
    max_gpu_seconds: Positive | None = optional(
        "Maximum profiling time in seconds, summed over all ranks; null for no limit."
    )
    memory_safety: Share = Field(0.95, description="Required probability that a recommended batch fits in memory.")
    only: _OptionNames | None = optional("Options to vary, while all others keep their first values; null to vary all.")


_PerKwh = Annotated[float, Strict(), Field(ge=0, le=1e6)]


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, (dict, ClusterSpec)) else value


class JobSpec(WireModel):
    """The specification of a job: the body of `POST /v1/jobs` and the content of `job.toml`."""

    name: Name = Field(description="Name of the job, as shown to people.")
    model: ModelSpec = Field(description="The network.")
    dataset: DatasetSpec = Field(description="The data that make up an epoch.")
    epochs: Annotated[float, Field(ge=MIN_EPOCHS, le=MAX_EPOCHS)] = Field(
        1, description="Epochs of the whole training."
    )
    cluster: Annotated[list[ClusterSpec], BeforeValidator(_one_or_many), Field(min_length=1, max_length=16)] = Field(
        description="The instance types that the job may use; a single type may be given without a list."
    )
    batch: BatchSpec = Field(BatchSpec(), description="The batches to consider.")
    objective: Objective = Field("balanced", description="What to optimize; limits apply to every objective.")
    usd_per_hour_of_waiting: Annotated[UsdPerHour, Field(gt=0)] | None = optional(
        "What waiting for training costs you, in US dollars per hour; `balanced` then minimizes the sum of this cost "
        "and the cost of the training."
    )
    usd_per_kwh: _PerKwh | None = optional(
        "Price of energy in US dollars per kilowatt-hour, if you pay for energy separately from the nodes."
    )
    gco2_per_kwh: _PerKwh | None = optional("Grams of CO2 per kilowatt-hour.")
    search: Search = Field(
        "adaptive",
        description="Which candidates to profile: `full` profiles all, `partial` the corners, `adaptive` the most "
        "informative, and `paper` the smallest batch on the smallest cluster and the largest batch on the largest "
        "cluster.",
    )
    step_time_model: StepTimeForm = Field(
        "overlap",
        description="Model of step time: with `overlap`, compute can hide communication; `ring` and "
        "`parameter_server` are equation 2 of the paper.",
    )
    limits: Limits = Field(Limits(), description="The limits that a recommendation must meet.")
    options: OptionValues = Field(
        {},
        description="Values to try for each option of the launch command, by the option's name; today's value first.",
    )
    profiling: ProfilingSpec = Field(ProfilingSpec(), description="Limits and precision of the profiling runs.")

    @property
    def varied_options(self) -> dict[str, list[str]]:
        """Return the values to try for each option; an option that `profiling.only` omits has only its first value."""
        only = self.profiling.only
        return {name: values if only is None or name in only else values[:1] for name, values in self.options.items()}

    @property
    def base_options(self) -> Options:
        """Return the options with which the script runs today, which is the first value of each option."""
        return complete(self.options, ())

    @property
    def option_combinations(self) -> list[Options]:
        """Return every combination of option values; the combination of first values comes first."""
        return combinations(self.options)

    @property
    def varied_combinations(self) -> list[Options]:
        """Return the combinations of option values to try; the combination of first values comes first."""
        return combinations(self.varied_options)

    @model_validator(mode="after")
    def _known_options(self) -> Self:
        for name in self.profiling.only or ():
            if name not in self.options:
                names = ", ".join(sorted(self.options)) or "one that you list under [options]"
                raise ValueError(f"profiling.only names {name!r}, which is not an option of this job: use {names}")
        return self

    @model_validator(mode="after")
    def _distinct_types(self) -> Self:
        names = [cluster.instance_type for cluster in self.cluster]
        if len(set(names)) != len(names):
            raise ValueError("cluster: two entries have the same instance_type: give each entry a different one")
        return self

    @model_validator(mode="after")
    def _two_points_suffice(self) -> Self:
        if self.search == "paper" and self.step_time_model == "overlap":
            raise ValueError('search "paper" requires step_time_model "ring" or "parameter_server": set one of them')
        return self


class JobPatch(WireModel):
    """A change to a registered job; omitted fields keep their values."""

    objective: Objective | None = optional("The new objective.")
    usd_per_hour_of_waiting: Annotated[UsdPerHour, Field(gt=0)] | None = optional(
        "The new cost of waiting in US dollars per hour; null removes it."
    )
    usd_per_kwh: _PerKwh | None = optional("The new price of energy in US dollars per kilowatt-hour; null removes it.")
    gco2_per_kwh: _PerKwh | None = optional("The new number of grams of CO2 per kilowatt-hour; null removes it.")
    limits: Limits | None = optional("The new limits, which replace all existing limits.")
    prices: Annotated[dict[str, Price], Field(title="Prices")] | None = optional("The new prices, by instance type.")
    share_launches: bool | None = optional("The new value of `profiling.share_launches`.")
    only: _OptionNames | None = optional("The new value of `profiling.only`; null lets every option vary.")
    archived: bool | None = optional("True hides the job from lists, and false shows it again.")
    retry_failed: bool = Field(False, description="Whether configurations whose runs failed may be planned again.")


class JobSummary(WireModel):
    """A job as an entry of a list."""

    id: Id = Field(description="Identifier that the service assigned.")
    name: str = Field(description="Name of the job.")
    model_name: str = Field(description="Name of the network.")
    state: JobState = Field(description="State of the job.")
    objective: Objective = Field(description="The job's objective.")
    created_at: Timestamp = Field(description="When the job was registered (RFC 3339, with time zone).")
    runs_done: int = Field(description="Number of profiling runs that have ended.")
    runs_planned: int = Field(description="Number of profiling runs that are planned or have ended.")
    recommended: Configuration | None = optional(
        "The recommended configuration; null if no candidate is within the limits."
    )
    predicted_time_s: float | None = optional("Predicted duration of the whole training in seconds.")
    predicted_cost_usd: float | None = optional(
        "Predicted cost of the whole training in US dollars; null without a price."
    )
    saving_vs_smallest_batch: float | None = optional(
        "Fraction of time saved compared with the smallest batch on the same number of nodes."
    )
    saving_vs_largest_batch: float | None = optional(
        "Fraction of time saved compared with the largest batch on the same number of nodes."
    )
    prediction_error: float | None = optional("Measured step time divided by predicted step time, minus one.")


class JobPage(WireModel):
    """One page of jobs; `next_cursor` is None on the last page."""

    jobs: list[JobSummary] = Field(description="Jobs, newest first.")
    total: int = Field(description=f"Number of matching jobs; {JOBS_COUNTED:,} means that there may be more.")
    next_cursor: str | None = optional("The `cursor` of the next page; null on the last page.")


class ProfilingCost(WireModel):
    """The cost of profiling to date and of the rest of the current plan, including the start-up of launches.

    The cost of the rest is estimated from predicted step times and from the start-up times of earlier launches, which
    are assumed to be 30 s before the first launch. An interrupted launch is assumed to have run until its
    lease expired, and is no longer counted once its runs are leased again. The fields whose names contain `at_most`
    also include the launches that an adaptive search may add, up to its maximum. Each of these launches is assumed to
    take as long as the longest launch of the plan, and to cost as much as the most expensive one.
    """

    spent_gpu_seconds: float = Field(description="Profiling time to date in seconds, summed over all ranks.")
    spent_usd: float | None = Field(description="On-demand cost of nodes to date in US dollars; null without prices.")
    launches_left: int = Field(description="Number of remaining launches: those pending or in progress.")
    runs_left: int = Field(description="Number of runs that the remaining launches measure.")
    left_s: float = Field(description="Duration of the remaining launches in seconds, if they run one at a time.")
    left_gpu_seconds: float = Field(description="Time of the remaining launches in seconds, summed over all ranks.")
    left_usd: float | None = Field(
        description="On-demand cost of the remaining launches in US dollars; null without prices."
    )
    launches_at_most: int = Field(description="Number of remaining launches, including those that the search may add.")
    at_most_s: float = Field(
        description="Duration of the launches in `launches_at_most` in seconds, if they run one at a time."
    )
    at_most_usd: float | None = Field(
        description="On-demand cost of the launches in `launches_at_most`, in US dollars; null without prices."
    )


class Job(JobSummary):
    """A job with its specification and plan."""

    spec: JobSpec = Field(description="The specification, including later changes.")
    plan: list[Run] = Field(description="The profiling runs, including those that have ended.")
    plan_reason: str = Field(description="Why these runs are planned, or why profiling stopped.")
    profiling_cost: ProfilingCost = Field(description="The cost of profiling to date and of the rest of the plan.")


class JobCreated(WireModel):
    """The response to the registration of a job."""

    job: Job = Field(description="The registered job, which may have existed before.")
    recommendation: Recommendation = Field(description="The current recommendation.")
    runs: list[Run] = Field(description="The profiling runs to start next.")


class Event(WireModel):
    """A change to a job; ids increase, so that a reader can resume after the last event that it received."""

    id: int = Field(description="Position in the job's stream of events, which increases from event to event.")
    kind: EventKind = Field(description="What changed.")
    job_id: str = Field(description="Id of the job.")
    run_id: str | None = optional("Id of the run that changed, if any.")
    at: Timestamp = Field(description="When the change happened (RFC 3339, with time zone).")
    data: dict[str, Any] = Field({}, description="Details, which depend on `kind`.")
