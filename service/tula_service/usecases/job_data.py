"""Loads `JobData`: the one place that reads what an analysis of a job needs."""

from __future__ import annotations

from typing import Any

import tula_wire as wire
from tula_service.analysis.job_data import (
    EarlierJob,
    JobData,
    JobRun,
    Posterior,
    PredictionPair,
)
from tula_service.domain import RunKind
from tula_service.store import EarlierLessons, JobRecord, RunRecord, Transaction

_MAX_RUNS = 10_000
_MAX_EARLIER_JOBS = 200


def load(tx: Transaction, job: JobRecord) -> JobData:
    """Everything that an analysis of this version of the job reads; bounded, however many jobs the project has."""
    runs = tx.runs.list(job.id, limit=_MAX_RUNS, plan_order=True)
    thresholds = tx.scaling.latest(job.id)
    earlier = tx.lessons.of_earlier_jobs(job.project_id, before=job.cursor, limit=_MAX_EARLIER_JOBS)
    return JobData(
        spec=spec_of(job),
        objective=job.objective,
        data_version=job.data_version,
        runs=[_job_run(run) for run in runs],
        summaries=tx.samples.summaries(job.id),
        earlier_jobs=[_earlier_job(each) for each in earlier],
        prediction_pairs=[PredictionPair(*pair) for pair in tx.lessons.prediction_pairs(job.id)],
        gradient_noise_scale=None if thresholds is None else thresholds.body.get("gradient_noise_scale"),
        retried_up_to_key=job.retried_up_to_key,
        drift=_drift(runs),
        ignored_step_times=frozenset(run.id for run in runs if _unsteady(run)),
    )


def spec_of(job: JobRecord) -> wire.JobSpec:
    """The job's specification. It was valid when it was stored, and readers ignore unknown fields."""
    return wire.read(wire.JobSpec, job.spec)


def _job_run(run: RunRecord) -> JobRun:
    duration_s = None
    if run.started_at is not None and run.finished_at is not None:
        duration_s = (run.finished_at - run.started_at).total_seconds()
    return JobRun(run.id, run.key, run.kind, run.state, run.configuration, run.position, duration_s)


def _earlier_job(earlier: EarlierLessons) -> EarlierJob:
    spec: dict[str, Any] = earlier.spec
    return EarlierJob(
        model=wire.read(wire.ModelSpec, spec["model"]),
        clusters=tuple(wire.read(wire.ClusterSpec, each) for each in spec["cluster"]),
        posteriors={
            name: Posterior(tuple(each["mean"]), tuple(each["sd"]), float(each["reference_batch_size"]))
            for name, each in earlier.posteriors.items()
        },
        prediction_pairs=tuple(PredictionPair(*pair) for pair in earlier.prediction_pairs),
    )


def _drift(runs: list[RunRecord]) -> str | None:
    """How the newest training run has changed its speed, if it has and the cause was diagnosed."""
    newest = max((run for run in runs if run.kind is RunKind.TRAIN), key=lambda run: run.key, default=None)
    if newest is None or not newest.drifted:
        return None
    return (newest.drift_state or {}).get("sentence")


def _unsteady(run: RunRecord) -> bool:
    """True if the run's speed changed while it ran; runs from before this was stored have only `drifted`."""
    return bool((run.drift_state or {}).get("unsteady", run.drifted))
