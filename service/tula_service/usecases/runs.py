"""Claims, registers, lists and updates runs; each claim gives the holder a lease on the run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, TypeVar

import sqlalchemy as sa

import tula_wire as wire
from tula_service.analysis.plan import build_instruction
from tula_service.analysis.questions import predict_run
from tula_service.domain import RUN_TRANSITIONS, FloatArray, NewRun, RunRecord
from tula_service.errors import Conflict, InvalidInput, NotFound, StoreUnavailable
from tula_service.perfmodel.pricing import Estimate
from tula_service.perfmodel.step_summary import summarise
from tula_service.store import Store, Transaction
from tula_service.store.jobs import JobRecord
from tula_service.usecases import fabrics, ledger, monitoring
from tula_service.usecases.access import Principal, visible_job, visible_run
from tula_service.usecases.job_data import load_job_data, read_spec
from tula_service.usecases.planning import replan
from tula_wire import options
from tula_wire.bounds import LAUNCH_TOKEN_S
from tula_wire.configurations import DEFAULT_INSTANCE_TYPE
from tula_wire.enums import FINAL_STATES, EndCause, RunKind, RunState
from tula_wire.precision import is_known
from tula_wire.verdict import Steps, diagnose

T = TypeVar("T")

_OPEN: Final[Collection[RunState]] = ("pending", "claimed", "running")
_RETRY_AFTER_S = 2.0
_VERDICT_STEPS = 1000
"""Number of newest steps on which a verdict is based, since a run's bottleneck may change over time."""
_MEMORY_REPLAN = "A run has just run out of memory, and the plan is being recomputed."
_MESSAGES = {
    "vanished": "No report or sample from this training run arrived before its lease expired.",
    "superseded": "Another run continued this training before this run reported its end.",
    "no_samples": (
        "The command ended without sending any sample. Call tula_agent.init() in the training script, and loop over "
        "run.steps(loader)."
    ),
}

_ONLY_WARMUP = (
    "The command ended during its warm-up, so no step was measured. Loop over run.steps(loader), which repeats the "
    "data, or let the script train for more epochs."
)


def claim(store: Store, principal: Principal, job_id: str, request: wire.ClaimRequest) -> wire.RunClaimed:
    """Lease the next profiling run of the plan and return it, or return the reason why no run is available."""
    answer = _claimed(store, principal, job_id, request)
    if answer is None:
        # The worker that handled the end of the last run is still planning or has died, so the plan may be incomplete.
        replan(store, job_id)
        answer = _claimed(store, principal, job_id, request, replanned=True)
    assert answer is not None
    return answer


def _claimed(
    store: Store, principal: Principal, job_id: str, request: wire.ClaimRequest, *, replanned: bool = False
) -> wire.RunClaimed | None:
    """Return the claimed run, or the reason why no run is available, or None if the only reason is a stale plan."""
    with store.transaction() as tx:
        job = visible_job(tx, principal, job_id)
        if job.state == "archived":
            raise Conflict("This job is archived: unarchive it before profiling.")
        if job.plan_state == "stale_out_of_memory":
            # Pending runs may also exceed the memory, so none is leased before the plan is recomputed.
            return wire.RunClaimed(run=None, reason=_MEMORY_REPLAN, retry_after_s=_RETRY_AFTER_S) if replanned else None
        run = tx.leases.claim(job_id, holder=request.holder, lease_s=request.lease_s, max_nodes=request.max_nodes)
        if run is not None:
            leased = [run, *(tx.leases.claim_launch(run) if request.whole_launch else ())]
            for run in leased:
                data = {"state": run.state, "holder": request.holder}
                tx.events.append(job_id, "run", run_id=run.id, data=data)
            *smaller, largest = sorted(leased, key=lambda run: run.configuration.local_batch_size)
            first = fabrics.to_launch(tx, job, view(largest))
            return wire.RunClaimed(run=first, smaller=[view(run) for run in smaller], reason=largest.purpose)
        active = tx.runs.list(job_id, kind="profile", states=_OPEN)
        if not active and not replanned and job.plan_state != "current":
            return None
    if not active:
        return wire.RunClaimed(run=None, reason=job.plan_reason or "The plan is complete.")
    reason = f"{len(active)} run(s) are in progress elsewhere; the plan may continue after these runs end."
    if pending := [run.configuration.num_nodes for run in active if run.state == "pending"]:
        reason = f"Every remaining run needs at least {min(pending)} nodes: set max_nodes to {min(pending)} or more."
    return wire.RunClaimed(run=None, reason=reason, retry_after_s=_RETRY_AFTER_S)


def fail_vanished(tx: Transaction, job_id: str) -> None:
    """Mark the job's training runs with expired leases as failed; a later report from such a run reopens it."""
    now = tx.now()
    for run in tx.runs.list(job_id, kind="train", states=("claimed", "running")):
        if run.lease_expires_at is not None and run.lease_expires_at < now:
            _end(tx, run, "failed", "vanished")
            tx.runs.update(run.id, finished_at=run.lease_expires_at)
            _update_job_state(tx, tx.runs.get(run.id))


def with_vanished(store: Store, read: Callable[[Transaction], T], jobs_of: Callable[[T], Sequence[str]]) -> T:
    """Mark training runs with expired leases as failed, then return the result of `read`.

    `jobs_of` returns the ids of the jobs in a result; only runs of these jobs are marked. This ensures that a training
    run is not shown as running after its launcher has died. A read-only database is not changed.
    """
    with store.reading() as tx:
        answer = read(tx)
        expired = tx.leases.expired(jobs_of(answer))
    if not expired:
        return answer
    for job_id in expired:
        with suppress(StoreUnavailable, NotFound, sa.exc.DBAPIError), store.transaction() as tx:
            tx.jobs.lock(job_id)
            fail_vanished(tx, job_id)
    with store.reading() as tx:
        return read(tx)


def _end(tx: Transaction, run: RunRecord, to: RunState, cause: EndCause) -> None:
    """Move a run that did not report its end to the final state `to`, and record the cause."""
    message = _MESSAGES[cause]
    tx.runs.transition(run.id, expected=[run.state], to=to, end_cause=cause, message=message)
    tx.events.append(run.job_id, "run", run_id=run.id, data={"state": to, "message": message})


def create(store: Store, principal: Principal, job_id: str, request: wire.RunCreate) -> wire.Run:
    """Register a run outside the plan: a training run, or a profiling run that the user requested. Raises Busy."""
    while True:
        with store.fits.turn() as compute:
            with store.reading() as tx:
                job = visible_job(tx, principal, job_id)
                configuration = _of_job(read_spec(job), request.configuration)
                _continued_run(tx, job_id, request)
                data = load_job_data(tx, job)
            expected = compute(predict_run, data, configuration)
        request = request.model_copy(update={"configuration": configuration})
        with store.transaction() as tx:
            now = tx.jobs.lock(job_id)
            if now.spec == job.spec:  # new measurements alone need no second fit
                return _created(tx, now, request, expected)


def _of_job(spec: wire.JobSpec, configuration: wire.Configuration) -> wire.Configuration:
    """Return the configuration, after adding a missing instance type and missing option values.

    Agents that create runs do not know the names of instance types, so a missing type is replaced by the job's only
    type, or the only type with the same number of ranks per node. A missing option is set to its first value. Raises
    InvalidInput.
    """
    try:
        configuration = replace(configuration, options=options.complete(spec.options, configuration.options))
    except ValueError as error:
        raise InvalidInput(str(error), field="configuration.options") from error
    types = [cluster.instance_type for cluster in spec.cluster]
    if len(types) == 1 and spec.cluster[0].ranks_per_node == 1 and configuration.num_nodes == 1:
        # In a job on one machine, each rank is modelled as a node, but the agent reports all ranks as one node.
        ranks = configuration.ranks_per_node
        configuration = replace(configuration, num_nodes=ranks, ranks_per_node=1)
    if configuration.instance_type in types:
        return configuration
    named = configuration.instance_type != DEFAULT_INSTANCE_TYPE
    fitting = [
        cluster.instance_type for cluster in spec.cluster if cluster.ranks_per_node == configuration.ranks_per_node
    ]
    candidates = types if len(types) == 1 else fitting
    if named or len(candidates) != 1:
        raise InvalidInput(
            f"Instance type {configuration.instance_type!r} is not in this job's cluster: use {', '.join(types)}.",
            field="configuration.instance_type",
        )
    return replace(configuration, instance_type=candidates[0])


def _created(tx: Transaction, job: JobRecord, request: wire.RunCreate, expected: Estimate | None) -> wire.Run:
    """Store a new run, and end the training run that it continues. The caller holds the job's lock."""
    fail_vanished(tx, job.id)
    before = _continued_run(tx, job.id, request)
    if before is not None and before.state not in FINAL_STATES:
        to: RunState = "cancelled" if before.state == "pending" else "failed"
        _end(tx, before, to, "superseded")
    profile = request.kind == "profile"
    run = tx.runs.create(
        job.id,
        NewRun(
            request.kind,
            request.configuration,
            state="claimed",
            origin="user",
            purpose="Requested by the user." if profile else "Training.",
            instruction=build_instruction(read_spec(job)) if profile else None,
            method=request.method,
            predicted_step_time_s=None if expected is None else expected.step_time_s.mean,
            recommendation_id=ledger.followed(tx, job, request.configuration),
            holder=request.holder,
            lease_s=request.lease_s,
        ),
    )
    if not profile:
        monitoring.start(tx, job, run, expected, before)
    tx.events.append(job.id, "run", run_id=run.id, data={"state": run.state, "kind": request.kind})
    return fabrics.to_launch(tx, job, view(tx.runs.get(run.id)))


def _continued_run(tx: Transaction, job_id: str, request: wire.RunCreate) -> RunRecord | None:
    """Return the training run that the new run continues, or None.

    Raises InvalidInput if `request.continues` is not a training run of this job.
    """
    if request.continues is None:
        return None
    try:
        before = tx.runs.get(request.continues)
    except NotFound:
        before = None
    if before is None or before.job_id != job_id or before.kind != "train" or request.kind != "train":
        raise InvalidInput(
            f"{request.continues!r} is not a training run of this job: use a training run's id, or omit `continues`.",
            field="continues",
        )
    return before


def get(store: Store, principal: Principal, run_id: str) -> wire.Run:
    """Return a run with the facts that its first rank reported about the script and the host."""

    def read(tx: Transaction) -> tuple[RunRecord, wire.HostFacts | None]:
        run = visible_run(tx, principal, run_id)
        return run, tx.samples.host_facts(run.key)

    run, machine = with_vanished(store, read, lambda answer: [answer[0].job_id])
    return view(run).model_copy(update={"machine": machine})


def list_runs(
    store: Store,
    principal: Principal,
    job_id: str,
    *,
    kind: RunKind | None = None,
    cursor: str | None = None,
    limit: int = 100,
) -> wire.RunList:
    """List the runs of a job, newest first."""

    def read(tx: Transaction) -> list[RunRecord]:
        visible_job(tx, principal, job_id)
        return tx.runs.list(job_id, kind=kind, cursor=parse_cursor(cursor), limit=limit + 1)

    page = with_vanished(store, read, lambda _: [job_id])
    more = len(page) > limit
    return wire.RunList(
        runs=[view(run) for run in page[:limit]], next_cursor=str(page[limit - 1].key) if more else None
    )


def parse_cursor(cursor: str | None) -> int | None:
    """Return the cursor of a list as an integer. Raises InvalidInput if the text is not a cursor."""
    if cursor is None:
        return None
    if not cursor.isascii() or not cursor.isdigit() or len(cursor) > 18:
        raise InvalidInput(
            "The cursor is not the next_cursor of a page: omit it to start from the first page.", field="cursor"
        )
    return int(cursor)


def patch(
    store: Store, principal: Principal, run_id: str, request: wire.RunPatch, lease: int | None = None
) -> wire.Run:
    """Change a run's state. The launcher and the agent may both report the same final state.

    lease: the number of the sender's lease, if known. Raises Conflict if another holder has the run, the transition is
    invalid, or the lease has expired.
    """
    with store.transaction() as tx:
        job = tx.jobs.lock(visible_run(tx, principal, run_id).job_id)
        tx.leases.check(run_id, lease)
        run = _patched(tx, run_id, request)
        if request.state == "running" and request.holder is not None and principal.scope != "agent":
            # The token of a launch must remain valid while its lease is renewed.
            tx.tokens.extend(job.id, request.holder, tx.now() + timedelta(seconds=LAUNCH_TOKEN_S))
        if request.output is not None:
            tx.runs.put_output(run.key, request.output)
        due = run.state in FINAL_STATES and tx.jobs.get(job.id).plan_state != "current"
    if due:
        # The new recommendation is computed now, so that lists of jobs and event streams show it without a request.
        replan(store, job.id)
    return view(run)


def output(store: Store, principal: Principal, run_id: str) -> str | None:
    """Return the last part of the run's output, or None if no output was sent. Raises NotFound."""
    with store.reading() as tx:
        return tx.runs.output(visible_run(tx, principal, run_id).key)


def progress(store: Store, principal: Principal, run_id: str) -> wire.Progress:
    """Return the progress of a training run. Raises NotFound."""
    with store.reading() as tx:
        stands = monitoring.progress(tx, visible_run(tx, principal, run_id))
    return wire.Progress.model_validate(stands, from_attributes=True, extra="ignore")


def verdict(store: Store, principal: Principal, run_id: str) -> wire.Verdict:
    """Return a diagnosis of the run, based on its newest measured steps, with evidence and a suggested next step.

    Raises NotFound.
    """
    with store.reading() as tx:
        key = visible_run(tx, principal, run_id).key
        recent = tx.samples.recent(key, limit=_VERDICT_STEPS, rank=0)
        host, memory = tx.samples.host_facts(key), tx.samples.memory_by_rank(key, limit=16)
    columns = {name: _known(getattr(recent, name)) for name in ("input_time_s", "exposed_comm_time_s", "skew_s")}
    ranks = () if recent.straggler_rank is None else recent.straggler_rank.tolist()
    steps = Steps(
        step_time_s=recent.step_time_s.tolist(),
        straggler_rank=[rank if rank >= 0 else None for rank in ranks],
        **columns,
    )
    fullest = max(memory.values(), key=lambda reading: reading.alloc_retries or 0, default=None)
    return diagnose(steps, host, fullest)


def _known(values: FloatArray | None) -> list[float | None]:
    return [] if values is None else [value if value == value else None for value in values.tolist()]


def view(record: RunRecord) -> wire.Run:
    """Return a run as a wire model."""
    return wire.Run.model_validate(record, from_attributes=True, extra="ignore")


def _patched(tx: Transaction, run_id: str, request: wire.RunPatch) -> RunRecord:
    state = request.state
    run = tx.runs.get(run_id)
    allowed = RUN_TRANSITIONS.get((run.state, run.end_cause), frozenset())
    if run.state in FINAL_STATES and state not in allowed and _repeats(run, state):
        return _noted(tx, run, request)
    _check_holder(run, request)
    if state == run.state == "running":
        tx.leases.renew(
            run_id, lease_s=request.lease_s, whole_launch=run.kind == "profile" and request.holder is not None
        )
        return _noted(tx, run, request)
    if state not in allowed:
        raise Conflict(_refusal(run, state, allowed), field="state")
    return _move(tx, run, state, request)


def _repeats(run: RunRecord, state: RunState) -> bool:
    """Return True if a report only repeats an earlier one, since launcher and agent may both report a run's end."""
    mismatch = run.kind == "profile" and run.configuration_mismatch is not None
    refused = mismatch or run.end_cause == "no_samples"
    reported = "succeeded" if refused and run.state == "failed" else run.state
    return state in (run.state, reported)


def _check_holder(run: RunRecord, request: wire.RunPatch) -> None:
    if run.state == "pending" and request.state != "cancelled":
        raise Conflict(
            "The lease on this run has expired, and the run returned to the plan: claim it again.", field="holder"
        )
    if request.holder is not None and run.holder is not None and request.holder != run.holder:
        raise Conflict(
            f"This run is held by {run.holder!r}, not by {request.holder!r}: your lease expired and another holder "
            "claimed the run, so stop working on it.",
            field="holder",
        )


def _refusal(run: RunRecord, state: RunState, allowed: frozenset[RunState]) -> str:
    if run.state in FINAL_STATES:
        return f"The run has already ended ({run.state}) and cannot become {state}: register a new run."
    names = ", ".join(sorted(allowed))
    return f"A run that is {run.state} cannot become {state}: it can become {names}."


def _noted(tx: Transaction, run: RunRecord, request: wire.RunPatch) -> RunRecord:
    if request.dropped is not None and request.dropped > run.dropped:
        tx.runs.update(run.id, dropped=request.dropped)
    return tx.runs.get(run.id)


def _move(tx: Transaction, run: RunRecord, state: RunState, request: wire.RunPatch) -> RunRecord:
    message = request.message
    cause: EndCause | None = None
    if state == "succeeded" and run.kind == "profile" and not tx.samples.recent(run.key, limit=1).step.size:
        state, cause = "failed", "no_samples"
        message = _ONLY_WARMUP if run.num_samples else _MESSAGES[cause]
    if state == "succeeded" and run.kind == "profile" and run.configuration_mismatch is not None:
        # The samples are kept and assigned to the configuration that was actually used.
        state, message = "failed", run.configuration_mismatch
    if state == "succeeded" and run.kind == "profile" and message is None:
        message = _too_few(tx, run)
    if state == "cancelled" and run.kind == "train" and request.end_cause is not None:
        cause = request.end_cause
        message = " ".join(filter(None, (message, monitoring.spent_until_now(tx, run))))
    values: dict[str, Any] = {}
    if message is not None or run.end_cause == "vanished":
        values["message"] = message
    if request.dropped is not None:
        values["dropped"] = max(request.dropped, run.dropped)
    if state == "out_of_memory":
        values["failed_local_batch_size"] = request.failed_local_batch_size or run.configuration.local_batch_size
    if not tx.runs.transition(run.id, expected=[run.state], to=state, end_cause=cause, **values):
        raise Conflict(
            "The run's state has changed in the meantime: read the run again before you retry.", field="state"
        )
    if state == "running":
        tx.leases.renew(run.id, lease_s=request.lease_s)
    tx.samples.refresh(run.key, summarise)
    moved = tx.runs.get(run.id)
    data = {"state": state, "message": message, "step_time_s": moved.step_time_s}
    tx.events.append(run.job_id, "run", run_id=run.id, data={k: v for k, v in data.items() if v is not None})
    _after_move(tx, moved)
    return moved


def _too_few(tx: Transaction, run: RunRecord) -> str | None:
    """Return a sentence if a profiling run ended before reaching its planned steps or precision, else None."""
    if run.instruction is None:
        return None
    times, precision = tx.samples.recent(run.key, rank=0).step_time_s.tolist(), float(run.instruction["precision"])
    measuring_steps = int(run.instruction["measuring_steps"])
    if len(times) >= measuring_steps or is_known(times, precision):
        return None
    return (
        f"Only {len(times)} of {measuring_steps} steps were measured before the script ended: let it train for more "
        "epochs."
    )


def _after_move(tx: Transaction, run: RunRecord) -> None:
    """Update the state of the run's job, the job's plan and the run's ledger entry after a change of state."""
    if run.kind == "train":
        _update_job_state(tx, run)
    if run.state in FINAL_STATES and (run.kind == "profile" or run.state == "out_of_memory"):
        tx.jobs.mark_plan_stale(run.job_id, out_of_memory=run.state == "out_of_memory")
    if run.state == "pending":
        # A launch ends when it runs out of memory. The batches that it returns to the plan are larger and may not fit
        # into memory either.
        failed = tx.runs.list(run.job_id, kind="profile", states=["out_of_memory"], limit=1)
        if failed:
            tx.jobs.mark_plan_stale(run.job_id, out_of_memory=True)
    if run.state in FINAL_STATES and run.kind == "train":
        ledger.record_outcome(tx, run)


def _update_job_state(tx: Transaction, run: RunRecord) -> None:
    job = tx.jobs.get(run.job_id)
    if job.state == "archived":
        return
    others = tx.runs.list(run.job_id, kind="train", states=("claimed", "running"), limit=1)
    state = job.state
    if others:
        state = "training"
    elif run.state == "succeeded":
        state = "finished"
    elif run.state in FINAL_STATES and job.state == "training":
        waiting = tx.runs.list(run.job_id, kind="profile", states=_OPEN, limit=1)
        state = "planning" if waiting else "ready"
    if state != job.state:
        tx.jobs.update(job.id, state=state)
        tx.events.append(job.id, "job", data={"state": state})
