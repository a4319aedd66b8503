"""The recommendation of a job: computed once per version of its data, kept in the ledger whenever it changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import tula_wire as wire
from tula_service.domain import Basis, Objective
from tula_service.errors import InvalidInput
from tula_service.perfmodel.intervals import Interval
from tula_service.perfmodel.points import ObservationError
from tula_service.store import JobRecord, LedgerRecord, Store, Transaction
from tula_service.usecases import (
    choosing,
    cold_start,
    fitting,
    ledger,
    planning,
    rendering,
    sentences,
    validation,
)
from tula_service.usecases.access import Principal, visible_job
from tula_service.usecases.choosing import Answer
from tula_service.usecases.fitting import MODEL_VERSION
from tula_wire import Configuration

__all__ = ["Expectation", "at_least", "body_of", "compute", "expectation", "get", "publish", "publish_as_of"]


def get(
    store: Store,
    principal: Principal,
    job_id: str,
    objective: str | None = None,
    *,
    on_miss: Callable[[], None] = lambda: None,
) -> str:
    """The recommendation as JSON, from the cache when nothing that it rests on has changed; else after `on_miss()`.

    It is that of the data as they were when it was asked for: what is measured meanwhile is for the next to ask.
    """
    with store.reading() as tx:
        job = visible_job(tx, principal, job_id)
        kept = _kept(tx, job, _wanted(job, objective))
    if kept is not None:
        return kept
    on_miss()
    with store.job_lock(job_id):
        while True:
            # Fitted while only reading, so that nobody who writes waits for it.
            with store.compute_slot() as tx:
                job = visible_job(tx, principal, job_id)
                wanted = _wanted(job, objective)
                kept = _kept(tx, job, wanted)
                if kept is not None:  # whoever was before this one in the queue asked the same
                    return kept
                computed = compute(tx, job, wanted)
            with store.transaction() as tx:
                now = tx.jobs.lock(job_id)
                if now.spec == job.spec or at_least(tx, job, wanted) is not None:
                    return publish_as_of(tx, now, job, wanted, computed)
            # Prices or limits were changed meanwhile, which happens seldom: this answer would be to another question.


def body_of(tx: Transaction, job: JobRecord, objective: str | None = None) -> str:
    """The same inside a transaction that writes; computes and keeps it when needed."""
    wanted = _wanted(job, objective)
    return _kept(tx, job, wanted) or publish(tx, job, wanted, compute(tx, job, wanted))


def compute(tx: Transaction, job: JobRecord, objective: str) -> Answer | str:
    """The answer, or the sentence that says why there is none; all the arithmetic, and nothing is written."""
    try:
        return choosing.answer(tx, job, fitting.spec_of(job), objective)
    except ObservationError as error:
        return str(error)


def publish(tx: Transaction, job: JobRecord, objective: str, found: Answer | str) -> str:
    """Keep what `compute` found under the job's data version, and put a changed answer into the ledger; the JSON of it.

    When nothing is left to choose from (all ran out of memory, say), it chooses nothing and `why` tells the remedy.
    """
    spec = fitting.spec_of(job)
    if isinstance(found, str):
        recommendation = _none(tx, job, spec, objective, found)
    else:
        entry = ledger.enter(tx, job, spec, found, objective)
        recommendation = _render(tx, job, spec, found, entry)
    body = recommendation.model_dump_json()
    tx.fits.put(job.id, _name(objective), data_version=job.data_version, model_version=MODEL_VERSION, body=body)
    if objective == job.objective:
        _show_in_lists(tx, job, recommendation)
    return body


def publish_as_of(tx: Transaction, now: JobRecord, seen: JobRecord, objective: str, found: Answer | str) -> str:
    """The same of a job that has measured on since it was `seen`: kept under that version, unless a later answer is."""
    return at_least(tx, seen, objective) or publish(tx, replace(now, data_version=seen.data_version), objective, found)


@dataclass(frozen=True)
class Expectation:
    """Of a run about to start: its step time, a rank's peak memory, and the recommendation that it follows."""

    step_time_s: Interval | None = None
    peak_bytes: float | None = None
    recommendation_id: str | None = None


def expectation(
    tx: Transaction, job: JobRecord, configuration: Configuration, *, as_profiled: bool = False
) -> Expectation:
    """What is expected of a run about to start; nothing where no model can say.

    `as_profiled`: as if no training had noticed a drift.
    """
    spec = fitting.spec_of(job)
    try:
        evidence = fitting.evidence_of(tx, job, spec, as_profiled=as_profiled)
        predicted = fitting.fit(tx, job, spec, evidence).predict([configuration])
    except ObservationError:
        return Expectation()
    (peak,) = evidence.peaks([configuration])
    return Expectation(
        predicted.intervals()[0], None if peak is None else float(peak.mean), _followed(tx, job, configuration)
    )


def _followed(tx: Transaction, job: JobRecord, configuration: Configuration) -> str | None:
    """The recommendation that stands and says this configuration: that of the job's own objective before others."""
    for objective in sorted((each.value for each in Objective), key=lambda value: value != job.objective):
        entry = tx.ledger.latest(job.id, objective)
        if entry is not None and entry.configuration == configuration:
            return entry.id
    return None


def _wanted(job: JobRecord, objective: str | None) -> str:
    wanted = objective or job.objective
    known = [each.value for each in Objective]
    if wanted not in known:
        raise InvalidInput(f"Objective {wanted!r} is not known: use one of {', '.join(known)}.", field="objective")
    return wanted


def _name(objective: str) -> str:
    return f"recommendation:{objective}"


def _kept(tx: Transaction, job: JobRecord, objective: str) -> str | None:
    return tx.fits.get(job.id, _name(objective), data_version=job.data_version, model_version=MODEL_VERSION)


def at_least(tx: Transaction, job: JobRecord, objective: str) -> str | None:
    """The newest recommendation kept for the data of this record, or for later data."""
    return tx.fits.at_least(job.id, _name(objective), data_version=job.data_version, model_version=MODEL_VERSION)


def _none(tx: Transaction, job: JobRecord, spec: wire.JobSpec, objective: str, reason: str) -> wire.Recommendation:
    """The recommendation of a job that has no candidate left."""
    entry = ledger.enter(tx, job, spec, None, objective)
    return wire.Recommendation(
        id=entry.id,
        job_id=job.id,
        created_at=entry.created_at or tx.now(),
        basis="prior",
        objective=objective,
        knee=wire.Knee(found=False, reason="no knee: there is no candidate."),
        why=f"Nothing can be recommended. {reason[0].upper()}{reason[1:]}",
        candidates=[],
        frontier=[],
        model=wire.ModelReport(form="none", version=MODEL_VERSION, num_runs=0, num_samples=0, warnings=[reason]),
    )


def _render(
    tx: Transaction, job: JobRecord, spec: wire.JobSpec, found: Answer, entry: LedgerRecord
) -> wire.Recommendation:
    choice, evidence = found.choice, found.evidence
    show = rendering.Renderer(
        found.spec, evidence, choice=choice, spot=found.spot, efficiency=found.efficiency, doubtful=found.doubtful
    )
    ruled_out = tuple(evidence.ruled_out)
    goal = planning.goal_of(found.spec)
    excluded, _ = choosing.priced(found.spec, evidence, found.model, goal, ruled_out) if ruled_out else ((), None)
    warnings = sentences.warnings(spec, evidence)
    if found.model.basis is Basis.PRIOR:
        warnings = [*warnings, *cold_start.warnings_of(spec)]
    knee = choice.knee
    return wire.Recommendation(
        id=entry.id,
        job_id=job.id,
        created_at=entry.created_at or tx.now(),
        basis=found.model.basis.value,
        objective=entry.objective,
        chosen=show.optional(choice.chosen),
        runner_up=show.optional(choice.runner_up),
        least_time=show.optional(choice.least_time),
        least_cost=show.optional(choice.least_cost),
        knee=wire.Knee(
            found=knee is not None,
            configuration=None if knee is None else knee.configuration,
            global_batch_size=choice.knee_finding.global_batch_size,
            reason=choice.knee_finding.reason,
        ),
        why=sentences.why(found.spec, found.model.basis, choice, efficiency=found.efficiency),
        candidates=[show.candidate(estimate) for estimate in (*found.estimates, *excluded)],
        frontier=[estimate.configuration for estimate in choice.frontier],
        max_local_batch_size=evidence.memory_bound,
        max_sensible_batch_size=None if found.efficiency is None else found.efficiency.max_sensible_batch_size,
        model=rendering.model_report(
            found.model, evidence, warnings, cross_validated_error=validation.kept_error(tx, job.id, evidence)
        ),
    )


def _show_in_lists(tx: Transaction, job: JobRecord, recommendation: wire.Recommendation) -> None:
    chosen = recommendation.chosen
    smallest, largest = sentences.savings(recommendation)
    values: dict[str, Any] = {
        "recommended": None if chosen is None else chosen.configuration,
        "predicted_time_s": None if chosen is None else chosen.total_time_s.value,
        "predicted_cost_usd": None if chosen is None or chosen.cost_usd is None else chosen.cost_usd.value,
        "saving_vs_smallest_batch": smallest,
        "saving_vs_largest_batch": largest,
    }
    tx.jobs.update(job.id, **values)
