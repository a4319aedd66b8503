"""Computes recommendations (which are cached), what-if answers and batch schedules from a job's current data."""

from __future__ import annotations

from collections.abc import Callable

from tula_service.analysis.questions import WhatIf, answer_what_if
from tula_service.analysis.schedule import plan_schedule
from tula_service.store import Store
from tula_service.usecases import planning
from tula_service.usecases.access import Principal, visible_job
from tula_service.usecases.job_data import load_job_data, load_noise_curves
from tula_wire.enums import Objective


def get(
    store: Store,
    principal: Principal,
    job_id: str,
    objective: Objective | None = None,
    *,
    on_miss: Callable[[], None] = lambda: None,
) -> str:
    """Return the recommendation as JSON; unless a valid one is cached, call `on_miss()` and compute it.

    A cached recommendation is valid until its inputs change. The result is based on the data at the time of the
    request, even if further measurements arrive during the computation. For a caller with scope read, the result is
    cached only in memory, since a read-only token must not add entries to the ledger.
    """
    may_change = principal.scope != "read"

    def look_up() -> tuple[tuple[str, Objective, int], str | None]:
        with store.reading() as tx:
            job = visible_job(tx, principal, job_id)
            key = (job_id, objective or job.objective, job.data_version)
            body = planning.cached(tx, *key)
        return key, body if body is not None or may_change else store.of_readers.get(key)

    _, body = look_up()
    if body is not None:
        return body
    on_miss()
    with store.fits.turn() as compute:
        key, body = look_up()  # it may have been computed by another thread, or the objective may have changed
        if body is None:
            body = planning.answer(store, compute, job_id, key[1], plan=False, keep=may_change)
            if not may_change:
                store.of_readers.put(key, body)
        return body


def predict(store: Store, principal: Principal, job_id: str, question: WhatIf) -> str:
    """Return predictions for every configuration that matches the question, as JSON.

    Raises InvalidInput if no configuration matches.
    """
    with store.fits.turn() as compute:
        with store.reading() as tx:
            data = load_job_data(tx, visible_job(tx, principal, job_id))
        return compute(answer_what_if, data, job_id, question)


def schedule(store: Store, principal: Principal, job_id: str, objective: Objective | None, beta2: float) -> str:
    """Return the batch schedule as JSON; `beta2` is Adam's beta2 at the base batch size."""
    with store.fits.turn() as compute:
        with store.reading() as tx:
            data = load_job_data(tx, visible_job(tx, principal, job_id))
            curves = load_noise_curves(tx, data)
        return compute(plan_schedule, data, job_id, objective, beta2, curves)
