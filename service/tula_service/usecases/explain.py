"""Why a training's speed changed: the fit, the correction and the advice that follow an alarm, after its request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tula_service.perfmodel import ObservationError
from tula_service.store import JobRecord, RunRecord, Store, Transaction
from tula_service.usecases import advice, drift, fitting
from tula_service.usecases.watched import Alarm, Watched, read, told, written

__all__ = ["explain"]


def explain(store: Store, run_id: str) -> None:
    """Say what changed, correct what was measured before by it, and look whether another configuration pays.

    Computed while only reading, so that nobody who sends measurements waits for it. Does nothing where the alarm was
    explained already; one that came meanwhile is left for the next call. Raises NotFound, Busy, StoreUnavailable.
    """
    with store.computing() as tx:
        run = tx.runs.get(run_id)
        alarm = _alarm_of(run)
        if alarm is None:
            return
        ratios, found = _cause(tx, tx.jobs.get(run.job_id), run, alarm)
    with store.transaction() as tx:
        tx.jobs.lock(run.job_id)  # samples move the job too: none come between
        run = tx.runs.get(run_id)
        if _alarm_of(run) != alarm:
            return
        watched = _told(tx, run, alarm, ratios, found)
    if alarm.examples_left is None:
        return
    at = watched.progress(alarm.step, alarm.examples_left, alarm.level_s)
    with store.computing() as tx:
        advised = advice.reconfigure(tx, tx.jobs.get(run.job_id), run, at)
    if advised is not None:
        with store.transaction() as tx:
            tx.events.append(run.job_id, "advice", run_id=run.id, data=advised)


def _alarm_of(run: RunRecord) -> Alarm | None:
    return None if run.drift_state is None else read(run.drift_state).alarm


def _cause(tx: Transaction, job: JobRecord, run: RunRecord, alarm: Alarm) -> tuple[dict[str, float], dict[str, Any]]:
    """Factors on what each run measured, by its id, and what to tell."""
    spec = fitting.spec_of(job)
    try:
        evidence = fitting.evidence_of(tx, job, spec, without=run.id)
        model = fitting.fit(tx, job, spec, evidence)
        slowdown = drift.attribute(model, run.configuration, alarm.level_s, alarm.compute_s)
        factors = drift.ratios(model, slowdown, [c for c, _ in evidence.rows])
    except ObservationError as error:
        return {}, {"sentence": f"Training is {alarm.kind} than predicted, and no model can say why: {error}"}
    ratios = {run_id: factor for (_, run_id), factor in zip(evidence.rows, factors, strict=True)}
    since = "Since its start training is" if alarm.from_start else "Training has become"
    sentence = f"{since} {alarm.kind} than predicted: {slowdown.sentence}"
    return ratios, {"part": slowdown.part, "factor": slowdown.factor, "sentence": sentence}


def _told(tx: Transaction, run: RunRecord, alarm: Alarm, ratios: dict[str, float], found: dict[str, Any]) -> Watched:
    watched = read(run.drift_state or {})
    sentence = found["sentence"]
    watched = replace(watched, alarm=None, ratios=ratios, level_s=alarm.level_s, sentence=sentence)
    tx.runs.update(run.id, drifted=True, drift_state=written(watched), bump=True)
    data = told(watched, alarm.kind, step=alarm.step, after_steps=alarm.after_steps, level_s=alarm.level_s)
    tx.events.append(run.job_id, "drift", run_id=run.id, data=data | found | {"sentence": f"{sentence}."})
    return watched
