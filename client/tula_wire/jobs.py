"""Models of a job: the specification that a user registers, its runs, predictions, recommendations and events."""

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
    """An instruction for a profiling run's agent: steps to discard and to measure, the precision, and the probe."""

    profiling_warmup_steps: WarmupSteps = Field(
        description="Steps to discard first; at most 3 of a launch's second and later batches."
    )
    measuring_steps: MeasuringSteps = Field(
        description="Steps to measure; up to eight times as many while slow steps leave their mean little known."
    )
    precision: Share = Field(description="Relative error of the step time at which the run may end early.")
    probe_s: Annotated[float, Field(ge=0, le=60)] = Field(
        0.0, description="Seconds for which its ranks time all-reduces, where no fabric of as many is stored; 0: not."
    )


class Run(WireModel):
    """A run and its state."""

    id: Id = Field(description="Identifier that the service assigned.")
    job_id: Id = Field(description="The job.")
    kind: RunKind = Field(description="`profile` measures a configuration, `train` is a training run.")
    state: RunState = Field(description="State of the run.")
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
    lease: int = Field(
        0, description="Number of its lease, which its agents send; grows when the run may get another holder."
    )
    num_samples: int = Field(0, description="Number of samples stored.")
    num_steps: int | None = optional("Number of steps measured, without warm-up.")
    step_time_s: float | None = optional("Seconds per optimizer step: robust mean over the measuring steps.")
    predicted_step_time_s: float | None = optional("Seconds per optimizer step, as predicted before the run.")
    dropped: int = Field(0, description="Measurements that the agent had to drop.")
    straggler_rank: int | None = optional("The rank that the others wait for; null: none stands out.")
    time_limit_s: Seconds | None = optional(
        "Seconds after which `tula run` ends a training run, from what is left of deadline and budget; null "
        'unless the job has `limits.on_breach = "stop"`.'
    )
    drifted: bool = Field(False, description="True: it does not run at the predicted speed.")
    machine: HostFacts | None = optional(
        "What its first rank reported about its script and its host; null before that, and in lists of runs."
    )


class RunList(WireModel):
    """Runs of a job, newest first."""

    runs: list[Run] = Field(description="The runs, newest first.")
    next_cursor: str | None = optional("Send it as `cursor` to get the next page; null on the last.")


class Progress(WireModel):
    """The progress of a training run, including the examples and the cost of its earlier starts."""

    done: float | None = optional("Share of the examples that were read, 0 to 1; null before the first step.")
    left_s: float | None = optional("Seconds that the rest takes at the speed of the newest steps.")
    spent_usd: float | None = optional("US dollars of the nodes so far; null without prices.")
    step_time_s: float | None = optional("Seconds per optimizer step: robust mean over the newest steps.")


class ClaimRequest(WireModel):
    """A request to lease the next run of the plan for `lease_s` seconds."""

    holder: Name = Field(description="Who leases the run, for example host and process id.")
    lease_s: LeaseSeconds = Field(120.0, description="Seconds until the lease expires, unless it is renewed.")
    max_nodes: Count | None = optional("Claim only runs that need at most this many nodes.")
    whole_launch: bool = Field(False, description="True: also claim runs that differ only in the local batch.")


class RunClaimed(WireModel):
    """The leased run, or None with the reason, for example that all runs are done or leased by others."""

    run: Run | None = Field(
        description="The leased run, in a launch the run with the largest batch; null: see `reason`."
    )
    smaller: list[Run] = Field([], description="The other leased runs of the launch, the smallest batch first.")
    reason: str = Field(description="Why this run, or why none, in one sentence.")
    retry_after_s: float | None = optional("Seconds after which to ask again; null: do not.")


class RunCreate(WireModel):
    """A run outside the plan: a training run, or a profiling run of a chosen configuration."""

    kind: RunKind = Field(description="`profile` or `train`.")
    configuration: Configuration = Field(
        description="The configuration that it runs. Without an `instance_type` it is of the job's only one, or of the "
        "only one with as many ranks per node; an option without a value has its first."
    )
    method: Name | None = optional("Quality method, for comparison on the quality page.")
    continues: Name | None = optional("The training run that this run resumes.")
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
    output: Annotated[str, AfterValidator(printable_lines), Field(max_length=65_536)] | None = optional(
        "The tail of the run's output so far; replaces the tail stored before."
    )


class Estimate(WireModel):
    """A predicted quantity with its 90 % prediction interval."""

    value: float = Field(description="The median, in the unit of the field's name.")
    low: float = Field(description="Lower end of the interval (5th percentile).")
    high: float = Field(description="Upper end of the interval (95th percentile).")


class Terms(WireModel):
    """Parts of the predicted step time in seconds, which add up to it."""

    compute_time_s: float = Field(description="Seconds of forward, backward and optimizer.")
    exposed_comm_time_s: float = Field(description="Seconds of communication not hidden behind compute.")
    input_time_s: float = Field(0.0, description="Seconds of waiting for data, judged by the waits of profiled runs.")
    skew_s: float = Field(0.0, description="Seconds of waiting for the slowest rank.")


class Candidate(WireModel):
    """A configuration with its predictions."""

    configuration: Configuration = Field(description="The configuration.")
    global_batch_size: int = Field(description="Examples per optimizer step.")
    step_time_s: Estimate = Field(description="Seconds per optimizer step.")
    epoch_time_s: Estimate = Field(description="Seconds per epoch.")
    total_time_s: Estimate = Field(description="Seconds of the whole training.")
    cost_usd: Estimate | None = optional("US dollars of the whole training; null without a price.")
    tokens_per_step: float | None = optional("Tokens per optimizer step; null if tokens are unknown.")
    tokens_per_s: Estimate | None = optional("Tokens per second of all ranks, at the step time.")
    usd_per_million_tokens: Estimate | None = optional("US dollars per million tokens; null without a price.")
    energy_kwh: Estimate | None = optional(
        "Kilowatt-hours of the accelerators for the whole training; null: no run has reported energy."
    )
    joules_per_example: Estimate | None = optional("Joules of the accelerators for an example.")
    energy_usd: Estimate | None = optional("US dollars of that energy; null without `usd_per_kwh`.")
    energy_gco2: Estimate | None = optional("Grams of CO2 of that energy; null without `gco2_per_kwh`.")
    memory_bytes: Estimate | None = optional("Peak bytes of one rank; null before anything is known of memory.")
    memory_fits: float | None = optional("Probability that it fits in memory.")
    unproved: bool = Field(False, description="True: no run has taken three steps of its local batch or a larger one.")
    terms: Terms | None = optional("Parts of the step time.")
    spot: bool = Field(False, description="True: cost and time are those of pre-emptible capacity.")
    profiled: bool = Field(False, description="True: it was measured.")
    extrapolated: bool = Field(False, description="True: it lies outside what was measured.")
    dominated: bool = Field(
        False, description="True: another candidate is no slower and costs no more, and is better in one of the two."
    )
    excluded_by: str | None = optional("The limit that excludes it, in one sentence.")
    statistical_efficiency: float | None = optional(
        "Progress per example relative to the base batch (see `quality`); null: gradient noise scale unknown."
    )
    learning_rate_factor: float | None = optional(
        "Learning rate over that of the base batch (see `quality`), by the rule for such a batch (see "
        "`scaling_rule`); null: the rule needs the gradient noise scale, which is unknown."
    )
    measured_step_time_s: float | None = optional("Measured seconds per optimizer step; null when not profiled.")


ScalingRule = Literal["gain"]


class Knee(WireModel):
    """The knee of the frontier of cost over time (by Kneedle), or the reason why there is none."""

    found: bool = Field(description="True: the frontier has a knee.")
    configuration: Configuration | None = optional("The candidate at the knee.")
    global_batch_size: int | None = optional("Its examples per optimizer step.")
    reason: str = Field(description="Where the knee is, or why there is none, in one sentence.")


class MenuPoint(WireModel):
    """A point on the frontier of time and cost, and its extra cost over the next slower point."""

    configuration: Configuration = Field(description="The configuration.")
    spot: bool = Field(False, description="True: cost and time are those of pre-emptible capacity.")
    global_batch_size: int = Field(description="Examples per optimizer step.")
    total_time_s: Estimate = Field(description="Seconds of the whole training.")
    cost_usd: Estimate | None = optional("US dollars of the whole training; null without a price.")
    usd_per_hour_saved: float | None = optional(
        "US dollars per hour saved against the next slower point; null at the slowest, and without a price."
    )
    energy_kwh: Estimate | None = optional("Kilowatt-hours of the accelerators; null: no run has reported energy.")
    energy_usd: Estimate | None = optional("US dollars of that energy; null without `usd_per_kwh`.")
    energy_gco2: Estimate | None = optional("Grams of CO2 of that energy; null without `gco2_per_kwh`.")
    recommended: bool = Field(False, description="True: it is the recommended point.")


class Quality(WireModel):
    """Whether the chosen batch should keep the accuracy of the base batch, for which the learning rate was tuned."""

    kept: bool = Field(
        description="True: most such training runs lost at most one point; false: the accuracy is at risk."
    )
    steps: int = Field(description="Optimizer steps of the training at the chosen batch.")
    base_batch_size: int = Field(description="The script's `small_batch_size`, else the smallest candidate, examples.")
    base_steps: int = Field(description="Optimizer steps of the training at that batch.")
    noise_scale: float | None = optional("Gradient noise scale in examples; null before 100 steps measured it.")
    sentence: str = Field(description="The same in words, with the remedy.")


class OptionEffect(WireModel):
    """The worth of an option's value: the best candidate with it, compared with the best with the option's first value.

    The two candidates may differ in nodes and batch; a factor of 0.5 halves the time. The other options are taken from
    two launches that differ only in this option and are nearest to the recommended options; without such launches, they
    are as recommended.
    """

    option: str = Field(description="Name of the option.")
    value: str = Field(description="The value.")
    base: str = Field(description="The option's first value, with which it is compared.")
    launched: bool = Field(description="True: a run with this value was measured; false: the factors are believed.")
    recommended: bool = Field(description="True: it is the recommended value.")
    time: Estimate | None = optional("Time of the whole training over that with the first value.")
    cost: Estimate | None = optional("Cost of the whole training over that with the first value; null without a price.")
    memory: Estimate | None = optional(
        "Peak bytes of one rank over those with the first value at equal batch; null before any is known."
    )
    most_gain: float | None = optional(
        "Largest share of the recommendation's time or cost that it could save (0.01: 1 %), if it was not launched."
    )
    left_out: str | None = optional("Why no candidate has this value, in one sentence: no launch with it succeeded.")
    sentence: str = Field(description="The same in words.")


class ModelReport(WireModel):
    """The model behind the predictions, its data and its error."""

    form: str = Field(description="Name of the step-time model.")
    version: str = Field(description="Version of the fit; changes with the data.")
    num_runs: int = Field(description="Number of runs that were fitted.")
    num_samples: int = Field(description="Number of samples that were fitted.")
    cross_validated_error: float | None = optional("Median relative error, one run left out; null with too few runs.")
    warnings: list[str] = Field([], description="Warnings to read before trusting the predictions, one sentence each.")


class Recommendation(WireModel):
    """The recommended configuration with all candidates and reasons."""

    id: str = Field(description="Identifier of this recommendation, as in the ledger.")
    job_id: str = Field(description="The job.")
    created_at: Timestamp = Field(description="When it was computed (RFC 3339, with time zone).")
    basis: Basis = Field(
        description="What it rests on: `prior` the specification, `transfer` earlier jobs, `probed` this job's runs on "
        "one node and a probe of the network, `profiled` this job's runs."
    )
    objective: str = Field(description="What was optimized.")
    chosen: Candidate | None = optional("The recommended candidate; null: none is within the limits.")
    runner_up: Candidate | None = optional("The next best candidate.")
    least_time: Candidate | None = optional("The candidate of least expected time.")
    least_cost: Candidate | None = optional("The candidate of least expected cost; null without a price.")
    balanced: Candidate | None = optional("What the objective `balanced` chooses among the candidates.")
    with_base_options: Candidate | None = optional(
        "What the objective chooses if each option has its first value, as the script runs today; null: no options."
    )
    options: list[OptionEffect] = Field(
        [], description="What each further value of each option is worth; empty before a run was measured."
    )
    knee: Knee = Field(description="The knee of the frontier of cost over time.")
    quality: Quality | None = optional("The effect of the chosen batch on the accuracy; null: nothing is chosen.")
    why: str = Field(description="Reason for the choice, the runner-up, and what limits excluded.")
    scaling_rule: ScalingRule | None = optional(
        "What to do with the learning rate of the smallest global batch: `gain` let `TulaOptimizer` scale "
        "it by the noise scale; null: nothing is chosen, that batch itself, or an optimizer that no experiment used."
    )
    candidates: list[Candidate] = Field(description="All candidates, those excluded by a limit too.")
    frontier: list[Configuration] = Field(description="Candidates not dominated in time and cost.")
    menu: list[MenuPoint] = Field(
        [],
        description="Up to five points to choose among, the fastest first: of the frontier of what the objective may "
        "choose, the ends, the recommended one, and what lies farthest from these.",
    )
    max_local_batch_size: dict[str, int] = Field(
        {},
        description="Examples per micro-step by instance type, of the memory model, with the options of `chosen`; "
        "where nothing is chosen, with the first value of each option.",
    )
    max_sensible_batch_size: int | None = optional(
        "Examples per step; a larger batch hardly improves one. Null until a training run, or a profiling run of 100 "
        "steps, has shown the noise."
    )
    model: ModelReport = Field(description="The model behind the predictions.")


class Predictions(WireModel):
    """Predictions in answer to a what-if question."""

    job_id: str = Field(description="The job.")
    basis: Basis = Field(description="What the predictions rest on.")
    candidates: list[Candidate] = Field(description="One prediction per combination asked for.")
    model: ModelReport = Field(description="The model behind the predictions.")


class BatchStage(WireModel):
    """One stage of a batch schedule, which lasts until the next stage begins."""

    first_step: int = Field(description="Optimizer step with which it begins; 0: the first step of the training.")
    first_example: int = Field(description="Examples on which the stages before it train.")
    first_share: float = Field(description="The same as a share of all examples.")
    steps: int = Field(description="Its optimizer steps.")
    configuration: Configuration = Field(description="The best configuration for it, by the objective.")
    global_batch_size: int = Field(description="Examples per optimizer step.")
    noise_scale: float = Field(description="Least gradient noise scale from its beginning on, examples.")
    learning_rate_factor: float | None = optional(
        "Learning rate over that of the base batch, by the gain at this noise scale; `TulaOptimizer` applies it itself."
    )
    beta2: float | None = optional("Beta2 of Adam that keeps its half-life in examples; null for other optimizers.")
    time_s: Estimate = Field(description="Seconds of this stage, without its relaunch.")
    cost_usd: Estimate | None = optional("US dollars of this stage, without its relaunch; null without a price.")


class BatchSchedule(WireModel):
    """A batch that grows during training, in at most four stages, each on its best number of nodes."""

    job_id: str = Field(description="The job.")
    objective: str = Field(description="What was optimized.")
    stages: list[BatchStage] = Field(description="Two to four stages; empty: keep the constant batch.")
    steps: int = Field(0, description="Optimizer steps of all stages.")
    constant: Configuration | None = optional("The recommended configuration, with which the schedule is compared.")
    spot: bool = Field(False, description="True: cost and time are those of pre-emptible capacity.")
    base_batch_size: int | None = optional("The batch for which the learning rate was tuned, in examples.")
    tokens_per_example: float | None = optional("Tokens of an example; null: unknown, or no text.")
    noise_run_id: str | None = optional(
        "The training run whose gradient noise decides; null: none measured it throughout."
    )
    relaunch_s: float = Field(0.0, description="Seconds that each later stage takes to start again from a checkpoint.")
    time_s: Estimate | None = optional("Seconds of all stages and relaunches.")
    cost_usd: Estimate | None = optional("US dollars of all stages and relaunches; null without a price.")
    saved_s: Estimate | None = optional("Seconds saved against the constant batch; below zero: lost.")
    saved_usd: Estimate | None = optional("US dollars saved against the constant batch; null without a price.")
    sentence: str = Field(description="What the schedule saves, or why there is none, with the remedy.")
    risk: str | None = optional("What it may do to the accuracy; null without stages.")


class LedgerEntry(WireModel):
    """A past recommendation with the prices at that time, and the measurement that followed."""

    recommendation_id: str = Field(description="The recommendation.")
    created_at: Timestamp = Field(description="When it was made (RFC 3339, with time zone).")
    objective: str = Field(description="What was optimized.")
    basis: Basis = Field(description="The basis of the recommendation.")
    configuration: Configuration | None = Field(description="What was recommended; null: nothing.")
    prices: dict[str, object] = Field(description="Prices at that time, by instance type (US dollars).")
    model_version: str = Field(description="Version of the fit.")
    predicted_step_time_s: Estimate | None = Field(description="Predicted seconds per optimizer step.")
    predicted_cost_usd: Estimate | None = optional("Predicted US dollars of the whole training.")
    run_id: str | None = optional("The training run that followed; null: none did.")
    measured_step_time_s: float | None = optional("Measured seconds per optimizer step of that run.")
    error: float | None = optional("Measured over predicted, minus one.")
    within_interval: bool | None = optional("True: the measurement lies inside the prediction interval.")


class Ledger(WireModel):
    """Recommendations with their measurements, newest first."""

    entries: list[LedgerEntry] = Field(description="The entries, newest first.")


JOBS_COUNTED: Final = 1000
"""The total in a list of jobs is counted only up to this number, to limit the time for a list."""

Optimizer = Literal["sgd", "momentum", "adam", "other"]
JobState = Literal["planning", "ready", "training", "finished", "archived"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Sharding = Literal["none", "zero1", "zero2", "zero3"]
Gbps = Annotated[float, Field(ge=1e-6, le=1e9)]
EventKind = Literal["job", "run", "samples", "recommendation", "scaling", "drift", "advice"]


class ModelSpec(WireModel):
    """The network; every field except the name improves the first prediction."""

    name: Name = Field(description="Name of the network; jobs with the same name and device share what was learnt.")
    parameters: Annotated[int, Field(ge=1, le=2**50)] | None = optional("Number of trainable parameters.")
    flops_per_sample: Positive | None = optional("Forward and backward, floating point operations.")
    precision: Precision | None = optional("Precision of most arithmetic; `bf16` and `fp16` also if mixed with `fp32`.")
    activation_bytes_per_sample: Bytes | None = optional(
        "Bytes of activations that one more example holds at the peak of a step; the service refuses 0."
    )
    operations_per_step: Annotated[int, Field(ge=1, le=2**31)] | None = optional(
        "Operations of a forward and backward pass that start a kernel, for the step time of small batches."
    )
    convolution_elements_per_sample: Annotated[int, Field(ge=1, le=2**50)] | None = optional(
        "Most elements of an example in the input or output of a convolution; null: without one, or unknown."
    )
    transposed_elements_per_sample: Annotated[int, Field(ge=0, le=2**50)] | None = optional(
        "Elements of an example that the convolutions of a step read or make in channels-first memory: half precision "
        "on GPUs converts them. 0: none, as with channels-last memory."
    )
    reserved_ratio: Annotated[float, Field(ge=1, le=10)] | None = optional(
        "What the caching allocator takes from a full device over what is allocated there, as `estimate_memory` says."
    )
    tokens_per_example: Annotated[float, Field(ge=1, le=1e12)] | None = optional(
        "Tokens of an example, the mean where lengths differ; null: the length that the agent sees."
    )
    activation_checkpointing: bool = Field(
        False,
        description="True: the backward pass recomputes activations; `flops_per_sample` leaves the recomputation out.",
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
    """The price and interruptions of pre-emptible capacity."""

    usd_per_node_hour: Annotated[UsdPerHour, Field(gt=0)] = Field(description="US dollars per hour of one node.")
    interruptions_per_node_hour: Annotated[float, Field(ge=0, le=60)] = Field(
        description="Expected interruptions per hour of one node."
    )
    restart_s: Annotated[float, Field(ge=0, le=MAX_DURATION_S)] = Field(
        300.0, description="Seconds from an interruption until training runs again."
    )
    checkpoint_interval_s: Seconds = Field(1800.0, description="Seconds of training between two checkpoints.")


class Price(WireModel):
    """The price of an instance type: per node-hour, per GB-hour of accelerator memory used, or both."""

    usd_per_node_hour: UsdPerHour | None = optional("US dollars per hour of one node.")
    usd_per_gb_hour: UsdPerHour | None = optional("US dollars per hour of 1e9 bytes of accelerator memory.")
    spot: SpotPrice | None = optional("The same instance type as pre-emptible capacity; null: on demand only.")


class ClusterSpec(WireModel):
    """Nodes of one instance type that the job may use."""

    instance_type: Word = Field(DEFAULT_INSTANCE_TYPE, description="Name of the instance type, unique in the job.")
    min_nodes: Count = Field(1, description="Fewest nodes to consider.")
    max_nodes: Count = Field(description="Most nodes to consider.")
    ranks_per_node: Count = Field(1, description="Processes (accelerators) per node.")
    memory_bytes_per_rank: Bytes | None = optional("Bytes of memory that one rank may use; null: read from the device.")
    accelerator: Name | None = optional("For example V100-16GB; used only before the first measurement.")
    network_gbps: Gbps | None = optional("Gigabits per second between nodes; used only before the first measurement.")
    price: Price = Field(Price(), description="Price of one node; without any, costs are null.")

    @property
    def device(self) -> str | None:
        """Return the name of the accelerator in `DEVICES`, or None if the table does not have it."""
        return known_device(self.accelerator)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_nodes > self.max_nodes:
            raise ValueError(f"min_nodes ({self.min_nodes}) is above max_nodes ({self.max_nodes}): swap them")
        return self


class BatchSpec(WireModel):
    """The batches to consider; `global_batch_size` fixes the global batch."""

    min_local_batch_size: Count = Field(32, description="Fewest examples per rank and micro-step.")
    max_local_batch_size: Count | None = optional("Most examples per rank and micro-step. Default: bounded by memory.")
    global_batch_size: Count | None = optional("Examples per optimizer step, if it is fixed; null: it is chosen.")
    max_grad_accum_steps: Count = Field(1, description="Most micro-steps per optimizer step; 1 does not accumulate.")
    grad_accum_steps: Count | None = optional(
        "Micro-steps per optimizer step of a script that accumulates by itself; null: they are chosen."
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.grad_accum_steps is not None and self.max_grad_accum_steps > 1:
            raise ValueError("grad_accum_steps holds the micro-steps that max_grad_accum_steps lets vary: give one")
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
        description="What happens to a training run that exceeds its deadline or budget: an event says so, or `stop`: "
        "`tula run` ends its command.",
    )


_OptionNames = Annotated[list[OptionName], Field(min_length=1, max_length=MAX_OPTIONS)]


class ProfilingSpec(WireModel):
    """Limits and precision of profiling."""

    profiling_warmup_steps: WarmupSteps = Field(
        5,
        description="Steps that a profiling run discards first; at most 3 of a launch's second batch and those after "
        "it.",
    )
    measuring_steps: MeasuringSteps = Field(
        30,
        description="Steps that a profiling run measures; up to eight times as many while slow steps leave their mean "
        "open by more than 7 %, unless `precision` is 0.",
    )
    precision: Share = Field(0.02, description="Relative error of the step time at which a run ends early.")
    share_launches: bool = Field(
        True,
        description="One launch measures every local batch that the plan wants on a cluster, and `max_runs` counts "
        "launches; false: one batch per launch.",
    )
    max_runs: Count | None = optional("Most launches (without `share_launches`, most runs); null: the planner decides.")
    max_gpu_seconds: Positive | None = optional("Most seconds of all ranks together; null: unlimited.")
    memory_safety: Share = Field(0.95, description="Required probability that a recommended batch fits in memory.")
    only: _OptionNames | None = optional("Options that vary; the others keep their first value. Null: all vary.")


_PerKwh = Annotated[float, Strict(), Field(ge=0, le=1e6)]


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, (dict, ClusterSpec)) else value


class JobSpec(WireModel):
    """The specification of a job: the body of `POST /v1/jobs` and the content of `job.toml`."""

    name: Name = Field(description="Name of the job, for people.")
    model: ModelSpec = Field(description="The network.")
    dataset: DatasetSpec = Field(description="The data that make up an epoch.")
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
    usd_per_kwh: _PerKwh | None = optional(
        "US dollars per kilowatt-hour, if you pay for energy separately from the nodes."
    )
    gco2_per_kwh: _PerKwh | None = optional("Grams of CO2 per kilowatt-hour.")
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
    options: OptionValues = Field(
        {}, description="Values of each word of the launch command that Tula chooses, by its name; today's first."
    )
    profiling: ProfilingSpec = Field(ProfilingSpec(), description="How runs are measured, and how many.")

    @property
    def varied_options(self) -> dict[str, list[str]]:
        """Return the values to try by option; an option that `profiling.only` leaves out keeps only its first."""
        only = self.profiling.only
        return {name: values if only is None or name in only else values[:1] for name, values in self.options.items()}

    @property
    def base_options(self) -> Options:
        """Return the options with which the script runs today: the first value of each."""
        return complete(self.options, ())

    @property
    def option_combinations(self) -> list[Options]:
        """Return every combination of option values, the base first."""
        return combinations(self.options)

    @property
    def varied_combinations(self) -> list[Options]:
        """Return the combinations of option values to try, the base first."""
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
        "US dollars per hour, from now on; null removes it."
    )
    usd_per_kwh: _PerKwh | None = optional("US dollars per kilowatt-hour, from now on; null removes it.")
    gco2_per_kwh: _PerKwh | None = optional("Grams of CO2 per kilowatt-hour, from now on; null removes it.")
    limits: Limits | None = optional("Limits from now on; replaces all of them.")
    prices: Annotated[dict[str, Price], Field(title="Prices")] | None = optional("By instance type.")
    share_launches: bool | None = optional("`profiling.share_launches` from now on.")
    only: _OptionNames | None = optional("`profiling.only` from now on; null lets every option vary.")
    archived: bool | None = optional("True hides the job from lists, false shows it again.")
    retry_failed: bool = Field(False, description="True: failed runs no longer rule out their configuration.")


class JobSummary(WireModel):
    """A job as an entry of a list."""

    id: Id = Field(description="Identifier that the service assigned.")
    name: str = Field(description="Name of the job.")
    model_name: str = Field(description="Name of the network.")
    state: JobState = Field(description="State of the job.")
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
    """One page of jobs; `next_cursor` is None on the last page."""

    jobs: list[JobSummary] = Field(description="Jobs, newest first.")
    total: int = Field(
        description=f"Number of matching jobs, counted up to {JOBS_COUNTED:,}: that number means at least as many."
    )
    next_cursor: str | None = optional("Send it as `cursor` to get the next page; null on the last.")


class ProfilingCost(WireModel):
    """The cost of profiling so far and of the rest of the present plan, including the start-up of launches.

    The rest is estimated from predicted step times and the start-up of earlier launches, or 30 s before the first. An
    interrupted launch counts until its lease expired, and no longer counts once its runs are leased again. `at_most`
    also includes the launches that an adaptive search may add, up to its cap, each as long as the longest and as
    expensive as the most expensive launch of the plan.
    """

    spent_gpu_seconds: float = Field(description="Seconds of all ranks together, so far.")
    spent_usd: float | None = Field(description="US dollars of the nodes on demand, so far; null without prices.")
    launches_left: int = Field(description="Launches that wait or are in progress.")
    runs_left: int = Field(description="Runs that these launches measure.")
    left_s: float = Field(description="Seconds that these launches take one after another.")
    left_gpu_seconds: float = Field(description="Seconds of all their ranks together.")
    left_usd: float | None = Field(description="US dollars of their nodes on demand; null without prices.")
    launches_at_most: int = Field(description="Launches left, with those that the search may add.")
    at_most_s: float = Field(description="Seconds that these launches take one after another.")
    at_most_usd: float | None = Field(description="US dollars of their nodes on demand; null without prices.")


class Job(JobSummary):
    """A job with its specification and plan."""

    spec: JobSpec = Field(description="The specification as registered and changed since.")
    plan: list[Run] = Field(description="The profiling runs, including those that ended.")
    plan_reason: str = Field(description="Why these runs are planned, or why profiling stopped.")
    profiling_cost: ProfilingCost = Field(description="What profiling has cost, and what the rest of the plan costs.")


class JobCreated(WireModel):
    """The answer to a registration."""

    job: Job = Field(description="The job, registered or found.")
    recommendation: Recommendation = Field(description="The recommendation as of now.")
    runs: list[Run] = Field(description="The runs to profile next.")


class Event(WireModel):
    """A change of a job. Ids increase, so that a reader can resume after the last event that it received."""

    id: int = Field(description="Position in the job's stream; increases.")
    kind: EventKind = Field(description="What changed.")
    job_id: str = Field(description="The job.")
    run_id: str | None = optional("The run that changed, if one did.")
    at: Timestamp = Field(description="When it happened (RFC 3339, with time zone).")
    data: dict[str, Any] = Field({}, description="Details, by kind.")
