"""The profiling plan: which runs come next, decided anew whenever one ends, and why it stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import tula_wire as wire
from tula_service.domain import Objective, RunKind, RunOrigin, RunState, Search, StepTimeForm
from tula_service.perfmodel.planner import Plan, PlanBudget, plan
from tula_service.perfmodel.points import ObservationError
from tula_service.perfmodel.recommend import Goal
from tula_service.perfmodel.step_time_model import StepTimeModel
from tula_service.store import JobRecord, NewRun, RunRecord, Transaction
from tula_service.usecases import cold_start, convert, fitting, validation
from tula_service.usecases.lessons import lessons_of, remember

__all__ = ["Draft", "commit", "draft", "goal_of", "instruction_of", "is_due", "mark_due"]

_DEFAULT_MOST_RUNS = 8
_ACTIVE = (RunState.PENDING, RunState.CLAIMED, RunState.RUNNING)
_STATES_KEPT = ("archived", "training")
_PLAN, _DUE, _DUE_FOR_MEMORY, _MADE = "plan due", "yes", "out of memory", "no"


def goal_of(spec: wire.JobSpec, objective: str | None = None) -> Goal:
    """What is to be chosen, on demand where an on-demand price is known and on spot capacity otherwise."""
    offers = {**convert.spot_offers_of(spec), **convert.offers_of(spec)}
    return Goal(Objective(objective or spec.objective), convert.training_of(spec), offers, convert.limits_of(spec))


@dataclass(frozen=True)
class Draft:
    """What planning decided from one version of a job's data; nothing of it holds before `commit`.

    `expected` is what each run that waits is now expected to measure, seconds by run id. `learnt` and `checked` are
    there when the plan is done: the model to remember, the error of leaving runs out.
    """

    data_version: int
    lost: tuple[str, ...]
    new: tuple[NewRun, ...]
    waiting: bool
    reason: str
    expected: Mapping[str, float] = field(default_factory=dict)
    learnt: StepTimeModel | None = None
    checked: str | None = None


def draft(tx: Transaction, job: JobRecord, *, retry_failed: bool = False) -> Draft:
    """Decide which pending runs lost their point and what to profile next, only reading; deterministic in what it read.

    All of planning's arithmetic happens here, so that nobody who writes waits for it.
    """
    spec = fitting.spec_of(job)
    runs = tx.runs.list(job.id, kind=RunKind.PROFILE, limit=10_000, plan_order=True)
    active = [run for run in runs if run.state in _ACTIVE]
    try:
        evidence = fitting.evidence_of(tx, job, spec, retry_failed=retry_failed)
        measured = evidence.observed is not None
        lessons = lessons_of(tx, job, spec)
        prior = cold_start.prior_of(lessons, spec, evidence.candidates, measured=measured)
        goal, budget = goal_of(convert.payable(spec, evidence.memory)), _budget(spec, runs)

        def wanted(pending: Sequence[RunRecord]) -> Plan:
            return plan(
                Search(spec.search),
                evidence.candidates,
                evidence.observed,
                goal=goal,
                budget=budget,
                prior=prior,
                form=StepTimeForm(spec.step_time_model),
                memory=evidence.memory or None,
                pending=[run.configuration for run in pending],
                unavailable=evidence.unavailable,
            )

        kept = _still_wanted(active, evidence)
        found = wanted(kept)
        if _measured_outside(runs, evidence, since=kept):
            kept, found = _made_anew(kept, found, wanted)
        lost = sorted({run.id for run in active} - {run.id for run in kept})
    except ObservationError as error:
        # Nothing is left to choose from: what nobody has begun is cancelled, what is under way may end.
        lost = [run.id for run in runs if run.state is RunState.PENDING]
        return Draft(job.data_version, tuple(lost), (), len(active) > len(lost), str(error))
    model = fitting.fit(tx, job, spec, evidence) if measured else None
    position = max((run.position for run in runs), default=-1) + 1
    waiting = bool(found.runs) or bool(kept)
    over = model is not None and not waiting
    return Draft(
        data_version=job.data_version,
        lost=tuple(lost),
        new=_new_runs(spec, found, model, position),
        waiting=waiting,
        reason=(found.stop_reason or _progress(len(found.runs), len(kept))) + _failures(runs, evidence),
        expected=_expected(model, [run for run in kept if run.state is RunState.PENDING]),
        learnt=model if over else None,
        checked=validation.error_of(tx, job, spec, evidence) if over else None,
    )


def _still_wanted(active: Sequence[RunRecord], evidence: fitting.Evidence) -> list[RunRecord]:
    """Who is at work goes on; a run that waits goes when it cannot fit, or when another has measured the same."""
    ids = {run.id for run in active}
    settled = {configuration for configuration, run_id in evidence.rows if run_id not in ids}
    feasible = set(evidence.candidates) - evidence.unavailable - settled
    return [run for run in active if run.state is not RunState.PENDING or run.configuration in feasible]


def _measured_outside(runs: Sequence[RunRecord], evidence: fitting.Evidence, *, since: Sequence[RunRecord]) -> bool:
    """True when a run of the user's own choice measured something that these, where they wait, were planned without."""
    measured = {run_id for _, run_id in evidence.rows}
    planned = min((run.key for run in since if run.state is RunState.PENDING), default=None)
    own = [run for run in runs if run.origin is RunOrigin.USER and run.id in measured]
    return planned is not None and any(run.key > planned for run in own)


def _made_anew(
    kept: list[RunRecord], found: Plan, wanted: Callable[[Sequence[RunRecord]], Plan]
) -> tuple[list[RunRecord], Plan]:
    """The plan as it would be had nothing waited, if that asks for fewer runs: what is known may be enough."""
    begun = [run for run in kept if run.state is not RunState.PENDING]
    anew = wanted(begun)
    if len(anew.runs) >= len(kept) - len(begun) + len(found.runs):
        return kept, found
    asked_for = {planned.configuration for planned in anew.runs}
    stays = [run for run in kept if run.state is not RunState.PENDING or run.configuration in asked_for]
    there = {run.configuration for run in stays}
    return stays, replace(anew, runs=tuple(each for each in anew.runs if each.configuration not in there))


def commit(tx: Transaction, job: JobRecord, decided: Draft) -> JobRecord:
    """Make a draft the plan. The caller holds the job's lock and has seen that its runs are still the draft's."""
    tx.runs.cancel_pending(job.id, decided.lost)
    for run_id, step_time_s in decided.expected.items():
        tx.runs.update(run_id, predicted_step_time_s=step_time_s)
    for new in decided.new:
        run = tx.runs.create(job.id, new)
        tx.events.append(job.id, "run", run_id=run.id, data={"state": run.state.value, "purpose": run.purpose})
    if decided.learnt is not None:
        remember(tx, job, decided.learnt)
    if decided.checked is not None:
        validation.keep(tx, job.id, decided.checked)
    _set_due(tx, job.id, _MADE)
    return _publish(tx, job, "planning" if decided.waiting else "ready", decided.reason)


def mark_due(tx: Transaction, job_id: str, *, memory: bool = False) -> None:
    """Say, in the transaction that changes what a plan rests on, that the job has to be planned anew after it.

    `memory`: a run has just run out of it, so what waits may not fit either.
    """
    if memory or not is_due(tx, job_id):
        _set_due(tx, job_id, _DUE_FOR_MEMORY if memory else _DUE)


def is_due(tx: Transaction, job_id: str, *, memory: bool = False) -> bool:
    """True while a change waits to be planned for (`memory`: an out-of-memory): whoever made it is at it, or died."""
    kept = tx.fits.get(job_id, _PLAN, data_version=0, model_version="1")
    return kept == _DUE_FOR_MEMORY or (kept == _DUE and not memory)


def _set_due(tx: Transaction, job_id: str, body: str) -> None:
    tx.fits.put(job_id, _PLAN, data_version=0, model_version="1", body=body)


def _new_runs(spec: wire.JobSpec, found: Plan, model: StepTimeModel | None, position: int) -> tuple[NewRun, ...]:
    """The planned runs, each with what it is expected to measure once anything was measured at all."""
    configurations = [planned.configuration for planned in found.runs]
    expected: list[float | None] = [None] * len(configurations)
    if model is not None and configurations:
        expected = [float(value) for value in model.predict(configurations).mean_s]
    return tuple(
        NewRun(
            RunKind.PROFILE,
            planned.configuration,
            purpose=planned.purpose,
            instruction=instruction_of(spec),
            position=position + offset,
            predicted_step_time_s=expected[offset],
        )
        for offset, planned in enumerate(found.runs)
    )


def _expected(model: StepTimeModel | None, runs: Sequence[RunRecord]) -> dict[str, float]:
    if model is None or not runs:
        return {}
    predicted = model.predict([run.configuration for run in runs]).mean_s
    return {run.id: float(value) for run, value in zip(runs, predicted, strict=True)}


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
        by_default=profiling.max_runs is None,
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


def _failures(runs: Sequence[RunRecord], evidence: fitting.Evidence) -> str:
    """How many configurations failed for a reason of their own, and the remedy; empty where none did."""
    failed = {run.configuration for run in runs if run.state is RunState.FAILED} & evidence.unavailable
    if not failed:
        return ""
    one = len(failed) == 1
    return (
        f" {len(failed)} configuration{'' if one else 's'} failed to run: fix the cause and register the job again to "
        f"retry {'it' if one else 'them'}."
    )
