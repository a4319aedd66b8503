"""The ledger: past recommendations beside what training then measured."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import tula_wire as wire
from tula_service.domain import Basis, RunState
from tula_service.store import JobRecord, LedgerRecord, Outcome, RunRecord, Store, Transaction
from tula_service.usecases import convert, lessons
from tula_service.usecases.access import Principal, visible_job
from tula_service.usecases.choosing import Answer
from tula_service.usecases.fitting import MODEL_VERSION

__all__ = ["enter", "entries", "record_outcome"]

_SAME = 0.02


def entries(store: Store, principal: Principal, job_id: str, *, limit: int = 200) -> wire.Ledger:
    """Predicted against measured, newest first."""
    with store.reading() as tx:
        visible_job(tx, principal, job_id)
        found = tx.ledger.list(job_id, limit=limit)
    return wire.Ledger(entries=[_shown(entry) for entry in found])


def record_outcome(tx: Transaction, run: RunRecord) -> None:
    """Put what a training run measured beside the recommendation that it followed, and on the job."""
    measured = run.step_time_s
    if measured is None:
        return
    if run.predicted_step_time_s is not None:
        tx.jobs.update(run.job_id, prediction_error=measured / run.predicted_step_time_s - 1.0)
    entry = None if run.recommendation_id is None else tx.ledger.get(run.recommendation_id)
    if entry is None or entry.predicted_step_time_s is None:
        return
    value, low, high = entry.predicted_step_time_s
    # A training that was stopped counts once it has gone on to its end: each start of it would count as a whole one.
    ended = run.state is not RunState.CANCELLED
    if ended and entry.basis == Basis.PROFILED.value and entry.interval_scale is not None:
        given = _uncalibrated(value, low, high, entry.interval_scale)
        lessons.remember_outcome(tx, run.job_id, given, measured)
    tx.ledger.record_outcome(entry.id, Outcome(run.id, measured, measured / value - 1.0, low <= measured <= high))


def _uncalibrated(value: float, low: float, high: float, scale: float) -> tuple[float, float, float]:
    """The interval as the model alone gave it: a width that was widened already must not be taken for its own.

    `scale` is the calibration of that day. Today's may rest on outcomes that came since.
    """
    return value, value * (low / value) ** (1.0 / scale), value * (high / value) ** (1.0 / scale)


def enter(tx: Transaction, job: JobRecord, spec: wire.JobSpec, found: Answer | None, objective: str) -> LedgerRecord:
    """The newest entry when it says the same as this answer (None: nothing is left to choose), else a new one."""
    chosen = None if found is None else found.choice.chosen
    step = None if chosen is None else (chosen.step_time_s.mean, chosen.step_time_s.low, chosen.step_time_s.high)
    cost = None
    if found is not None and chosen is not None and convert.has_prices(found.spec):
        cost = (chosen.cost_usd.mean, chosen.cost_usd.low, chosen.cost_usd.high)
    entry = replace(
        _blank_entry(job, spec, objective, Basis.PRIOR if found is None else found.model.basis),
        configuration=None if chosen is None else chosen.configuration,
        predicted_step_time_s=step,
        predicted_cost_usd=cost,
        interval_scale=None if found is None or step is None else found.model.interval_scale,
    )
    return _entered(tx, job, entry)


def _blank_entry(job: JobRecord, spec: wire.JobSpec, objective: str, basis: Basis) -> LedgerRecord:
    return LedgerRecord(
        id="",
        job_id=job.id,
        objective=objective,
        basis=basis.value,
        configuration=None,
        prices={cluster.instance_type: cluster.price.model_dump() for cluster in spec.cluster},
        model_version=MODEL_VERSION,
        data_version=job.data_version,
        predicted_step_time_s=None,
        predicted_cost_usd=None,
    )


def _entered(tx: Transaction, job: JobRecord, entry: LedgerRecord) -> LedgerRecord:
    newest = tx.ledger.latest(job.id, entry.objective)
    if newest is not None and _says_the_same(newest, entry):
        return newest
    kept = tx.ledger.append(entry)
    if entry.objective == job.objective:
        data: dict[str, Any] = {"recommendation_id": kept.id, "basis": entry.basis, "objective": entry.objective}
        if entry.configuration is not None:
            data["configuration"] = asdict(entry.configuration)
        tx.events.append(job.id, "recommendation", data=data)
    return kept


def _says_the_same(old: LedgerRecord, new: LedgerRecord) -> bool:
    """Equal in everything but step times that moved by less than 2 %: samples arrive all the time, and each moves them
    a little."""
    facts = [(e.configuration, e.basis, dict(e.prices), e.model_version) for e in (old, new)]
    if facts[0] != facts[1] or (old.predicted_step_time_s is None) != (new.predicted_step_time_s is None):
        return False
    pairs = zip(old.predicted_step_time_s or (), new.predicted_step_time_s or (), strict=True)
    return all(abs(after / before - 1.0) < _SAME for before, after in pairs)


def _shown(entry: LedgerRecord) -> wire.LedgerEntry:
    outcome = entry.outcome
    return wire.LedgerEntry.model_validate(
        {
            "recommendation_id": entry.id,
            "created_at": entry.created_at,
            "objective": entry.objective,
            "basis": entry.basis,
            "configuration": entry.configuration,
            "prices": dict(entry.prices),
            "model_version": entry.model_version,
            "predicted_step_time_s": _estimate(entry.predicted_step_time_s),
            "predicted_cost_usd": _estimate(entry.predicted_cost_usd),
            "run_id": None if outcome is None else outcome.run_id,
            "measured_step_time_s": None if outcome is None else outcome.measured_step_time_s,
            "error": None if outcome is None else outcome.error,
            "within_interval": None if outcome is None else outcome.within_interval,
        }
    )


def _estimate(values: tuple[float, float, float] | None) -> wire.Estimate | None:
    return None if values is None else wire.Estimate(value=values[0], low=values[1], high=values[2])
