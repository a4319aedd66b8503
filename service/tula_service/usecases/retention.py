"""Archiving, deleting and pruning: data goes in pieces, so that ingest never waits long for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from tula_service.store import Store
from tula_service.usecases.access import Principal, visible_job

__all__ = ["EVENTS_KEPT", "Pruned", "delete_job", "prune_store"]

PIECE: Final = 5_000
EVENTS_KEPT: Final = timedelta(days=7)
"""Readers that reconnect resume within minutes; a week is for looking back."""


@dataclass(frozen=True)
class Pruned:
    """What was deleted, or would be."""

    job_ids: Sequence[str]
    num_events: int


def delete_job(store: Store, caller: Principal, job_id: str) -> None:
    """Delete a job with all its data: gone for readers at once, from the disk piece by piece. Raises NotFound."""
    with store.transaction() as tx:
        job = visible_job(tx, caller, job_id)
        tx.jobs.begin_delete(job.id)
        tx.audit.append(
            actor=caller.token_id or caller.name, action="job.delete", target=job.id, detail={"name": job.name}
        )
    _finish_deleting(store, job_id)


def prune_store(store: Store, *, older_than: timedelta, actor: Principal, dry_run: bool = False) -> Pruned:
    """Delete jobs archived longer ago than `older_than`, deletions that were cut short, and events past a week."""
    now = store.now()
    with store.reading() as tx:
        old = tx.jobs.archived_before(now - older_than)
        begun = tx.jobs.deleting()
        num_events = tx.events.count_before(now - EVENTS_KEPT)
    if dry_run:
        return Pruned([*old, *begun], num_events)
    for job_id in old:
        delete_job(store, actor, job_id)
    for job_id in begun:
        _finish_deleting(store, job_id)
    while True:
        with store.transaction() as tx:
            if tx.events.delete_before(now - EVENTS_KEPT, limit=PIECE) < PIECE:
                break
    return Pruned([*old, *begun], num_events)


def _finish_deleting(store: Store, job_id: str) -> None:
    while True:
        with store.transaction() as tx:
            if tx.samples.purge(job_id, limit=PIECE) < PIECE:
                break
    while True:
        with store.transaction() as tx:
            if tx.telemetry.purge(job_id, limit=PIECE // 50) < PIECE // 50:
                break
    with store.transaction() as tx:
        tx.jobs.delete(job_id)
