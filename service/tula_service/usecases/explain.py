"""Why a training's speed changed: the fit, the correction and the advice that follow an alarm, after its request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tula_service.analysis.answer import Answer, analyse
from tula_service.store import JobRecord, RunRecord, Store, Transaction
from tula_service.usecases import advice, drift
from tula_service.usecases.job_data import load
from tula_service.usecases.watched import Alarm, Watched, read, told, written

__all__ = ["explain"]


def explain(store: Store, run_id: str) -> None:
    """Say what changed, correct what was measured before by it, and look whether another configuration pays.

    Computed while only reading, so that nobody who sends measurements waits for it. The alarm is kept until both were
    said, so that a call that failed between is gone on from; one that came meanwhile is left for the next call. Raises
    NotFound, Busy, StoreUnavailable.
    """
    _explain(store, run_id)
    _advise(store, run_id)


def _explain(store: Store, run_id: str) -> None:
    with store.compute_slot() as tx:
        run = tx.runs.get(run_id)
        alarm = _alarm_of(run)
        if alarm is None or alarm.explained:
            return
        ratios, found = _cause(tx, tx.jobs.get(run.job_id), run, alarm)
    with store.transaction() as tx:
        tx.jobs.lock(run.job_id)  # samples move the job too: none come between
        run = tx.runs.get(run_id)
        if _alarm_of(run) == alarm:
            _tell(tx, run, alarm, ratios, found)


def _advise(store: Store, run_id: str) -> None:
    with store.compute_slot() as tx:
        run = tx.runs.get(run_id)
        watched = _watched(run)
        alarm = watched.alarm
        if alarm is None or not alarm.explained:
            return
        advised = None
        if alarm.examples_left is not None:
            at = watched.progress(alarm.step, alarm.examples_left, alarm.level_s)
            advised = advice.reconfigure(tx, tx.jobs.get(run.job_id), run, at)
    with store.transaction() as tx:
        tx.jobs.lock(run.job_id)
        run = tx.runs.get(run_id)
        if _alarm_of(run) != alarm:
            return
        tx.runs.update(run.id, drift_state=written(replace(_watched(run), alarm=None)))
        if advised is not None:
            tx.events.append(run.job_id, "advice", run_id=run.id, data=advised)


def _watched(run: RunRecord) -> Watched:
    return read(run.drift_state or {})


def _alarm_of(run: RunRecord) -> Alarm | None:
    return _watched(run).alarm


def _cause(tx: Transaction, job: JobRecord, run: RunRecord, alarm: Alarm) -> tuple[dict[str, float], dict[str, Any]]:
    """Factors on what each run measured, by its id, and what to tell."""
    watched = _watched(run)
    speed = _speed(watched, alarm)
    data = load(tx, job)
    answer = analyse(data.without_run(run.id))
    if not isinstance(answer, Answer):
        return {}, {"sentence": f"{speed}, and no model can say why: {answer.reason}"}
    evidence, model = answer.evidence, answer.model
    slowdown = drift.attribute(model, run.configuration, alarm.level_s, alarm.compute_s)
    factors = drift.ratios(model, slowdown, [c for c, _ in evidence.rows])
    if watched.sentence is not None:  # runs that it goes on from had drifted: told is the change since profiling
        profiled = analyse(data.as_profiled())
        if isinstance(profiled, Answer):
            slowdown = drift.attribute(profiled.model, run.configuration, alarm.level_s, alarm.compute_s)
    ratios = {run_id: factor for (_, run_id), factor in zip(evidence.rows, factors, strict=True)}
    return ratios, {"part": slowdown.part, "factor": slowdown.factor, "sentence": f"{speed}: {slowdown.sentence}"}


def _speed(watched: Watched, alarm: Alarm) -> str:
    """How fast it is by its prediction, which after an earlier drift may be another thing than what it became."""
    now = "slower" if alarm.level_s > watched.high_s else "faster"
    if now != alarm.kind:
        return f"Training has become {alarm.kind}, but is still {now} than predicted"
    return f"{'Since its start training is' if alarm.from_start else 'Training has become'} {now} than predicted"


def _tell(tx: Transaction, run: RunRecord, alarm: Alarm, ratios: dict[str, float], found: dict[str, Any]) -> None:
    sentence = found["sentence"]
    explained = replace(alarm, explained=True)
    watched = replace(_watched(run), alarm=explained, ratios=ratios, level_s=alarm.level_s, sentence=sentence)
    tx.runs.update(run.id, drifted=True, drift_state=written(watched), bump=True)
    data = told(watched, alarm.kind, step=alarm.step, after_steps=alarm.after_steps, level_s=alarm.level_s)
    tx.events.append(run.job_id, "drift", run_id=run.id, data=data | found | {"sentence": f"{sentence}."})
