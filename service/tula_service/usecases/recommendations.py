"""Recommendations and what-if: the answer of a job's data as they stand, cached once per version of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import tula_wire as wire
from tula_service.analysis import explanation
from tula_service.analysis.answer import Answer, analyse
from tula_service.analysis.job_data import JobData
from tula_service.analysis.what_if import WhatIf, configurations_of, specification_at
from tula_service.perfmodel.points import ObservationError
from tula_service.perfmodel.pricing import Estimate
from tula_service.store import Store
from tula_service.usecases import planning
from tula_service.usecases.access import Principal, visible_job
from tula_service.usecases.job_data import load_job_data
from tula_wire import Configuration
from tula_wire.enums import Objective


def get(
    store: Store,
    principal: Principal,
    job_id: str,
    objective: Objective | None = None,
    *,
    on_miss: Callable[[], None] = lambda: None,
) -> str:
    """The recommendation as JSON: cached if nothing that it rests on has changed, else computed after `on_miss()`.

    It is that of the data at the time of the request, whatever is measured during the computation. What a reader
    asks for is kept in memory alone: a token that may change nothing enters nothing in the ledger.
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
    with store.job_lock(job_id):
        key, body = look_up()  # another thread may have computed it, or the job's objective have changed
        if body is None:
            body = planning.compute(store, job_id, key[1], plan=False, keep=may_change)
            if not may_change:
                store.of_readers.put(key, body)
        return body


def predict(store: Store, principal: Principal, job_id: str, question: WhatIf) -> wire.Predictions:
    """Predict every configuration asked about. Raises InvalidInput for a question that no configuration answers."""
    with store.compute_slot():
        with store.reading() as tx:
            data = load_job_data(tx, visible_job(tx, principal, job_id))
        answer = analyse(replace(data, spec=specification_at(data.spec, question)))
    if not isinstance(answer, Answer):
        raise ObservationError(answer.reason)
    found = answer.what_if(configurations_of(answer, question))
    return wire.Predictions(
        job_id=job_id,
        basis=found.model.basis,
        candidates=explanation.candidates_of(found, found.estimates),
        model=explanation.model_report(found),
    )


def expectation(data: JobData, configuration: Configuration) -> Estimate | None:
    """What is expected of a run about to start; None where no model can predict it."""
    answer = analyse(data)
    return answer.estimate([configuration])[0] if isinstance(answer, Answer) else None
