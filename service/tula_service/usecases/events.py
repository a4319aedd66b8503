"""Reads a job's events, and the state of the whole service for metrics and health checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import sqlalchemy as sa

import tula_wire as wire
from tula_service.errors import StoreUnavailable
from tula_service.store import Store
from tula_service.store.migrations import check_schema
from tula_service.store.partitions import check_month
from tula_service.usecases.access import Principal, check_still_valid, visible_job
from tula_wire.enums import RunState

_SHARES: Final = (0.5, 0.9)


def last_id(store: Store, principal: Principal, job_id: str) -> int:
    """Return the id of the job's newest event, or 0 if the job has no events. Raises NotFound."""
    with store.reading() as tx:
        visible_job(tx, principal, job_id)
        return tx.events.last_id(job_id)


def read_on(store: Store, principal: Principal, job_id: str, after: int, *, limit: int = 200) -> list[wire.Event]:
    """Return the events after this id, oldest first; the caller's access to the job must already have been checked.

    Raises Unauthenticated if the caller's token or session is no longer valid, and NotFound if the job was deleted.
    """
    with store.reading() as tx:
        check_still_valid(tx, principal)
        tx.jobs.data_version(job_id)
        return tx.events.after(job_id, after, limit=limit)


def recent(
    store: Store,
    principal: Principal,
    job_id: str,
    *,
    kinds: Sequence[wire.EventKind],
    run_id: str | None = None,
    limit: int = 20,
) -> list[wire.Event]:
    """Return the newest events of these kinds for a job or one of its runs, newest first. Raises NotFound."""
    with store.reading() as tx:
        visible_job(tx, principal, job_id)
        return tx.events.recent(job_id, kinds=kinds, run_id=run_id, limit=limit)


def overview(store: Store) -> tuple[Mapping[RunState, int], int, Mapping[float, float]]:
    """Return the number of runs by state, the number of agents, and quantiles of recent prediction errors.

    The quantiles are computed from the newest thousand absolute relative errors of step time. All replicas return the
    same values.
    """
    with store.reading() as tx:
        by_state, num_agents = tx.runs.count_by_state(), tx.samples.count_processes()
        errors = np.abs(tx.ledger.errors())
    return by_state, num_agents, {share: float(np.quantile(errors, share)) for share in _SHARES} if errors.size else {}


def check_ready(store: Store) -> None:
    """Raise SchemaMismatch if the schema does not match, and StoreUnavailable if the database cannot store data.

    A database cannot store data if it is unreachable, is full, or has no partition for the current month.
    """
    store.check_disk()
    try:
        check_schema(store.engine)
        check_month(store.engine)
    except sa.exc.SQLAlchemyError as error:
        raise StoreUnavailable("The database cannot be reached: check that it is running.") from error
