"""The profiling plan: which runs come next, decided anew whenever one ends, and why it stopped."""

from __future__ import annotations

from collections.abc import Sequence

import tula_wire as wire
from tula_service.domain import Collective, Objective, RunKind, RunState, Search
from tula_service.perfmodel import Goal, ObservationError, Plan, PlanBudget, plan
from tula_service.store import JobRecord, NewRun, RunRecord, Transaction
from tula_service.usecases import cold_start, convert, fitting, validation

__all__ = ["goal_of", "instruction_of", "replan"]

_DEFAULT_MOST_RUNS = 8
_ACTIVE = (RunState.PENDING, RunState.CLAIMED, RunState.RUNNING)
_STATES_KEPT = ("archived", "training")


def goal_of(spec: wire.JobSpec, objective: str | None = None) -> Goal:
    """What is to be chosen, on demand where an on-demand price is known and on spot capacity otherwise."""
    offers = {**convert.spot_offers_of(spec), **convert.offers_of(spec)}
    return Goal(Objective(objective or spec.objective), convert.training_of(spec), offers, convert.limits_of(spec))


def replan(tx: Transaction, job_id: str, *, retry_failed: bool = False) -> JobRecord:
    """Cancel pending runs that lost their point, add what the model asks for next, and say so on the job.

    Deterministic in what is stored; held under the job's lock, so that two runs that end at once plan once.
    """
    job = tx.jobs.lock(job_id)
    spec = fitting.spec_of(job)
    runs = tx.runs.list(job_id, kind=RunKind.PROFILE, limit=10_000, plan_order=True)
    try:
        evidence = fitting.evidence_of(tx, job, spec, retry_failed=retry_failed)
        active = [run for run in runs if run.state in _ACTIVE]
        feasible = set(evidence.candidates) - evidence.unavailable
        lost = [run.id for run in active if run.state is RunState.PENDING and run.configuration not in feasible]
        tx.runs.cancel_pending(job_id, lost)
        pending = [run.configuration for run in active if run.id not in set(lost)]
        found = plan(
            Search(spec.search),
            evidence.candidates,
            evidence.observed,
            goal=goal_of(spec),
            budget=_budget(spec, runs),
            prior=cold_start.prior_of(
                cold_start.lessons_of(tx, job, spec), spec, evidence.candidates, measured=evidence.observed is not None
            ),
            collective=Collective(spec.collective),
            memory=evidence.memory or None,
            pending=pending,
            unavailable=evidence.unavailable,
        )
    except ObservationError as error:
        # Nothing is left to choose from: what nobody has begun is cancelled, what is under way may end.
        tx.runs.cancel_pending(job_id, [run.id for run in runs if run.state is RunState.PENDING])
        pending = [run.configuration for run in runs if run.state in (RunState.CLAIMED, RunState.RUNNING)]
        evidence, found = None, Plan((), str(error))
    predicted = _predicted(tx, job, spec, evidence, found)
    position = max((run.position for run in runs), default=-1) + 1
    for offset, planned in enumerate(found.runs):
        new = NewRun(
            RunKind.PROFILE,
            planned.configuration,
            purpose=planned.purpose,
            instruction=instruction_of(spec),
            position=position + offset,
            predicted_step_time_s=predicted[offset] if predicted else None,
        )
        run = tx.runs.create(job_id, new)
        tx.events.append(job_id, "run", run_id=run.id, data={"state": run.state.value, "purpose": run.purpose})
    if evidence is not None and evidence.observed is not None and not found.runs and not pending:
        cold_start.remember(tx, job, fitting.fit(tx, job, spec, evidence))
        validation.validate(tx, job, spec, evidence)
    waiting = bool(found.runs) or bool(pending)
    reason = found.stop_reason or _progress(len(found.runs), len(pending))
    return _publish(tx, job, "planning" if waiting else "ready", reason)


def _predicted(
    tx: Transaction, job: JobRecord, spec: wire.JobSpec, evidence: fitting.Evidence | None, found: Plan
) -> list[float]:
    """What each planned run is expected to measure, once anything was measured at all."""
    if evidence is None or evidence.observed is None or not found.runs:
        return []
    model = fitting.fit(tx, job, spec, evidence)
    return [float(value) for value in model.predict([planned.configuration for planned in found.runs]).mean_s]


def _publish(tx: Transaction, job: JobRecord, state: str, reason: str) -> JobRecord:
    if job.state in _STATES_KEPT or (state == "ready" and job.state in ("training", "finished")):
        state = job.state
    if (state, reason) == (job.state, job.plan_reason):
        return tx.jobs.get(job.id)
    tx.events.append(job.id, "job", data={"state": state, "plan_reason": reason})
    return tx.jobs.update(job.id, state=state, plan_reason=reason)


def _budget(spec: wire.JobSpec, runs: Sequence[RunRecord]) -> PlanBudget:
    profiling = spec.profiling
    spent = sum(
        (run.finished_at - run.started_at).total_seconds() * run.configuration.world_size
        for run in runs
        if run.started_at is not None and run.finished_at is not None
    )
    return PlanBudget(
        max_runs=profiling.max_runs or _DEFAULT_MOST_RUNS,
        max_gpu_seconds=profiling.max_gpu_seconds,
        spent_gpu_seconds=max(spent, 0.0),
        steps_per_run=profiling.profiling_warmup_steps + profiling.measuring_steps,
    )


def instruction_of(spec: wire.JobSpec) -> dict[str, float]:
    """What the agent of a profiling run of this job does."""
    profiling = spec.profiling
    return {
        "profiling_warmup_steps": profiling.profiling_warmup_steps,
        "measuring_steps": profiling.measuring_steps,
        "precision": profiling.precision,
    }


def _progress(new: int, pending: int) -> str:
    total = new + pending
    return f"{total} profiling run{'s are' if total != 1 else ' is'} still to be measured." if total else "Waiting."
