"""The types that store, perfmodel and usecases share, as frozen dataclasses; times are timezone-aware and in UTC.

They include inputs of the store for which the wire has no model.
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
"""The states to which a report may move a run, by its state and end cause; a combination not listed is final.

A report is a PATCH by the run's holder. A vanished training run may report because it was still alive. Two transitions
need no report: a claim moves pending to claimed, and an expired lease moves a profiling run back to pending.
"""


def _mismatch_sentence(
    run_id: str,
    planned: Configuration,
    world_size: int | None,
    local_batch_size: int | None,
    grad_accum_steps: int | None,
) -> str | None:
    """Return a sentence for the user if a run's process observed another configuration than planned, else None."""
    world = world_size or planned.world_size
    batch = local_batch_size or planned.local_batch_size
    steps = grad_accum_steps or planned.grad_accum_steps
    if (batch, steps, world) == (planned.local_batch_size, planned.grad_accum_steps, planned.world_size):
        return None
    if (batch, world) == (planned.local_batch_size, planned.world_size):
        remedy = (
            f"the script accumulates by itself: write batch.grad_accum_steps = {steps} into the job, or pass "
            "{grad_accum_steps} on to the script."
        )
    else:
        lowers = ""
        if batch < planned.local_batch_size and world == planned.world_size:
            lowers = f"; where it lowers its batch for want of memory, set batch.max_local_batch_size = {batch}"
        remedy = (
            f"pass {{local_batch_size}} and {{world_size}} on to the script and its launcher{lowers}; where the batch "
            "is counted wrongly, state it by tula_agent.init(batch_size=...)."
        )
    return (
        f"Run {run_id} was to use local batch {planned.local_batch_size}, {planned.grad_accum_steps} accumulation "
        f"step(s) and {planned.world_size} rank(s), but its process saw {batch}, {steps} and {world}: {remedy}"
    )


@dataclass(frozen=True)
class NewRun:
    """A run to create; runs with a lower `position` are claimed first."""

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
    """A run and its outcome; `key` is the integer by which samples and chunks refer to it.

    `step_time_s`, `num_steps`, `straggler_rank` and the `observed_*` figures come from the last summary. The
    `observed_*` figures are the configuration that the run's process observed; None if they were not reported.
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
        """Return True while the run's speed differs from the prediction."""
        return self.drift_sentence is not None

    @property
    def configuration_mismatch(self) -> str | None:
        """A sentence for the user if the run's process saw another configuration than planned."""
        seen = self.observed_world_size, self.observed_local_batch_size, self.observed_grad_accum_steps
        return _mismatch_sentence(self.id, self.configuration, *seen)


@dataclass(frozen=True)
class BucketTimeline:
    """The size in bytes of each bucket of gradients and the seconds until it was complete, in the order of
    reduction; both (n,).
    """

    bucket_bytes: tuple[float, ...]
    ready_s: tuple[float, ...]


@dataclass(frozen=True)
class RunSummary:
    """The figures of one run that a fit reads: robust averages over its last measured steps, and its memory.

    `step_time_s` to `exposed_comm_time_s`, `input_time_s` and `optimizer_time_s` come from `perfmodel.step_summary`.
    `num_samples` counts the measured samples of all ranks, and `num_steps` the steps behind the figures. `world_size`,
    `local_batch_size` and `grad_accum_steps` are as the process observed them; None if it did not report them. `memory`
    is the reading of the rank with the highest peak.
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
        """A sentence for the user if the run's process saw another configuration than planned."""
        seen = self.world_size, self.local_batch_size, self.grad_accum_steps
        return _mismatch_sentence(self.run_id, self.configuration, *seen)


@dataclass(frozen=True)
class SampleColumns:
    """Step samples as columns of equal length; a missing measurement is NaN, or -1 in `straggler_rank`."""

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
    """A columnar piece of a run's telemetry; `values` has shape (columns, steps), with NaN for missing measurements."""

    rank: int
    boot_id: str
    sequence: int
    steps: IntArray
    names: Sequence[str]
    values: FloatArray
