"""Values that the store takes and returns where the wire has no model of them: frozen, times aware and in UTC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from tula_service.domain import PlanState
from tula_wire import Configuration
from tula_wire.enums import Basis, Objective, RunKind, RunOrigin, RunState

JsonObject: TypeAlias = dict[str, Any]
FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]
PredictionPairs: TypeAlias = list[list[float]]
JobOrder: TypeAlias = Literal["newest", "name", "time", "cost", "error"]


@dataclass(frozen=True)
class NewJob:
    """A job to be registered; `fingerprint` is a digest of the request, compared when an idempotency key comes back."""

    project_id: str
    name: str
    model_name: str
    objective: Objective
    spec: JsonObject
    idempotency_key: str | None = None
    fingerprint: str | None = None


@dataclass(frozen=True)
class JobRecord:
    """A job; `data_version` grows with anything that can change a fit, and so keys every cached answer.

    `recommended`, `predicted_*`, `saving_*` and `prediction_error` are what a list shows; use cases keep them current.
    Failed runs with a key of at most `retried_up_to_key` may be profiled again. `cross_validated_error` is of exactly
    the runs `cross_validated_runs` and the model version `cross_validated_model`.
    """

    id: str
    project_id: str
    name: str
    model_name: str
    state: str
    objective: Objective
    spec: JsonObject
    data_version: int
    plan_reason: str
    created_at: datetime
    updated_at: datetime
    recommended: Configuration | None = None
    predicted_time_s: float | None = None
    predicted_cost_usd: float | None = None
    saving_vs_smallest_batch: float | None = None
    saving_vs_largest_batch: float | None = None
    prediction_error: float | None = None
    plan_state: PlanState = "current"
    retried_up_to_key: int = 0
    cross_validated_error: float | None = None
    cross_validated_runs: Sequence[str] = ()
    cross_validated_model: str | None = None
    runs_done: int = 0
    runs_planned: int = 0
    cursor: int = 0


@dataclass(frozen=True)
class JobPage:
    """Jobs in order; `next_cursor` goes into the next call, None on the last page."""

    jobs: list[JobRecord]
    total: int
    next_cursor: int | None


@dataclass(frozen=True)
class NewRun:
    """A run to be created; lower `position` is claimed first."""

    kind: RunKind
    configuration: Configuration
    state: RunState = "pending"
    origin: RunOrigin = "plan"
    purpose: str = ""
    instruction: JsonObject | None = None
    method: str | None = None
    position: int = 0
    predicted_step_time_s: float | None = None
    recommendation_id: str | None = None
    holder: str | None = None
    lease_s: float | None = None


@dataclass(frozen=True)
class SampleColumns:
    """Step samples as columns of one length; NaN means "not measured" and `straggler_rank` then holds -1."""

    step: IntArray
    step_time_s: FloatArray
    compute_time_s: FloatArray | None = None
    comm_time_s: FloatArray | None = None
    exposed_comm_time_s: FloatArray | None = None
    input_time_s: FloatArray | None = None
    optimizer_time_s: FloatArray | None = None
    skew_s: FloatArray | None = None
    straggler_rank: IntArray | None = None


@dataclass(frozen=True)
class NewChunk:
    """A columnar piece of a run's telemetry; `values` has shape (columns, steps), NaN where nothing was measured."""

    rank: int
    boot_id: str
    sequence: int
    steps: IntArray
    names: Sequence[str]
    values: FloatArray


@dataclass(frozen=True)
class LedgerOutcome:
    """The measured result of a run that followed a recommendation; several runs may follow one."""

    run_id: str
    measured_step_time_s: float
    error: float | None
    within_interval: bool | None
    at: datetime | None = None


@dataclass(frozen=True)
class LedgerRecord:
    """A recommendation as it was given, never changed; intervals are (value, low, high).

    `interval_scale` is how much wider calibration had made the step time's interval than the model gave it; None in
    entries from before it was kept.
    """

    id: str
    job_id: str
    objective: Objective
    basis: Basis
    configuration: Configuration | None
    prices: Mapping[str, Any]
    model_version: str
    data_version: int
    predicted_step_time_s: tuple[float, float, float] | None
    predicted_cost_usd: tuple[float, float, float] | None
    interval_scale: float | None = None
    created_at: datetime | None = None
    outcome: LedgerOutcome | None = None


@dataclass(frozen=True)
class JobOutcome:
    """An entry of the ledger with its outcome, and what it was of."""

    entry: LedgerRecord
    job_name: str
    model_name: str
    spec: JsonObject


@dataclass(frozen=True)
class EarlierLessons:
    """What an earlier job taught, with its specification; pairs are (predicted, low, high, measured) step times."""

    spec: JsonObject
    posteriors: JsonObject
    prediction_pairs: PredictionPairs


@dataclass(frozen=True)
class FabricRecord:
    """What a probe measured of a fabric (`tula_wire.FabricProbe`)."""

    probe: JsonObject
    created_at: datetime
