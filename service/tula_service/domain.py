"""Defines the types that `store`, `perfmodel` and `usecases` share as frozen dataclasses, with times in UTC.

Some of these types describe stored data for which `tula_wire` has no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from tula_wire.configurations import Configuration
from tula_wire.enums import FINAL_STATES, EndCause, RunKind, RunOrigin, RunState
from tula_wire.memory_breakdown import MemoryBreakdown

MemoryReading = MemoryBreakdown
JsonObject: TypeAlias = dict[str, Any]
FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]
PredictionPairs: TypeAlias = list[list[float]]
JobOrder: TypeAlias = Literal["newest", "name", "time", "cost", "error"]


_ANY_BUT_CLAIMED: Final = FINAL_STATES | frozenset[RunState]({"pending", "running"})
RUN_TRANSITIONS: Final[Mapping[tuple[RunState, EndCause | None], frozenset[RunState]]] = {
    ("pending", None): frozenset({"cancelled"}),
    ("claimed", None): _ANY_BUT_CLAIMED,
    ("running", None): _ANY_BUT_CLAIMED,
    ("failed", "vanished"): _ANY_BUT_CLAIMED - {"failed"},
}
"""The states to which a report may move a run, keyed by the run's state and end cause; other combinations are final.

A report is a PATCH request by the run's holder. A training run that was marked as vanished may still be alive and
report. Two transitions need no report: a claim moves a run from pending to claimed, and the expiry of its lease moves a
profiling run back to pending.
"""


def _mismatch_sentence(
    run_id: str,
    planned: Configuration,
    world_size: int | None,
    local_batch_size: int | None,
    grad_accum_steps: int | None,
) -> str | None:
    """Return a sentence for the user if a run's process did not use the planned configuration, else None."""
    world = world_size or planned.world_size
    batch = local_batch_size or planned.local_batch_size
    steps = grad_accum_steps or planned.grad_accum_steps
    if (batch, steps, world) == (planned.local_batch_size, planned.grad_accum_steps, planned.world_size):
        return None
    if (batch, world) == (planned.local_batch_size, planned.world_size):
        remedy = (
            f"the script sets its own gradient accumulation. Set batch.grad_accum_steps = {steps} in the job, or pass "
            "{grad_accum_steps} to the script."
        )
    else:
        lowers = ""
        if batch < planned.local_batch_size and world == planned.world_size:
            lowers = f"; if the script reduces its batch to save memory, set batch.max_local_batch_size = {batch}"
        remedy = (
            f"pass {{local_batch_size}} and {{world_size}} to the script and its launcher{lowers}; if the agent counts "
            "the batch incorrectly, pass it to tula_agent.init(batch_size=...)."
        )
    return (
        f"Run {run_id} was planned with local batch {planned.local_batch_size}, {planned.grad_accum_steps} "
        f"accumulation step(s) and {planned.world_size} rank(s), but used {batch}, {steps} and {world}: {remedy}"
    )


@dataclass(frozen=True)
class NewRun:
    """A run to be created; runs with a lower `position` are claimed first."""

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


@dataclass(frozen=True, kw_only=True)
class RunRecord(NewRun):
    """A stored run and its outcome; samples and chunks refer to the run by its integer `key`.

    `step_time_s`, `num_steps`, `straggler_rank` and the `observed_*` values come from the last summary. The
    `observed_*` values are the configuration that the run's process reported; each is None if it was not reported.
    """

    key: int
    id: str
    job_id: str
    project_id: str
    message: str | None
    end_cause: EndCause | None
    lease_expires_at: datetime | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    num_samples: int
    dropped: int
    lease: int
    failed_local_batch_size: int | None
    monitor: dict[str, Any] | None
    drift_sentence: str | None
    unsteady: bool
    time_limit_s: float | None
    step_time_s: float | None = None
    num_steps: int | None = None
    straggler_rank: int | None = None
    observed_world_size: int | None = None
    observed_local_batch_size: int | None = None
    observed_grad_accum_steps: int | None = None

    @property
    def drifted(self) -> bool:
        """Return True if the run's speed is known to differ from the prediction."""
        return self.drift_sentence is not None

    @property
    def configuration_mismatch(self) -> str | None:
        """Return a sentence for the user if the run used a configuration other than the planned one, else None."""
        seen = self.observed_world_size, self.observed_local_batch_size, self.observed_grad_accum_steps
        return _mismatch_sentence(self.id, self.configuration, *seen)


@dataclass(frozen=True)
class BucketTimeline:
    """The size of each gradient bucket, and the time from the start of the micro-step until the bucket was complete.

    Both arrays have shape (n,) and are in reduction order.
    """

    bucket_bytes: tuple[float, ...]
    ready_s: tuple[float, ...]


@dataclass(frozen=True)
class RunSummary:
    """The values of one run that a fit reads: robust averages over its last measured steps, and its memory.

    `perfmodel.step_summary` computes the fields from `step_time_s` to `exposed_comm_time_s`, `input_time_s` and
    `optimizer_time_s`. `num_samples` is the number of measured samples from all ranks, and `num_steps` is the number of
    steps averaged. `world_size`, `local_batch_size` and `grad_accum_steps` are the values that the process reported, or
    None. `memory` is the memory use of the rank with the highest peak.
    """

    run_id: str
    state: RunState
    configuration: Configuration
    num_samples: int
    step_time_s: float | None
    relative_sd: float | None
    compute_time_s: float | None
    exposed_comm_time_s: float | None
    world_size: int | None
    local_batch_size: int | None
    grad_accum_steps: int | None
    memory: MemoryReading | None
    failed_local_batch_size: int | None
    input_time_s: float | None = None
    optimizer_time_s: float | None = None
    energy_per_step_j: float | None = None
    num_steps: int | None = None
    timeline: BucketTimeline | None = None

    @property
    def configuration_mismatch(self) -> str | None:
        """Return a sentence for the user if the run used a configuration other than the planned one, else None."""
        seen = self.world_size, self.local_batch_size, self.grad_accum_steps
        return _mismatch_sentence(self.run_id, self.configuration, *seen)


@dataclass(frozen=True)
class SampleColumns:
    """Step samples as columns of equal length; missing measurements are NaN (in `straggler_rank`, they are -1)."""

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
    """A chunk of a run's telemetry; `values` has shape (columns, steps), with NaN for missing measurements."""

    rank: int
    boot_id: str
    sequence: int
    steps: IntArray
    names: Sequence[str]
    values: FloatArray
