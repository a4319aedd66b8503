"""Computes recommendations (cached), what-if answers and batch schedules from a job's current data."""

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
    """Return the recommendation as JSON, from the cache if it is still valid; else call `on_miss()` and compute it.

    A cached recommendation is valid until its inputs change. The answer is based on the data at the time of the
    request, even if measurements arrive during the computation. An answer to a reader is cached only in memory, since a
    read-only token must not add to the ledger.
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
        key, body = look_up()  # another thread may have computed it, or the job's objective may have changed
        if body is None:
            body = planning.answer(store, compute, job_id, key[1], plan=False, keep=may_change)
            if not may_change:
                store.of_readers.put(key, body)
        return body


def predict(store: Store, principal: Principal, job_id: str, question: WhatIf) -> str:
    """Return predictions for every configuration in the question, as JSON.

    Raises InvalidInput if no configuration matches the question.
    """
    with store.fits.turn() as compute:
        with store.reading() as tx:
            data = load_job_data(tx, visible_job(tx, principal, job_id))
        return compute(answer_what_if, data, job_id, question)


def schedule(store: Store, principal: Principal, job_id: str, objective: Objective | None, beta2: float) -> str:
    """Return the batch schedule as JSON; `beta2` is Adam's beta2 at the base batch."""
    with store.fits.turn() as compute:
        with store.reading() as tx:
            data = load_job_data(tx, visible_job(tx, principal, job_id))
            curves = load_noise_curves(tx, data)
        return compute(plan_schedule, data, job_id, objective, beta2, curves)
