"""What Tula answers: candidates with honest predictions, and the choice among them."""

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
    """Where the step's time goes, s; the parts add up to the predicted step time."""

    compute_time_s: float
    exposed_comm_time_s: float
    input_time_s: float = 0.0
    skew_s: float = 0.0


class Candidate(WireModel):
    """One configuration and what is expected of it."""

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
    excluded_by: str | None = Field(None, description="The limit that rules it out, in one sentence.")
    statistical_efficiency: float | None = None
    measured_step_time_s: float | None = None


class Knee(WireModel):
    """Where more batch stops paying, or why no such point exists."""

    found: bool
    configuration: Configuration | None = None
    global_batch_size: float | None = Field(None, description="On the fitted curve, before rounding to a candidate.")
    reason: str


class ModelReport(WireModel):
    """Which model spoke, and how far to trust it."""

    form: str
    version: str
    num_runs: int
    num_samples: int
    cross_validated_error: float | None = None
    warnings: list[str] = []


class Recommendation(WireModel):
    """A choice with everything needed to check it."""

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
    why: str = Field(description="One or two sentences: why this one, what the runner-up lacks, what a limit excluded.")
    candidates: list[Candidate]
    frontier: list[Configuration] = Field(description="Not dominated in time and cost.")
    max_local_batch_size: dict[str, int] = Field({}, description="By instance type, from the memory model.")
    max_sensible_batch_size: int | None = Field(None, description="Beyond it, extra examples hardly help a step.")
    model: ModelReport


class Predictions(WireModel):
    """Answers to a what-if."""

    job_id: str
    basis: Basis
    candidates: list[Candidate]
    model: ModelReport


class LedgerEntry(WireModel):
    """A past recommendation with the prices of its day, beside what then happened."""

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
    """Predicted against measured, newest first."""

    entries: list[LedgerEntry]
