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
    asks for is not stored: a token that may change nothing enters nothing in the ledger.
    """

    def look_up() -> tuple[Objective, str | None]:
        with store.reading() as tx:
            job = visible_job(tx, principal, job_id)
            wanted = objective or job.objective
            return wanted, planning.cached(tx, job_id, wanted, job.data_version)

    _, body = look_up()
    if body is not None:
        return body
    on_miss()
    with store.job_lock(job_id):
        wanted, body = look_up()  # another thread may have computed it, or the job's objective have changed
        return body or planning.compute(store, job_id, wanted, plan=False, keep=principal.scope != "read")


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
