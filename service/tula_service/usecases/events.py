"""Events of a job, read on after the last one seen."""

from __future__ import annotations

from tula_service.store import Store
from tula_service.usecases import shown
from tula_service.usecases.access import Principal, visible_job

__all__ = ["last_id", "read_on"]


def last_id(store: Store, principal: Principal, job_id: str) -> int:
    """The id of the job's newest event, 0 without any. Raises NotFound."""
    with store.reading() as tx:
        visible_job(tx, principal, job_id)
        return tx.events.last_id(job_id)


def read_on(store: Store, job_id: str, after: int, *, limit: int = 200) -> list[tuple[int, str, str]]:
    """(id, kind, JSON) of the events after this id, oldest first; for a caller that was let in before."""
    with store.reading() as tx:
        found = tx.events.after(job_id, after, limit=limit)
    return [(event.id, event.kind, shown.event(event).model_dump_json()) for event in found]
