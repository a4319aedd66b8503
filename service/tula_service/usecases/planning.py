"""Planning: after a change, compute a job's answer once, and store the plan and the recommendation that follow.

`replan` computes on a read-only snapshot, so that no writer waits for a fit. If anything but measurements changed
meanwhile, it computes again, and after four attempts under the job's lock. A plan that waits for a worker is marked on
the job (`PlanState`), in the transaction of the change: if the worker dies, the next claim computes the plan.
"""

from __future__ import annotations

from tula_service.analysis.answer import MODEL_VERSION, Analysis, Answer, analyse
from tula_service.analysis.plan import PlanDecision, instruction_of, plan_of
from tula_service.domain import PlanState, RunKind
from tula_service.store import JobRecord, NewRun, Store, Transaction
from tula_service.usecases import recommendations
from tula_service.usecases.recommendations import load_job_data, spec_of

ATTEMPTS = 4
_STATES_KEPT = ("archived", "training")


def replan(store: Store, job_id: str) -> str:
    """Bring a job's plan and recommendation up to date; returns the recommendation as JSON.

    Threads of one process that replan the same job queue up, and those that waited return what the first one stored.
    Raises NotFound when the job is gone, Busy when too many computations are queued.
    """
    with store.reading() as tx:
        asked = tx.jobs.get(job_id)
    with store.job_lock(job_id):
        with store.reading() as tx:
            job = tx.jobs.get(job_id)
            cached = None
            if job.plan_state is PlanState.CURRENT:
                cached = recommendations.cached(tx, asked, job.objective, or_newer=True)
        return cached or _replan(store, job_id)


def _replan(store: Store, job_id: str) -> str:
    for _ in range(ATTEMPTS):
        with store.compute_slot():
            with store.reading() as tx:
                job = tx.jobs.get(job_id)
                facts, data = _facts(tx, job), load_job_data(tx, job)
            analysis = analyse(data)
            decision = plan_of(analysis)
        with store.transaction() as tx:
            now = tx.jobs.lock(job_id)
            if now.data_version == job.data_version or _facts(tx, now) == facts:
                return _store(tx, now, analysis, decision)
    with store.transaction() as tx:
        job = tx.jobs.lock(job_id)
        data = load_job_data(tx, job)
        analysis = analyse(data)
        return _store(tx, job, analysis, plan_of(analysis))


def _facts(tx: Transaction, job: JobRecord) -> object:
    """Everything besides measurements that a plan rests on."""
    runs = tx.runs.list(job.id, limit=10_000)
    states = [(run.id, run.state, run.failed_local_batch_size, run.drifted) for run in runs]
    return job.spec, job.retried_up_to_key, states


def _store(tx: Transaction, job: JobRecord, analysis: Analysis, decision: PlanDecision) -> str:
    """Store the plan and the recommendation. The caller holds the job's lock and has compared the facts."""
    tx.runs.cancel_pending(job.id, decision.cancelled)
    for run_id, step_time_s in decision.predicted_step_time_s.items():
        tx.runs.update(run_id, predicted_step_time_s=step_time_s)
    for new in decision.new:
        run = tx.runs.create(
            job.id,
            NewRun(
                RunKind.PROFILE,
                new.configuration,
                purpose=new.purpose,
                instruction=instruction_of(spec_of(job)),
                position=new.position,
                predicted_step_time_s=new.predicted_step_time_s,
            ),
        )
        tx.events.append(job.id, "run", run_id=run.id, data={"state": run.state.value, "purpose": run.purpose})
    if decision.posteriors is not None:
        tx.lessons.put_posteriors(job.id, decision.posteriors)
    if isinstance(analysis, Answer) and decision.cross_validated_error is not None:
        tx.jobs.update(
            job.id,
            cross_validated_error=decision.cross_validated_error,
            cross_validated_runs=list(analysis.evidence.run_ids),
            cross_validated_model=MODEL_VERSION,
        )
    planned = _publish_state(tx, job, "planning" if decision.active else "ready", decision.reason)
    # New pending runs change no fit, so the answer also holds for the version that they make. Measurements that arrived
    # meanwhile do: then it is stored under the version that it was computed from.
    version = analysis.data.data_version
    if job.data_version == version:
        version = planned.data_version
    return recommendations.store_answer(tx, planned, analysis, version)


def _publish_state(tx: Transaction, job: JobRecord, state: str, reason: str) -> JobRecord:
    if job.state in _STATES_KEPT or (state == "ready" and job.state == "finished"):
        state = job.state
    if (state, reason) != (job.state, job.plan_reason):
        tx.events.append(job.id, "job", data={"state": state, "plan_reason": reason})
    return tx.jobs.update(job.id, state=state, plan_reason=reason, plan_state=PlanState.CURRENT.value)
