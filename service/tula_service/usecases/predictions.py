"""What-if predictions: any configuration, measured or not, at the job's prices or at others."""

from __future__ import annotations

from dataclasses import replace

import tula_wire as wire
from tula_service.analysis import explanation
from tula_service.analysis.answer import Answer, analyse
from tula_service.analysis.what_if import WhatIf, configurations_of, specification_at
from tula_service.perfmodel.points import ObservationError
from tula_service.store import Store
from tula_service.usecases.access import Principal, visible_job
from tula_service.usecases.recommendations import load_job_data


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
