"""Events of a job, read on after the last one seen."""

from __future__ import annotations

from collections.abc import Sequence

import tula_wire as wire
from tula_service.store import Store
from tula_service.usecases import shown
from tula_service.usecases.access import Principal, check_still_valid, visible_job

__all__ = ["last_id", "read_on", "recent"]


def last_id(store: Store, principal: Principal, job_id: str) -> int:
    """The id of the job's newest event, 0 without any. Raises NotFound."""
    with store.reading() as tx:
        visible_job(tx, principal, job_id)
        return tx.events.last_id(job_id)


def read_on(
    store: Store, principal: Principal, job_id: str, after: int, *, limit: int = 200
) -> list[tuple[int, str, str]]:
    """(id, kind, JSON) of the events after this id, oldest first; for a caller who was let in to this job before.

    Raises Unauthenticated when that has ended since, NotFound when the job was deleted.
    """
    with store.reading() as tx:
        check_still_valid(tx, principal)
        tx.jobs.data_version(job_id)
        found = tx.events.after(job_id, after, limit=limit)
    return [(event.id, event.kind, shown.event(event).model_dump_json()) for event in found]


def recent(
    store: Store,
    principal: Principal,
    job_id: str,
    *,
    kinds: Sequence[wire.EventKind],
    run_id: str | None = None,
    limit: int = 20,
) -> list[wire.Event]:
    """The newest events of these kinds, of one run if wanted, newest first. Raises NotFound for an unknown job."""
    with store.reading() as tx:
        visible_job(tx, principal, job_id)
        return [shown.event(event) for event in tx.events.recent(job_id, kinds=kinds, run_id=run_id, limit=limit)]
