"""Recommendations and predictions: candidates, their predictions, and the choice among them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tula_wire._base import Timestamp, WireModel, optional
from tula_wire.configurations import Configuration
from tula_wire.enums import Basis


class Estimate(WireModel):
    """A predicted quantity with its 90 % prediction interval."""

    value: float = Field(description="The median, in the unit of the field's name.")
    low: float = Field(description="Lower end of the interval (5th percentile).")
    high: float = Field(description="Upper end of the interval (95th percentile).")


class Terms(WireModel):
    """Parts of the predicted step time, in seconds; they add up to it."""

    compute_time_s: float = Field(description="Seconds of forward, backward and optimizer.")
    exposed_comm_time_s: float = Field(description="Seconds of communication not hidden behind compute.")
    input_time_s: float = Field(0.0, description="Seconds of waiting for data, as the profiled runs waited.")
    skew_s: float = Field(0.0, description="Seconds of waiting for the slowest rank.")


class Candidate(WireModel):
    """One configuration with its predictions."""

    configuration: Configuration = Field(description="The configuration.")
    global_batch_size: int = Field(description="Examples per optimizer step.")
    step_time_s: Estimate = Field(description="Seconds per optimizer step.")
    epoch_time_s: Estimate = Field(description="Seconds per epoch.")
    total_time_s: Estimate = Field(description="Seconds of the whole training.")
    cost_usd: Estimate | None = optional("US dollars of the whole training; null without a price.")
    tokens_per_step: float | None = optional("Tokens per optimizer step; null where tokens are unknown.")
    tokens_per_s: Estimate | None = optional("Tokens per second of all ranks, at the step time.")
    usd_per_million_tokens: Estimate | None = optional("US dollars per million tokens; null without a price.")
    memory_bytes: Estimate | None = optional("Peak bytes of one rank; null before anything is known of memory.")
    memory_fits: float | None = optional("Probability that it fits in memory.")
    terms: Terms | None = optional("Parts of the step time.")
    spot: bool = Field(False, description="True: cost and time are those of pre-emptible capacity.")
    profiled: bool = Field(False, description="True: it was measured.")
    extrapolated: bool = Field(False, description="True: it lies outside what was measured.")
    dominated: bool = Field(False, description="True: another is neither slower nor dearer, and better in one.")
    excluded_by: str | None = optional("The limit that excludes it, in one sentence.")
    statistical_efficiency: float | None = optional(
        "Progress per example against a small batch, 0 to 1; null: gradient noise scale unknown."
    )
    learning_rate_factor: float | None = optional(
        "Learning rate over that of the smallest global batch among the candidates, by the rule for such a "
        "batch (see `scaling_rule`); null: the rule needs the gradient noise scale, which is unknown."
    )
    measured_step_time_s: float | None = optional("Measured seconds per optimizer step; null when not profiled.")


ScalingRule = Literal["gain", "linear", "unscaled"]


class Knee(WireModel):
    """The knee of time against batch size, or why there is none."""

    found: bool = Field(description="True: the curve has a knee.")
    configuration: Configuration | None = optional("The candidate nearest the knee.")
    global_batch_size: float | None = optional("Examples per step on the fitted curve, not rounded to a candidate.")
    reason: str = Field(description="Where the knee is, or why there is none, in one sentence.")


class ModelReport(WireModel):
    """The model behind the predictions, its data and its error."""

    form: str = Field(description="Name of the step-time model.")
    version: str = Field(description="Version of the fit; changes with the data.")
    num_runs: int = Field(description="Number of runs that were fitted.")
    num_samples: int = Field(description="Number of samples that were fitted.")
    cross_validated_error: float | None = optional("Median relative error, one run left out; null with too few.")
    warnings: list[str] = Field([], description="What to know before trusting the predictions, one sentence each.")


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
    knee: Knee = Field(description="The knee of time against batch size.")
    why: str = Field(description="Reason for the choice, the runner-up, and what limits excluded.")
    scaling_rule: ScalingRule | None = optional(
        "What to do with the learning rate of the smallest global batch: `gain` let `TulaOptimizer` scale "
        "it by the noise scale (`linear` and `unscaled` are no longer used); null: nothing is chosen, that batch "
        "itself, or an optimizer that no experiment used."
    )
    candidates: list[Candidate] = Field(description="All candidates, those excluded by a limit too.")
    frontier: list[Configuration] = Field(description="Not dominated in time and cost.")
    max_local_batch_size: dict[str, int] = Field(
        {}, description="Examples per micro-step by instance type, of the memory model."
    )
    max_sensible_batch_size: int | None = optional("Examples per step; a larger batch hardly improves one.")
    model: ModelReport = Field(description="The model behind the predictions.")


class Predictions(WireModel):
    """Predictions for a what-if."""

    job_id: str = Field(description="The job.")
    basis: Basis = Field(description="What the predictions rest on.")
    candidates: list[Candidate] = Field(description="One prediction per combination asked for.")
    model: ModelReport = Field(description="The model behind the predictions.")


class LedgerEntry(WireModel):
    """A past recommendation with the prices of that time, and the measurement that followed."""

    recommendation_id: str = Field(description="The recommendation.")
    created_at: Timestamp = Field(description="When it was made (RFC 3339, with time zone).")
    objective: str = Field(description="What was optimized.")
    basis: Basis = Field(description="What it rested on.")
    configuration: Configuration | None = Field(description="What was recommended; null: nothing.")
    prices: dict[str, object] = Field(description="Prices of that time, by instance type (US dollars).")
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
