"""`JobData`: everything that an analysis reads of one job. `usecases/job_data.py` loads it; nothing here does I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import tula_wire as wire
from tula_service.domain import RunKind, RunState, RunSummary
from tula_wire import Configuration


@dataclass(frozen=True)
class JobRun:
    """A run of the job. A later run has a larger `key`; `duration_s` is None until the run has ended."""

    id: str
    key: int
    kind: RunKind
    state: RunState
    configuration: Configuration
    position: int = 0
    duration_s: float | None = None


@dataclass(frozen=True)
class Posterior:
    """The step-time parameters that a job learned on one instance type, in the order of `perfmodel.PARAMETERS`."""

    mean: tuple[float, ...]
    sd: tuple[float, ...]
    reference_batch_size: float


@dataclass(frozen=True)
class PredictionPair:
    """The interval that the model predicted for a training run, before calibration, and its measured step time, s."""

    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float


@dataclass(frozen=True)
class EarlierJob:
    """An earlier job of the same project, with what it learned by instance type."""

    model: wire.ModelSpec
    clusters: tuple[wire.ClusterSpec, ...]
    posteriors: Mapping[str, Posterior]
    prediction_pairs: tuple[PredictionPair, ...] = ()


@dataclass(frozen=True)
class CrossValidation:
    """The median relative error of leave-one-out predictions over exactly the runs `run_ids`."""

    error: float
    run_ids: tuple[str, ...]


@dataclass(frozen=True)
class JobData:
    """One version of a job: its specification, its runs, what they measured, and what earlier jobs learned.

    `runs` are in the order in which the plan lists them; `summaries` cover the runs that have samples or ran out of
    memory, oldest first. `earlier_jobs` are newest first. `gradient_noise_scale` is in examples, None before a training
    run reported it. Failed runs whose key is at most `retried_up_to_key` do not rule out their configuration, since the
    job was registered again after them.
    """

    spec: wire.JobSpec
    objective: str
    data_version: int
    runs: Sequence[JobRun] = ()
    summaries: Sequence[RunSummary] = ()
    earlier_jobs: Sequence[EarlierJob] = ()
    prediction_pairs: Sequence[PredictionPair] = ()
    gradient_noise_scale: float | None = None
    retried_up_to_key: int = 0
    drift: str | None = None
    ignored_step_times: frozenset[str] = frozenset()

    @property
    def profile_runs(self) -> list[JobRun]:
        """The profiling runs, in plan order."""
        return [run for run in self.runs if run.kind is RunKind.PROFILE]

    def ignoring(self, run_id: str) -> JobData:
        """The same data without the step time of this run."""
        return replace(self, ignored_step_times=self.ignored_step_times | {run_id})

    def since(self, run_id: str, step_time_s: float, compute_time_s: float | None) -> JobData:
        """The same data with step times of this run, at its present speed, and of later runs only."""
        keys = {run.id: run.key for run in self.runs}
        ignored = {known for known, key in keys.items() if key < keys[run_id]}
        present = {"step_time_s": step_time_s, "compute_time_s": compute_time_s}
        present |= {"exposed_comm_time_s": None, "relative_sd": None}
        summaries = [replace(s, **present) if s.run_id == run_id else s for s in self.summaries]  # type: ignore[arg-type]
        return replace(self, summaries=summaries, ignored_step_times=frozenset(ignored))
