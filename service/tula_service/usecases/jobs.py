"""Registers jobs, with one job per specification, and lists, changes, deletes and prunes jobs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

import tula_wire as wire
from tula_service.analysis import job_data
from tula_service.analysis.evidence import state_beyond_memory
from tula_service.analysis.hardware import contradiction
from tula_service.analysis.plan import profiling_cost
from tula_service.domain import JobOrder
from tula_service.errors import Forbidden, InvalidInput
from tula_service.perfmodel.objectives import OBJECTIVES
from tula_service.perfmodel.points import ObservationError
from tula_service.store import Store, Transaction, partitions
from tula_service.store.archive import Archive
from tula_service.store.database import is_sqlite
from tula_service.store.jobs import JobRecord
from tula_service.usecases import runs
from tula_service.usecases.access import Principal, visible_job
from tula_service.usecases.job_data import read_spec
from tula_service.usecases.planning import replan

_MAX_KEY_LENGTH = 200
_MIN_MEMORY_BYTES = 2**26
_ROWS_PER_TRANSACTION: Final = 5_000
_CHUNKS_PER_TRANSACTION: Final = 100
EVENTS_KEPT_FOR: Final = timedelta(days=7)
"""The time for which events are kept. Clients reconnect within minutes, but users may want to see the past week."""


def register(
    store: Store, principal: Principal, spec: wire.JobSpec, *, idempotency_key: str | None = None
) -> wire.JobCreated:
    """Register a job unless a job with the same specification exists; return the job with its next profiling runs.

    If a specification is registered again, its job keeps all measurements, and configurations whose runs failed may be
    planned again. Raises Conflict if the idempotency key was sent before with another specification, and InvalidInput
    if the specification contradicts itself.
    """
    if principal.scope == "agent":
        raise Forbidden("An agent token is bound to one job and cannot register another: use a user token.")
    if idempotency_key is not None and not 0 < len(idempotency_key) <= _MAX_KEY_LENGTH:
        raise InvalidInput(f"Idempotency-Key must have 1 to {_MAX_KEY_LENGTH} characters.", field="Idempotency-Key")
    _check_model(spec)
    _check(spec)
    body: dict[str, Any] = spec.model_dump(mode="json")
    fingerprint = compute_fingerprint(body)
    with store.transaction() as tx:
        key = idempotency_key or f"spec:{fingerprint}"
        job, is_new = tx.jobs.create(principal.home_project_id, body, idempotency_key=key, fingerprint=fingerprint)
        if job.state == "archived":
            job = tx.jobs.update(job.id, state="planning")
            is_new = True
        if is_new:
            tx.events.append(job.id, "job", data={"state": job.state, "name": job.name})
        tx.jobs.lock(job.id)
        runs.fail_vanished(tx, job.id)
        _allow_retries(tx, job)
        tx.jobs.mark_plan_stale(job.id)
    recommendation = wire.read(wire.Recommendation, replan(store, job.id))
    with store.reading() as tx:
        view = _view(tx, tx.jobs.get(job.id))
    waiting = [run for run in view.plan if run.state == "pending"]
    return wire.JobCreated(job=view, recommendation=recommendation, runs=waiting)


def compute_fingerprint(body: Mapping[str, Any]) -> str:
    """Return a hash that identifies a specification; `body` is the specification as JSON, including all defaults."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _allow_retries(tx: Transaction, job: JobRecord) -> None:
    """Allow failed configurations to be planned again, since the user may have fixed the cause."""
    failures = tx.runs.list(job.id, states=("failed", "out_of_memory"), limit=1)
    if failures and failures[0].key > job.retried_up_to_key:
        tx.jobs.update(job.id, bump=True, retried_up_to_key=failures[0].key)


def get(store: Store, principal: Principal, job_id: str) -> wire.Job:
    """Return a job with its plan."""
    return runs.with_vanished(
        store,
        lambda tx: _view(tx, visible_job(tx, principal, job_id)),
        lambda job: [job_id] * (job.state == "training"),
    )


def list_jobs(
    store: Store,
    principal: Principal,
    *,
    name: str | None = None,
    search: str | None = None,
    state: str | None = None,
    include_archived: bool = False,
    order: JobOrder = "newest",
    cursor: str | None = None,
    limit: int = 50,
) -> wire.JobPage:
    """List the jobs of the caller's project; pagination is available only in the order "newest".

    Raises InvalidInput if a cursor or a search text is malformed.
    """
    for field, text in (("name", name), ("search", search)):
        if text is not None and not text.isprintable():
            raise InvalidInput(f"The {field} contains unprintable characters: remove them.", field=field)

    def read(tx: Transaction) -> wire.JobPage:
        return tx.jobs.list(
            project_id=principal.project_id,
            name=name,
            search=search,
            state=state,
            include_archived=include_archived,
            order=order,
            cursor=runs.parse_cursor(cursor),
            limit=limit,
            count_up_to=wire.JOBS_COUNTED,
        )

    return runs.with_vanished(store, read, lambda page: [job.id for job in page.jobs if job.state == "training"])


def change(store: Store, principal: Principal, job_id: str, patch: wire.JobPatch) -> wire.Job:
    """Change a job's settings, or archive the job; then update its plan and its recommendation.

    These settings are the objective, prices, limits and shared launches. If `retry_failed` is set, failed
    configurations may be planned again.

    Raises InvalidInput if the patch sets the price of an instance type that the job does not have.
    """
    with store.transaction() as tx:
        visible_job(tx, principal, job_id)
        job = tx.jobs.lock(job_id)
        spec = _patched(read_spec(job), patch)
        _check(spec)
        values: dict[str, Any] = {"spec": spec.model_dump(mode="json"), "objective": spec.objective}
        if patch.archived is not None and patch.archived != (job.state == "archived"):
            values["state"] = "archived" if patch.archived else "planning"
        job = tx.jobs.update(job_id, bump=True, **values)
        if patch.retry_failed:
            _allow_retries(tx, job)
        if "state" in values:
            tx.events.append(job_id, "job", data={"state": job.state, "name": job.name})
        if job.state != "archived":
            tx.jobs.mark_plan_stale(job_id)
    if job.state != "archived":
        replan(store, job_id)
    with store.reading() as tx:
        return _view(tx, tx.jobs.get(job_id))


def _patched(spec: wire.JobSpec, patch: wire.JobPatch) -> wire.JobSpec:
    changed: dict[str, Any] = {"objective": patch.objective or spec.objective, "limits": patch.limits or spec.limits}
    for name in ("usd_per_hour_of_waiting", "usd_per_kwh", "gco2_per_kwh"):  # null removes the price
        if name in patch.model_fields_set:
            changed[name] = getattr(patch, name)
    if patch.share_launches is not None:
        changed["profiling"] = spec.profiling.model_copy(update={"share_launches": patch.share_launches})
    if "only" in patch.model_fields_set:
        for name in patch.only or ():
            if name not in spec.options:
                names = ", ".join(sorted(spec.options)) or "none, since the job has no options"
                raise InvalidInput(f"This job has no option {name!r}: use {names}.", field="only")
        changed["profiling"] = changed.get("profiling", spec.profiling).model_copy(update={"only": patch.only})
    if patch.prices is not None:
        types = {cluster.instance_type for cluster in spec.cluster}
        for name in patch.prices.keys() - types:
            raise InvalidInput(
                f"This job has no instance type {name!r}: use {', '.join(sorted(types))}.", field=f"prices.{name}"
            )
        changed["cluster"] = [
            cluster.model_copy(update={"price": patch.prices.get(cluster.instance_type, cluster.price)})
            for cluster in spec.cluster
        ]
    return spec.model_copy(update=changed)


def _check_model(spec: wire.JobSpec) -> None:
    """Raise InvalidInput if fields of the model contradict each other or the specified devices.

    This function is called only at registration, so that older jobs can still be changed.
    """
    if spec.model.activation_bytes_per_sample == 0:
        raise InvalidInput(
            "activation_bytes_per_sample is 0, but every network stores activations: set the number of bytes, for "
            "example from tula_agent.estimate_memory, or leave it out.",
            field="model.activation_bytes_per_sample",
        )
    for row, cluster in enumerate(spec.cluster):
        given = cluster.memory_bytes_per_rank
        if given is not None and given < _MIN_MEMORY_BYTES:
            raise InvalidInput(
                f"memory_bytes_per_rank is {given}, which is less than any device has: set the number of bytes, for "
                "example 17179869184 for 16 GiB, or leave it out.",
                field=f"cluster.{row}.memory_bytes_per_rank",
            )
        fault = contradiction(spec.model, cluster)
        if fault is not None:
            raise InvalidInput(fault[1], field=fault[0].replace("cluster.", f"cluster.{row}."))
        too_large = state_beyond_memory(spec.model, cluster)
        if too_large is not None:
            raise InvalidInput(too_large, field=f"cluster.{row}.memory_bytes_per_rank")


def _check(spec: wire.JobSpec) -> None:
    """Raise InvalidInput if the specification's fields are valid individually but contradict each other."""
    priced = [job_data.is_priced(cluster.price) for cluster in spec.cluster]
    if any(priced) and not all(priced):
        row = priced.index(False)
        raise InvalidInput(
            f"Instance type {spec.cluster[row].instance_type!r} has no price, but others have one: set prices for all "
            "instance types, or for none.",
            field=f"cluster.{row}.price",
        )
    if not any(priced):
        if spec.limits.budget_usd is not None:
            raise InvalidInput(
                "A budget requires prices: set cluster.price.usd_per_node_hour, or leave limits.budget_usd out.",
                field="limits.budget_usd",
            )
        if OBJECTIVES[spec.objective].needs_prices:
            raise InvalidInput(
                f"Objective '{spec.objective}' requires prices: set cluster.price.usd_per_node_hour, or choose "
                "the objective balanced or time.",
                field="cluster.0.price",
            )
        if spec.usd_per_hour_of_waiting is not None:
            raise InvalidInput(
                "usd_per_hour_of_waiting requires node prices: set cluster.price.usd_per_node_hour, or leave "
                "usd_per_hour_of_waiting out.",
                field="usd_per_hour_of_waiting",
            )
    try:
        job_data.list_candidates(spec, {})
    except ObservationError as error:
        raise InvalidInput(str(error), field="batch") from error


@dataclass(frozen=True)
class Pruned:
    """The objects that a prune has deleted or, in a dry run, would delete."""

    job_ids: Sequence[str]
    num_events: int
    telemetry: Sequence[str] = ()
    """Names of the tables of the dropped months."""


def delete_job(store: Store, caller: Principal, job_id: str) -> None:
    """Delete a job and all its data. Raises NotFound.

    The job becomes invisible immediately. Its rows are then deleted in small transactions, so ingest need not wait.
    """
    with store.transaction() as tx:
        job = visible_job(tx, caller, job_id)
        tx.jobs.begin_delete(job.id)
        tx.audit.append(actor=caller.sender, action="job.delete", target=job.id, detail={"name": job.name})
    _finish_deleting(store, job_id)


def prune_store(
    store: Store,
    *,
    older_than: timedelta,
    actor: Principal,
    dry_run: bool = False,
    telemetry_older_than: timedelta | None = None,
    archive: str = "",
) -> Pruned:
    """Delete jobs archived longer ago than `older_than`, finish interrupted deletions, and delete old events.

    On Postgres, months of telemetry that ended longer ago than `telemetry_older_than` are then dropped; if `archive` is
    set, each month is first written to the archive. Raises InvalidInput if `telemetry_older_than` is set on SQLite or
    the archive is unusable, Conflict if another process is dropping months, and StoreUnavailable if a month cannot be
    written to the archive, in which case the month is kept.
    """
    now = store.now()
    before = None if telemetry_older_than is None else now - telemetry_older_than
    if before is not None and is_sqlite(store.engine):
        raise InvalidInput(
            "TULA_TELEMETRY_DAYS requires Postgres, which stores telemetry by month: unset it for SQLite."
        )
    months = () if before is None else partitions.due(store.engine, before=before)
    with store.reading() as tx:
        old = tx.jobs.archived_before(now - older_than)
        begun = tx.jobs.deleting()
        num_events = tx.events.count_before(now - EVENTS_KEPT_FOR)
    pruned = Pruned([*old, *begun], num_events, months)
    if dry_run:
        return pruned
    target = Archive(archive) if archive and months else None
    for job_id in old:
        delete_job(store, actor, job_id)
    for job_id in begun:
        _finish_deleting(store, job_id)
    _delete_in_pieces(store, lambda tx, limit: tx.events.delete_before(now - EVENTS_KEPT_FOR, limit=limit))
    if before is None or not months:
        return pruned
    return replace(pruned, telemetry=_drop_months(store, before, target))


def _drop_months(store: Store, before: datetime, archive: Archive | None) -> list[str]:
    """Drop the months that are due and return their names; stop at a month that a run has begun to use.

    Raises Conflict if another process is dropping months.
    """
    dropped = []
    with partitions.dropping(store.engine):
        for month in partitions.due(store.engine, before=before):
            if not partitions.drop(store.engine, month, archive, before=before):
                break
            dropped.append(month)
    return dropped


def _delete_in_pieces(
    store: Store, delete: Callable[[Transaction, int], int], limit: int = _ROWS_PER_TRANSACTION
) -> None:
    while True:
        with store.transaction() as tx:
            if delete(tx, limit) < limit:
                return


def _finish_deleting(store: Store, job_id: str) -> None:
    _delete_in_pieces(store, lambda tx, limit: tx.samples.purge(job_id, limit=limit))
    _delete_in_pieces(store, lambda tx, limit: tx.telemetry.purge(job_id, limit=limit), _CHUNKS_PER_TRANSACTION)
    with store.transaction() as tx:
        tx.jobs.delete(job_id)


def _view(tx: Transaction, record: JobRecord) -> wire.Job:
    """Return a job with its specification, its profiling runs in plan order, and the cost of those runs."""
    plan = tx.runs.list(record.id, kind="profile", plan_order=True)
    summary = {name: getattr(record, name) for name in wire.JobSummary.model_fields}
    spec, views = read_spec(record), [runs.view(run) for run in plan]
    cost = profiling_cost(spec, plan, tx.now().timestamp())
    return wire.Job(**summary, spec=spec, plan=views, plan_reason=record.plan_reason, profiling_cost=cost)
