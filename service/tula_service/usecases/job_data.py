"""Loads `JobData`: the one place that reads what an analysis of a job needs."""

from __future__ import annotations

from typing import Any

import tula_wire as wire
from tula_service.analysis.job_data import (
    Drift,
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


def _drift(runs: list[RunRecord]) -> Drift | None:
    """The drift of the newest training run, if it has drifted and the cause is known."""
    newest = max((run for run in runs if run.kind is RunKind.TRAIN), key=lambda run: run.key, default=None)
    state = (newest.drift_state if newest is not None else None) or {}
    if newest is None or not newest.drifted or not state.get("sentence"):
        return None
    return Drift(str(state["sentence"]), state["ratios"], newest.id, state["level_s"])
