"""Recommendations and predictions: candidates, their predictions, and the choice among them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tula_wire._base import Timestamp, WireModel
from tula_wire.configurations import Configuration

Basis = Literal["prior", "transfer", "profiled"]


class Estimate(WireModel):
    """A predicted quantity with its 90 % prediction interval."""

    value: float
    low: float
    high: float


class Terms(WireModel):
    """Parts of the predicted step time, in seconds; they add up to it."""

    compute_time_s: float
    exposed_comm_time_s: float
    input_time_s: float = 0.0
    skew_s: float = 0.0


class Candidate(WireModel):
    """One configuration with its predictions."""

    configuration: Configuration
    global_batch_size: int
    step_time_s: Estimate
    epoch_time_s: Estimate
    total_time_s: Estimate
    cost_usd: Estimate | None = None
    memory_bytes: Estimate | None = None
    memory_fits: float | None = Field(None, description="Probability that it fits in memory.")
    terms: Terms | None = None
    spot: bool = False
    profiled: bool = False
    extrapolated: bool = False
    dominated: bool = False
    excluded_by: str | None = Field(None, description="The limit that excludes it, in one sentence.")
    statistical_efficiency: float | None = None
    measured_step_time_s: float | None = None


class Knee(WireModel):
    """The knee of time against batch size, or why there is none."""

    found: bool
    configuration: Configuration | None = None
    global_batch_size: float | None = Field(None, description="On the fitted curve, before rounding to a candidate.")
    reason: str


class ModelReport(WireModel):
    """The model behind the predictions, its data and its error."""

    form: str
    version: str
    num_runs: int
    num_samples: int
    cross_validated_error: float | None = None
    warnings: list[str] = []


class Recommendation(WireModel):
    """The recommended configuration with all candidates and reasons."""

    id: str
    job_id: str
    created_at: Timestamp
    basis: Basis
    objective: str
    chosen: Candidate | None = None
    runner_up: Candidate | None = None
    least_time: Candidate | None = None
    least_cost: Candidate | None = None
    knee: Knee
    why: str = Field(description="Reason for the choice, the runner-up, and what limits excluded.")
    candidates: list[Candidate]
    frontier: list[Configuration] = Field(description="Not dominated in time and cost.")
    max_local_batch_size: dict[str, int] = Field({}, description="By instance type, from the memory model.")
    max_sensible_batch_size: int | None = Field(None, description="A larger batch hardly improves a step.")
    model: ModelReport


class Predictions(WireModel):
    """Predictions for a what-if."""

    job_id: str
    basis: Basis
    candidates: list[Candidate]
    model: ModelReport


class LedgerEntry(WireModel):
    """A past recommendation with the prices of that time, and the measurement that followed."""

    recommendation_id: str
    created_at: Timestamp
    objective: str
    basis: Basis
    configuration: Configuration | None
    prices: dict[str, object]
    model_version: str
    predicted_step_time_s: Estimate | None
    predicted_cost_usd: Estimate | None = None
    run_id: str | None = None
    measured_step_time_s: float | None = None
    error: float | None = Field(None, description="Measured over predicted, minus one.")
    within_interval: bool | None = None


class Ledger(WireModel):
    """Recommendations with their measurements, newest first."""

    entries: list[LedgerEntry]
