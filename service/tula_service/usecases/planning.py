"""Computes the plan and the recommendation of a job once after each change to the job, and stores both.

A fit runs on a read-only snapshot, so that no writer waits for it. If anything other than measurements changes during
the fit, the computation is repeated; after four attempts, the job's lock is held during the computation. Each
transaction that changes a job also marks the job's plan as stale (`PlanState`), so that the next claim computes the
plan even if the worker dies. Recommendations are cached per version of a job's data, and recorded in the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import tula_wire as wire
from tula_service.analysis.answer import MODEL_VERSION
from tula_service.analysis.plan import PlanDecision
from tula_service.analysis.questions import Findings, report_findings
from tula_service.errors import StoreUnavailable
from tula_service.fits import Compute
from tula_service.store import Store, Transaction
from tula_service.store.jobs import JobRecord
from tula_service.usecases import ledger
from tula_service.usecases.job_data import MAX_RUNS, load_job_data
from tula_wire.enums import Objective

ATTEMPTS = 4
_UNSTORED = "recommendation-unstored"
"""The id of a recommendation that is not stored in the database."""
_STATES_KEPT = ("archived", "training")


def replan(store: Store, job_id: str) -> str:
    """Update a job's plan and recommendation, and return the recommendation as JSON.

    Only one thread of a process computes at a time; threads that waited for the same job return the first thread's
    result. Raises NotFound if the job was deleted, and Busy if too many computations are queued.
    """
    with store.reading() as tx:
        asked = tx.jobs.get(job_id)
    with store.fits.turn() as compute:
        with store.reading() as tx:
            job, body = tx.jobs.get(job_id), None
            if job.plan_state == "current":
                body = cached(tx, job_id, job.objective, asked.data_version, or_newer=True)
        return body or answer(store, compute, job_id, None, plan=True)


def answer(
    store: Store, compute: Compute, job_id: str, objective: Objective | None, *, plan: bool, keep: bool = True
) -> str:
    """Analyse a job, store the recommendation (with `plan`, also the plan), and return the recommendation as JSON.

    The caller must hold the turn (`Fits.turn`) that yielded `compute`. If `keep` is False because the caller has
    read-only access, nothing is stored, not even in the ledger.
    """
    for _ in range(ATTEMPTS):
        with store.reading() as tx:
            job = tx.jobs.get(job_id)
            facts, data = _facts(tx, job, plan), load_job_data(tx, job)
        findings = compute(report_findings, data, objective, plan)
        if not keep:
            return _rendered(job, findings, _UNSTORED, store.now())
        try:
            with store.transaction() as tx:
                now = tx.jobs.lock(job_id)
                if now.data_version == job.data_version or _facts(tx, now, plan) == facts:
                    return store_answer(tx, now, findings)
        except StoreUnavailable:  # the disk is full or the role is read-only, but the result is valid
            if plan:
                raise
            return _rendered(job, findings, _UNSTORED, store.now())
    with store.transaction() as tx:
        job = tx.jobs.lock(job_id)
        return store_answer(tx, job, compute(report_findings, load_job_data(tx, job), objective, plan))


def store_answer(tx: Transaction, job: JobRecord, findings: Findings) -> str:
    """Store the plan, if any, then cache the recommendation, record it in the ledger, and return it as JSON.

    If the data have changed and a newer recommendation is cached, the newer one is returned. The caller must hold the
    job's lock and must have checked that the facts (`_facts`) did not change during the fit.
    """
    # New pending runs do not affect the fit, so the result is also valid for the version that they create. If
    # measurements arrived during the fit, the result is stored under the version from which it was computed.
    version, objective = findings.data_version, findings.objective
    is_newest = job.data_version == version
    if findings.decision is not None:
        job = _store_plan(tx, job, findings.decision, findings.run_ids)
    if is_newest:
        version = job.data_version
    elif (newer := cached(tx, job.id, objective, version, or_newer=True)) is not None:
        return newer
    entry = ledger.enter(tx, job, findings, version)
    body = _rendered(job, findings, entry.recommendation_id, entry.created_at)
    tx.answers.put(job.id, f"recommendation:{objective}", data_version=version, model_version=MODEL_VERSION, body=body)
    if objective == job.objective:
        chosen = findings.chosen
        smallest, largest = findings.savings
        tx.jobs.update(  # these columns are shown in lists of jobs
            job.id,
            recommended=None if chosen is None else chosen.configuration,
            predicted_time_s=None if chosen is None else chosen.total_time_s.value,
            predicted_cost_usd=None if chosen is None or chosen.cost_usd is None else chosen.cost_usd.value,
            saving_vs_smallest_batch=smallest,
            saving_vs_largest_batch=largest,
        )
    return body


class _Identity(wire.WireModel):
    id: str
    job_id: str
    created_at: datetime


def _rendered(job: JobRecord, findings: Findings, recommendation_id: str, created_at: datetime) -> str:
    """Return the recommendation as JSON, with its id, its job and its time of creation."""
    head = _Identity(id=recommendation_id, job_id=job.id, created_at=created_at).model_dump_json()
    return f"{head[:-1]},{findings.body[1:]}"


def _store_plan(tx: Transaction, job: JobRecord, decision: PlanDecision, run_ids: Sequence[str]) -> JobRecord:
    for run_id in decision.cancelled:
        tx.runs.transition(run_id, expected=["pending"], to="cancelled")
    for run_id, step_time_s in decision.predicted_step_time_s.items():
        tx.runs.update(run_id, predicted_step_time_s=step_time_s)
    for new in decision.new:
        run = tx.runs.create(job.id, new)
        tx.events.append(job.id, "run", run_id=run.id, data={"state": run.state, "purpose": run.purpose})
    if decision.posteriors is not None:
        tx.posteriors.put_posteriors(job.id, decision.posteriors)
    if decision.cross_validated_error is not None:
        tx.jobs.update(
            job.id,
            cross_validated_error=decision.cross_validated_error,
            cross_validated_runs=list(run_ids),
            cross_validated_model=MODEL_VERSION,
        )
    state, reason = "planning" if decision.active else "ready", decision.reason
    if job.state in _STATES_KEPT or (state == "ready" and job.state == "finished"):
        state = job.state
    if (state, reason) != (job.state, job.plan_reason):
        tx.events.append(job.id, "job", data={"state": state, "plan_reason": reason})
    return tx.jobs.update(job.id, state=state, plan_reason=reason, plan_state="current")


def _facts(tx: Transaction, job: JobRecord, plan: bool) -> object:
    """Return all inputs of a recommendation except measurements; with `plan`, also the inputs of the plan."""
    runs = tx.runs.list(job.id, limit=MAX_RUNS) if plan else ()
    states = [(run.id, run.state, run.failed_local_batch_size, run.drift_sentence) for run in runs]
    return job.spec, job.retried_up_to_key if plan else None, states


def cached(
    tx: Transaction, job_id: str, objective: Objective, data_version: int, *, or_newer: bool = False
) -> str | None:
    """Return the cached recommendation for this version of the data (or a later one, if `or_newer`), else None."""
    versions: dict[str, Any] = {"data_version": data_version, "model_version": MODEL_VERSION}
    return tx.answers.get(job_id, f"recommendation:{objective}", **versions, or_newer=or_newer)
