"""Runs: claimed under a lease and moved from state to state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tula_wire as wire
from tula_service.domain import Configuration, RunKind, RunState
from tula_service.errors import Conflict, InvalidInput, NotFound
from tula_service.store import JobRecord, NewRun, RunRecord, Store, Transaction
from tula_service.usecases import convert, fitting, ledger, passes, planning, recommend, shown, watch
from tula_service.usecases.access import Principal, visible_job, visible_run
from tula_service.usecases.settle import settle

__all__ = ["TRANSITIONS", "claim", "create", "get", "give_up_vanished", "list_runs", "parse_cursor", "patch"]

TRANSITIONS: dict[RunState, frozenset[RunState]] = {
    RunState.PENDING: frozenset({RunState.CANCELLED}),
    RunState.CLAIMED: frozenset(set(RunState) - {RunState.CLAIMED}),
    RunState.RUNNING: frozenset(set(RunState) - {RunState.CLAIMED}),
}
"""Where a run may go from each state that is not final; nothing leaves a final state."""

_OPEN = (RunState.PENDING, RunState.CLAIMED, RunState.RUNNING)
_RETRY_AFTER_S = 2.0
_VANISHED = "Nothing was heard of this training since its lease ran out."
_AFTER_MEMORY = "A run has just run out of memory: the plan is being made anew."
_CONTINUED = "It ended without saying so: another run went on from it."
_NEVER_CALLED = (
    "No sample arrived: the command ended without calling the agent. Call tula_agent.init() in the training script "
    "and loop over run.steps(loader)."
)


def claim(store: Store, principal: Principal, job_id: str, request: wire.ClaimRequest) -> wire.RunClaimed:
    """Lease the next profiling run of the plan, or say why there is none."""
    answer = _claimed(store, principal, job_id, request)
    if answer is None:
        # Whoever ended the last run is still planning, or died over it: nobody may take that for the plan's end.
        settle(store, job_id)
        answer = _claimed(store, principal, job_id, request, settled=True)
    assert answer is not None
    return answer


def _claimed(
    store: Store, principal: Principal, job_id: str, request: wire.ClaimRequest, *, settled: bool = False
) -> wire.RunClaimed | None:
    """The same, or None while nothing may be claimed only because a plan is due."""
    with store.transaction() as tx:
        job = visible_job(tx, principal, job_id)
        if job.state == "archived":
            raise Conflict("This job is archived: un-archive it before profiling.")
        if planning.is_due(tx, job_id, memory=True):
            # What waits may not fit either: nobody gets it before the plan has been looked through.
            return wire.RunClaimed(run=None, reason=_AFTER_MEMORY, retry_after_s=_RETRY_AFTER_S) if settled else None
        run = tx.runs.claim(job_id, holder=request.holder, lease_s=request.lease_s, max_nodes=request.max_nodes)
        if run is not None:
            tx.events.append(job_id, "run", run_id=run.id, data={"state": run.state.value, "holder": request.holder})
            return wire.RunClaimed(run=shown.run(run), reason=run.purpose)
        active = tx.runs.list(job_id, kind=RunKind.PROFILE, states=_OPEN)
        if not active and not settled and planning.is_due(tx, job_id):
            return None
    if any(run.state is RunState.PENDING for run in active):
        least = min(run.configuration.num_nodes for run in active if run.state is RunState.PENDING)
        reason = f"Every run that is left needs at least {least} nodes: claim with max_nodes of at least that."
        return wire.RunClaimed(run=None, reason=reason, retry_after_s=_RETRY_AFTER_S)
    if active:
        reason = f"{len(active)} run(s) are at work elsewhere; the plan may go on when they end."
        return wire.RunClaimed(run=None, reason=reason, retry_after_s=_RETRY_AFTER_S)
    return wire.RunClaimed(run=None, reason=job.plan_reason or "The plan is done.")


def give_up_vanished(tx: Transaction, job_id: str) -> None:
    """Fail training runs of which nothing was heard since their lease ran out; one that speaks again goes on."""
    now = tx.now()
    for run in tx.runs.list(job_id, kind=RunKind.TRAIN, states=(RunState.CLAIMED, RunState.RUNNING)):
        if run.lease_expires_at is not None and run.lease_expires_at < now:
            tx.runs.transition(run.id, expected=[run.state], to=RunState.FAILED, message=_VANISHED)
            tx.runs.update(run.id, finished_at=run.lease_expires_at)
            tx.events.append(job_id, "run", run_id=run.id, data={"state": "failed", "message": _VANISHED})
            _training_moved(tx, tx.runs.get(run.id))


def create(store: Store, principal: Principal, job_id: str, request: wire.RunCreate) -> wire.Run:
    """Register a run outside the plan: training, or a measurement of the user's own choice."""
    with store.reading() as tx:
        job = visible_job(tx, principal, job_id)
        spec = fitting.spec_of(job)
        configuration = convert.domain_configuration(request.configuration)
        known = [cluster.instance_type for cluster in spec.cluster]
        if configuration.instance_type not in known:
            raise InvalidInput(
                f"Instance type {configuration.instance_type!r} is not in this job's cluster: use {', '.join(known)}.",
                field="configuration.instance_type",
            )
        # Fitted while only reading, so that nobody who writes waits for it.
        expected, undrifted = _expected(tx, job, configuration, _gone_on_from(tx, job_id, request))
    with store.transaction() as tx:
        now = tx.jobs.lock(job_id)
        give_up_vanished(tx, job_id)
        before = _gone_on_from(tx, job_id, request)
        if now.spec != job.spec:  # what was only measured meanwhile hardly moves it, and nobody waits for another fit
            expected, undrifted = _expected(tx, now, configuration, before)
        if before is not None and not before.state.is_final:
            _end_for_another(tx, before)
        profile = request.kind == "profile"
        run = tx.runs.create(
            job_id,
            NewRun(
                RunKind(request.kind),
                configuration,
                state=RunState.CLAIMED,
                purpose=planning.OWN_CHOICE if profile else "Training.",
                instruction=planning.instruction_of(spec) if profile else None,
                method=request.method,
                predicted_step_time_s=None if expected.step_time_s is None else expected.step_time_s.mean,
                recommendation_id=expected.recommendation_id,
                holder=request.holder,
                lease_s=request.lease_s,
            ),
        )
        if not profile:
            watch.begin(tx, now, run, expected, before, undrifted)
        tx.events.append(job_id, "run", run_id=run.id, data={"state": run.state.value, "kind": request.kind})
        return shown.run(tx.runs.get(run.id))


def _expected(
    tx: Transaction, job: JobRecord, configuration: Configuration, before: RunRecord | None
) -> tuple[recommend.Expectation, recommend.Expectation | None]:
    """Of the new run as things are and, where it goes on from one that drifted, as they were before that."""
    expected = recommend.expectation(tx, job, configuration)
    drifted = before is not None and before.drifted
    return expected, recommend.expectation(tx, job, configuration, as_profiled=True) if drifted else None


def _gone_on_from(tx: Transaction, job_id: str, request: wire.RunCreate) -> RunRecord | None:
    """The training run that a new one continues. Raises InvalidInput when it is none."""
    if request.continues is None:
        return None
    try:
        before = tx.runs.get(request.continues)
    except NotFound:
        before = None
    if before is None or before.job_id != job_id or before.kind is not RunKind.TRAIN or request.kind != "train":
        raise InvalidInput(
            f"{request.continues!r} is no training run of this job: a training continues one, or none.",
            field="continues",
        )
    return before


def _end_for_another(tx: Transaction, run: RunRecord) -> None:
    to = RunState.CANCELLED if run.state is RunState.PENDING else RunState.FAILED
    tx.runs.transition(run.id, expected=[run.state], to=to, message=_CONTINUED)
    tx.events.append(run.job_id, "run", run_id=run.id, data={"state": to.value, "message": _CONTINUED})


def get(store: Store, principal: Principal, run_id: str) -> wire.Run:
    """One run."""
    with store.reading() as tx:
        return shown.run(visible_run(tx, principal, run_id))


def list_runs(
    store: Store,
    principal: Principal,
    job_id: str,
    *,
    kind: str | None = None,
    cursor: str | None = None,
    limit: int = 100,
) -> wire.RunList:
    """Runs of a job, newest first."""
    with store.reading() as tx:
        visible_job(tx, principal, job_id)
        found = tx.runs.list(
            job_id, kind=None if kind is None else RunKind(kind), cursor=parse_cursor(cursor), limit=limit + 1
        )
    more = len(found) > limit
    return wire.RunList(
        runs=[shown.run(run) for run in found[:limit]], next_cursor=str(found[limit - 1].key) if more else None
    )


def parse_cursor(cursor: str | None) -> int | None:
    """The cursor of the page before. Raises InvalidInput when it is none of ours."""
    if cursor is None:
        return None
    if not cursor.isascii() or not cursor.isdigit() or len(cursor) > 18:
        raise InvalidInput("This cursor is not one that a list gave: leave it out to start over.", field="cursor")
    return int(cursor)


def patch(
    store: Store,
    principal: Principal,
    run_id: str,
    request: wire.RunPatch,
    *,
    on_end: Callable[[wire.Run], None] = lambda _: None,
) -> wire.Run:
    """Move a run on; the same final state twice is fine, since launcher and agent may both report it.

    `on_end` is called by the one that ended it. Raises Conflict for another holder's run, an invalid transition, or a
    lease that ran out.
    """
    with store.transaction() as tx:
        job = tx.jobs.lock(visible_run(tx, principal, run_id).job_id)
        before = tx.runs.get(run_id).state
        run = _patched(tx, run_id, request)
        due = run.state.is_final and planning.is_due(tx, job.id)
    if run.state.is_final and run.state is not before:  # one that was given up as vanished may have ended well
        on_end(shown.run(run))
    if due:
        # The list of jobs and readers of events see the new recommendation without anybody asking for it.
        settle(store, job.id)
    return shown.run(run)


def _patched(tx: Transaction, run_id: str, request: wire.RunPatch) -> RunRecord:
    wanted = RunState(request.state)
    run = tx.runs.get(run_id)
    if run.message == _VANISHED and run.state is RunState.FAILED and wanted is not RunState.FAILED:
        # It was alive after all; a service that was away must not fail a training that went on.
        tx.runs.transition(run_id, expected=[RunState.FAILED], to=RunState.RUNNING, message=None, finished_at=None)
        run = tx.runs.get(run_id)
        _training_moved(tx, run)
    if run.state.is_final and (wanted is run.state or _is_same_end(run, wanted)):
        return _noted(tx, run, request)
    _check_holder(run, request)
    if wanted is run.state and wanted is RunState.RUNNING:
        tx.runs.renew(run_id, lease_s=request.lease_s)
        return _noted(tx, run, request)
    if wanted not in TRANSITIONS.get(run.state, frozenset()):
        raise Conflict(_refusal(run, wanted), field="state")
    return _move(tx, run, wanted, request)


def _is_same_end(run: RunRecord, wanted: RunState) -> bool:
    return run.state is RunState.FAILED and wanted is RunState.SUCCEEDED and run.message == _NEVER_CALLED


def _check_holder(run: RunRecord, request: wire.RunPatch) -> None:
    if run.state is RunState.PENDING and request.state != "cancelled":
        raise Conflict(
            "The lease on this run has run out and it went back into the plan: claim it again.", field="holder"
        )
    if request.holder is not None and run.holder is not None and request.holder != run.holder:
        raise Conflict(
            f"This run is held by {run.holder!r}, not by {request.holder!r}: your lease ran out and somebody else "
            "claimed it, so stop working on it.",
            field="holder",
        )


def _refusal(run: RunRecord, wanted: RunState) -> str:
    if run.state.is_final:
        return f"The run is already {run.state.value} and stays so: register a new run instead of {wanted.value}."
    allowed = ", ".join(sorted(state.value for state in TRANSITIONS.get(run.state, frozenset())))
    return f"A run that is {run.state.value} cannot become {wanted.value}: it can become {allowed}."


def _noted(tx: Transaction, run: RunRecord, request: wire.RunPatch) -> RunRecord:
    if request.dropped is not None and request.dropped > run.dropped:
        tx.runs.update(run.id, dropped=request.dropped)
    return tx.runs.get(run.id)


def _move(tx: Transaction, run: RunRecord, wanted: RunState, request: wire.RunPatch) -> RunRecord:
    message = request.message
    if wanted is RunState.SUCCEEDED and run.num_samples == 0 and run.kind is RunKind.PROFILE:
        wanted, message = RunState.FAILED, _NEVER_CALLED
    if wanted is RunState.SUCCEEDED and run.kind is RunKind.TRAIN and message is None:
        message = passes.told_otherwise(tx, run, fitting.spec_of(tx.jobs.get(run.job_id)))
    values: dict[str, Any] = {}
    if message is not None:
        values["message"] = message
    if request.dropped is not None:
        values["dropped"] = max(request.dropped, run.dropped)
    if wanted is RunState.OUT_OF_MEMORY:
        values["failed_local_batch_size"] = request.failed_local_batch_size or run.configuration.local_batch_size
    if not tx.runs.transition(run.id, expected=[run.state], to=wanted, **values):
        raise Conflict("The run moved on in the meantime: look at its state and decide again.", field="state")
    if wanted is RunState.RUNNING:
        tx.runs.renew(run.id, lease_s=request.lease_s)
    tx.samples.refresh(run.key)
    moved = tx.runs.get(run.id)
    data = {"state": wanted.value, "message": message, "step_time_s": moved.step_time_s}
    tx.events.append(run.job_id, "run", run_id=run.id, data={k: v for k, v in data.items() if v is not None})
    if run.kind is RunKind.TRAIN:
        _training_moved(tx, moved)
    if wanted.is_final and (run.kind is RunKind.PROFILE or wanted is RunState.OUT_OF_MEMORY):
        planning.mark_due(tx, run.job_id, memory=wanted is RunState.OUT_OF_MEMORY)
    if wanted.is_final and run.kind is RunKind.TRAIN:
        ledger.record_outcome(tx, moved)
    return moved


def _training_moved(tx: Transaction, run: RunRecord) -> None:
    job = tx.jobs.get(run.job_id)
    if job.state == "archived":
        return
    others = tx.runs.list(run.job_id, kind=RunKind.TRAIN, states=(RunState.CLAIMED, RunState.RUNNING), limit=1)
    state = job.state
    if others:
        state = "training"
    elif run.state is RunState.SUCCEEDED:
        state = "finished"
    elif run.state.is_final and job.state == "training":
        waiting = tx.runs.list(run.job_id, kind=RunKind.PROFILE, states=_OPEN, limit=1)
        state = "planning" if waiting else "ready"
    if state != job.state:
        tx.jobs.update(job.id, state=state)
        tx.events.append(job.id, "job", data={"state": state})
