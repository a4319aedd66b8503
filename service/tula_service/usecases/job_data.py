"""Loads `JobData`, the input for analysing a job, and parts of stored specifications.

`load_job_data` reads all data that an analysis needs, within the caller's transaction.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

import tula_wire as wire
from tula_service.analysis.answer import MODEL_VERSION
from tula_service.analysis.hardware import agree
from tula_service.analysis.job_data import EarlierJob, JobData
from tula_service.analysis.scaling import NoiseCurve, noise_curve
from tula_service.domain import FloatArray, RunRecord
from tula_service.perfmodel.step_summary import summarise
from tula_service.store import Transaction
from tula_service.store.jobs import JobRecord
from tula_service.store.telemetry import MOST_CHUNKS
from tula_wire.options import combinations

M = TypeVar("M", bound=BaseModel)
MAX_RUNS = 10_000
_BOUNDS = {
    "less_than_equal": "le",
    "greater_than_equal": "ge",
}  # maps pydantic's error types to the context key of the bound
_MAX_EARLIER_JOBS = 200
_MAX_PROBES = 200
_RUNS_READ_FOR_NOISE, _TRAININGS_READ_FOR_NOISE, _STEPS_READ_FOR_NOISE = 6, 2, 1000
_TRAININGS_READ_FOR_SCHEDULE = 12
_RUNS_READ_FOR_TOKENS, _STEPS_READ_FOR_TOKENS = 4, 100
_RUNS_READ_FOR_SCALING = 2


def load_job_data(tx: Transaction, job: JobRecord) -> JobData:
    """Return the input for analysing this version of the job, limited to the newest runs and earlier jobs."""
    runs = sorted(tx.runs.list(job.id, limit=MAX_RUNS), key=lambda run: (run.position, run.key))
    trained = [run for run in runs if run.kind == "train" and run.state != "cancelled"]
    profiled = [run for run in runs if run.kind == "profile"]
    earlier = tx.posteriors.of_earlier_jobs(job.project_id, before=job.cursor, limit=_MAX_EARLIER_JOBS)
    return JobData(
        spec=read_spec(job),
        objective=job.objective,
        data_version=job.data_version,
        runs=runs,
        summaries=tx.samples.summaries(job.id, summarise),
        earlier_jobs=[_earlier_job(**row) for row in earlier],
        prediction_pairs=tx.posteriors.prediction_pairs(job.id),
        trained_noise=_columns(tx, trained, "gradient_noise_scale", _TRAININGS_READ_FOR_NOISE, _STEPS_READ_FOR_NOISE),
        profiled_noise=_columns(tx, profiled, "gradient_noise_scale", _RUNS_READ_FOR_NOISE, _STEPS_READ_FOR_NOISE),
        small_batch_size=_newest(tx, runs, "small_batch_size", _RUNS_READ_FOR_SCALING),
        directions=_newest(tx, runs, "directions", _RUNS_READ_FOR_SCALING) == 1.0,
        token_counts=_columns(tx, runs, "tokens_per_example", _RUNS_READ_FOR_TOKENS, _STEPS_READ_FOR_TOKENS),
        retried_up_to_key=job.retried_up_to_key,
        ignored_step_times=frozenset(run.id for run in runs if run.unsteady),
        probes=stored_probes(tx, job),
        cross_validated_error=job.cross_validated_error if job.cross_validated_model == MODEL_VERSION else None,
        cross_validated_runs=tuple(job.cross_validated_runs),
    )


def load_noise_curves(tx: Transaction, data: JobData) -> list[NoiseCurve]:
    """Return the noise curves of the newest training runs with samples, newest first, up to the first complete curve.

    A training run is skipped if its process used a configuration other than the planned one. Each launch of a batch
    schedule is a separate training run that covers only a part of training, so several runs may be needed.
    """
    trained = [run for run in data.runs if run.kind == "train" and run.configuration_mismatch is None]
    by_key = {run.key: run for run in trained}
    examples = data.spec.dataset.size * data.spec.epochs
    curves = []
    for key in _with_samples(trained, _TRAININGS_READ_FOR_SCHEDULE):
        series = tx.telemetry.read(key, "gradient_noise_scale", most_chunks=MOST_CHUNKS)
        batch = by_key[key].configuration.global_batch_size
        curves.append(
            noise_curve(by_key[key].id, series.steps, series.values, global_batch_size=batch, examples=examples)
        )
        if curves[-1].values:
            break
    return curves


def stored_probes(tx: Transaction, job: JobRecord) -> list[wire.FabricProbe]:
    """Return the probes of the job's instance types that the project's users or the job's runs sent, newest first.

    A probe from a run of another job is included only if a probe from a third job agrees with it, so that one job's
    token cannot change the recommendations for other jobs.
    """
    types = {cluster.instance_type for cluster in read_spec(job).cluster}
    stored = tx.fabrics.list(job.project_id, instance_types=types, limit=_MAX_PROBES)
    probes = [(read_stored(wire.FabricProbe, probe), of) for probe, _, of in stored]
    others = [(probe, of) for probe, of in probes if of not in (None, job.id)]

    def counts(probe: wire.FabricProbe, of: str | None) -> bool:
        return of in (None, job.id) or any(of != by and agree(probe, other) for other, by in others)

    return [probe for probe, of in probes if counts(probe, of)]


def find_cluster(job: JobRecord, configuration: wire.Configuration) -> wire.ClusterSpec | None:
    """Return the cluster with the configuration's instance type, or None if the job no longer has such a cluster."""
    return next(
        (cluster for cluster in read_spec(job).cluster if cluster.instance_type == configuration.instance_type), None
    )


def read_spec(job: JobRecord) -> wire.JobSpec:
    """Return the job's specification."""
    return read_stored(wire.JobSpec, job.spec)


def read_stored(model: type[M], stored: Mapping[str, Any]) -> M:
    """Return a stored value as a wire model; the value was valid when it was stored.

    Unknown fields are ignored. A number that violates a bound introduced after it was stored is replaced by this bound,
    so that the job can still be read and corrected.
    """
    try:
        return wire.read(model, dict(stored))
    except ValidationError as error:
        within = copy.deepcopy(dict(stored))
        for fault in error.errors():
            bound = fault.get("ctx", {}).get(_BOUNDS.get(fault["type"], ""))
            if bound is None:
                raise
            *path, name = fault["loc"]
            functools.reduce(operator.getitem, path, within)[name] = bound  # type: ignore[arg-type,index]
        return wire.read(model, within)


def _earlier_job(spec: Mapping[str, Any], **learned: Any) -> EarlierJob:
    clusters = tuple(read_stored(wire.ClusterSpec, cluster) for cluster in spec["cluster"])
    base = combinations(spec.get("options", {}))[0]
    return EarlierJob(model=read_stored(wire.ModelSpec, spec["model"]), clusters=clusters, base=base, **learned)


def _columns(tx: Transaction, runs: Sequence[RunRecord], name: str, num_runs: int, last_step: int) -> list[FloatArray]:
    """Return the values of a telemetry column for each of the newest `num_runs` runs that have samples."""
    with_samples = _with_samples(runs, num_runs)
    return [tx.telemetry.read(key, name, last_step=last_step, most_chunks=MOST_CHUNKS).values for key in with_samples]


def _newest(tx: Transaction, runs: Sequence[RunRecord], name: str, num_runs: int) -> float | None:
    """Return the last value of a telemetry column from the newest run that has any values, or None."""
    values = (tx.telemetry.newest(key, [name])[name] for key in _with_samples(runs, num_runs))
    return next((value for value in values if value is not None), None)


def _with_samples(runs: Sequence[RunRecord], num_runs: int) -> list[int]:
    """Return the keys of the newest runs that have samples."""
    return sorted((run.key for run in runs if run.num_samples), reverse=True)[:num_runs]
