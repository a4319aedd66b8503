"""Planning and recommending after a change: computed while only reading, then written in one short transaction."""

from __future__ import annotations

from tula_service.store import JobRecord, Store, Transaction
from tula_service.usecases import planning, recommend
from tula_service.usecases.choosing import Answer

__all__ = ["settle"]

_ATTEMPTS = 4


def settle(store: Store, job_id: str, *, retry_failed: bool = False) -> str:
    """Bring a job's plan and recommendation up to its data; the recommendation as JSON.

    Fits and searches see one data version and hold while nothing has changed but measurements, which may arrive all the
    time; else they are done again, after a few lost races under the job's lock. Two that settle the same runs at once
    plan once, since a run that is created changes them; in one process who waited while another settled finds it done.
    Raises NotFound when the job is gone, Busy when too many are before this one.
    """
    with store.reading() as tx:
        asked = tx.jobs.get(job_id)
    with store.job_lock(job_id):
        if not retry_failed:  # what failed is tried again by nobody else
            with store.reading() as tx:
                job = tx.jobs.get(job_id)
                kept = None if planning.is_due(tx, job_id) else recommend.at_least(tx, asked, job.objective)
            if kept is not None:
                return kept
        return _settle(store, job_id, retry_failed=retry_failed)


def _settle(store: Store, job_id: str, *, retry_failed: bool) -> str:
    for _ in range(_ATTEMPTS):
        with store.compute_slot() as tx:
            job = tx.jobs.get(job_id)
            facts = _facts(tx, job)
            decided = planning.draft(tx, job, retry_failed=retry_failed)
            found = recommend.compute(tx, job, job.objective)
        with store.transaction() as tx:
            now = tx.jobs.lock(job_id)
            measured = now.data_version != job.data_version
            if not measured or _facts(tx, now) == facts:
                planned = planning.commit(tx, now, decided)
                if not _tried_again(decided, found):
                    if measured:
                        return recommend.publish_as_of(tx, planned, job, job.objective, found)
                    # Runs that are only planned change no fit: what was found holds for the version that they make.
                    return recommend.publish(tx, planned, job.objective, found)
                retry_failed = False  # they are planned now, and no longer count as failed: find the answer anew
    with store.transaction() as tx:
        return _under_lock(tx, job_id, retry_failed=retry_failed)


def _facts(tx: Transaction, job: JobRecord) -> tuple[object, ...]:
    """All that a plan rests on besides measurements: what was asked for, and how its runs stand."""
    runs = tx.runs.list(job.id, limit=10_000)
    return job.spec, [(run.id, run.state, run.failed_local_batch_size, run.drifted) for run in runs]


def _tried_again(decided: planning.Draft, found: Answer | str) -> bool:
    """True when runs are planned that the answer took for failed."""
    return isinstance(found, Answer) and any(new.configuration in found.evidence.unavailable for new in decided.new)


def _under_lock(tx: Transaction, job_id: str, *, retry_failed: bool) -> str:
    job: JobRecord = tx.jobs.lock(job_id)
    job = planning.commit(tx, job, planning.draft(tx, job, retry_failed=retry_failed))
    return recommend.body_of(tx, job)
