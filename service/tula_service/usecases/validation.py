"""How well the model predicts a run of this job that it has not seen: leave-one-out over what was measured."""

from __future__ import annotations

import json

import numpy as np

import tula_wire as wire
from tula_service.domain import StepTimeForm
from tula_service.perfmodel.step_time_model import fit_step_time
from tula_service.store import JobRecord, Transaction
from tula_service.usecases import cold_start
from tula_service.usecases.fitting import MODEL_VERSION, Evidence
from tula_service.usecases.lessons import lessons_of

__all__ = ["error_of", "keep", "kept_error"]

_FEWEST_RUNS, _MOST_RUNS = 4, 12
_KEPT = "cross-validation"


def error_of(tx: Transaction, job: JobRecord, spec: wire.JobSpec, evidence: Evidence) -> str | None:
    """The median relative error of leaving each run out in turn, as it is kept; a fit a run, so once a plan.

    None with too few runs to say, or so many that it would take long.
    """
    observed = evidence.observed
    if observed is None or not _FEWEST_RUNS <= len(observed) <= _MOST_RUNS:
        return None
    lessons = lessons_of(tx, job, spec)
    prior = cold_start.prior_of(lessons, spec, evidence.candidates, measured=True)
    form = StepTimeForm(spec.step_time_model)
    everything = np.arange(len(observed))
    errors = []
    for left_out in everything:
        rest = observed.take(everything != left_out)
        model = fit_step_time(rest, form=form, prior=prior, candidates=evidence.candidates)
        predicted = model.predict(observed.points.take([int(left_out)])).mean_s[0]
        errors.append(abs(predicted / observed.step_time_s[left_out] - 1.0))
    return json.dumps({"error": float(np.median(errors)), "runs": [run_id for _, run_id in evidence.rows]})


def keep(tx: Transaction, job_id: str, body: str) -> None:
    """Keep what `error_of` found."""
    tx.fits.put(job_id, _KEPT, data_version=0, model_version=MODEL_VERSION, body=body)


def kept_error(tx: Transaction, job_id: str, evidence: Evidence) -> float | None:
    """That error, while it is still one of exactly the runs of this evidence."""
    body = tx.fits.get(job_id, _KEPT, data_version=0, model_version=MODEL_VERSION)
    if body is None:
        return None
    kept = json.loads(body)
    return float(kept["error"]) if kept["runs"] == [run_id for _, run_id in evidence.rows] else None
