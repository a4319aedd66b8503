"""Training as it runs: live step time against its prediction, and budget and deadline against what is left."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

import tula_wire as wire
from tula_service.domain import Configuration, Objective, RunKind
from tula_service.perfmodel import DriftState, ObservationError, watch_drift
from tula_service.store import NewSamples, RunRecord, Transaction
from tula_service.usecases import choosing, convert, drift, fitting, sentences

__all__ = ["expect", "observe"]

_LEVEL_STEPS = 8
_CHECK_EVERY_STEPS = 50
_FROM_START_STEPS = 50
_LEAST_SAVING = 0.02


@dataclass(frozen=True)
class _Watched:
    """What is remembered of a training run between two batches of samples; stored as JSON on the run."""

    detector: DriftState
    low_s: float
    high_s: float
    restart_s: float | None = None
    checked_at: int = 0
    said: list[str] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)
    level_s: float | None = None
    sentence: str | None = None


def expect(predicted: wire.Estimate) -> dict[str, Any]:
    """The state of a watch on a run that is predicted to take so long a step."""
    detector = DriftState.expecting(predicted.low, predicted.high)
    return asdict(_Watched(detector, predicted.low, predicted.high))


def observe(tx: Transaction, run: RunRecord, new: NewSamples) -> None:
    """Fold new samples of a training run into its watch; says `drift` and `advice` when there is cause.

    Runs in the transaction that stores the samples. Only the first rank counts, so that no step counts twice.
    """
    if run.kind is not RunKind.TRAIN or new.rank != 0 or run.drift_state is None:
        return
    watched = _read(run.drift_state)
    times = new.columns.step_time_s
    if watched.restart_s is None and run.started_at is not None:
        # What it took to get here, less the steps themselves, is what starting again would take.
        waited = (tx.now() - run.started_at).total_seconds() - float(times.sum())
        watched = replace(watched, restart_s=max(waited, 0.0))
    if not new.warmup:
        watched = replace(watched, detector=watch_drift(watched.detector, times))
        if watched.detector.alarm is not None:
            watched = _on_drift(tx, run, watched, new)
        step = int(new.columns.step.max())
        if step >= watched.checked_at + _CHECK_EVERY_STEPS:
            watched = _check_limits(tx, run, replace(watched, checked_at=step), step, float(np.median(times)))
    tx.runs.update(run.id, drift_state=asdict(watched))


def _on_drift(tx: Transaction, run: RunRecord, watched: _Watched, new: NewSamples) -> _Watched:
    """Say that the speed changed, correct what was measured before, and look whether another configuration pays."""
    recent = tx.samples.recent(run.key, limit=_LEVEL_STEPS, rank=0)
    level = float(np.median(recent.step_time_s))
    inside = watched.low_s <= level <= watched.high_s
    detector = watched.detector
    data: dict[str, Any] = {
        "alarm": "recovered" if inside else detector.alarm,
        "step": int(new.columns.step.max()),
        "after_steps": detector.alarm_after_steps,
        "step_time_s": level,
        "expected_low_s": watched.low_s,
        "expected_high_s": watched.high_s,
    }
    from_start = watched.level_s is None and (detector.alarm_after_steps or 0) <= _FROM_START_STEPS
    # Armed again around the new level, so that a second change, or the recovery, is noticed as well.
    width = max(watched.high_s / watched.low_s, 1.0) ** 0.5
    watched = replace(watched, detector=DriftState.expecting(level / width, level * width), level_s=level)
    if inside:
        data["sentence"] = "Training runs at the predicted speed again."
        watched = replace(watched, ratios={}, sentence=None, level_s=None)
        tx.runs.update(run.id, drifted=False, drift_state=asdict(watched), bump=True)
        tx.events.append(run.job_id, "drift", run_id=run.id, data=data)
        return watched
    job = tx.jobs.lock(run.job_id)
    spec = fitting.spec_of(job)
    tx.runs.update(run.id, drifted=False, drift_state=None)
    try:
        evidence = fitting.evidence_of(tx, job, spec, without=run.id)
        model = fitting.fit(tx, job, spec, evidence)
        compute = recent.compute_time_s
        known = compute[np.isfinite(compute)] if compute is not None else np.zeros(0)
        slowdown = drift.attribute(model, run.configuration, level, float(np.median(known)) if known.size else None)
        factors = drift.ratios(model, slowdown, [c for c, _ in evidence.rows])
        ratios = {run_id: factor for (_, run_id), factor in zip(evidence.rows, factors, strict=True)}
        since = "Since its start training is" if from_start else "Training has become"
        sentence = f"{since} {detector.alarm} than predicted: {slowdown.sentence}"
        data |= {"part": slowdown.part, "factor": slowdown.factor}
    except ObservationError as error:
        ratios, sentence = {}, f"Training is {detector.alarm} than predicted, and no model can say why: {error}"
    watched = replace(watched, ratios=ratios, sentence=sentence)
    tx.runs.update(run.id, drifted=True, drift_state=asdict(watched), bump=True)
    tx.events.append(run.job_id, "drift", run_id=run.id, data=data | {"sentence": f"{sentence}."})
    _advise(tx, tx.runs.get(run.id), watched, level, data["step"])
    return watched


def _advise(tx: Transaction, run: RunRecord, watched: _Watched, level_s: float, step: int) -> None:
    """Recommend another configuration when what it saves over the rest exceeds what the restart costs."""
    job = tx.jobs.get(run.job_id)
    spec = fitting.spec_of(job)
    try:
        found = choosing.answer(tx, job, spec, job.objective)
    except ObservationError:
        return
    chosen = found.choice.chosen
    if chosen is None or chosen.configuration == run.configuration:
        return
    left = max(0.0, spec.epochs * spec.dataset.size - step * run.configuration.global_batch_size)
    stay_s = left / run.configuration.global_batch_size * level_s
    move_s = left / chosen.configuration.global_batch_size * chosen.step_time_s.mean
    restart_s = watched.restart_s or 0.0
    by_cost = Objective(job.objective) is Objective.COST
    stay, move = stay_s, move_s + restart_s
    if by_cost:
        stay, move = _usd(spec, run, stay), _usd_of(spec, chosen.configuration, move)
    saving = stay - move
    unit = "USD" if by_cost else "s"
    pays = stay > 0 and saving > _LEAST_SAVING * stay
    data = {
        "kind": "reconfigure" if pays else "stay",
        "step": step,
        "from": convert.wire_configuration(run.configuration).model_dump(),
        "to": convert.wire_configuration(chosen.configuration).model_dump(),
        "remaining_examples": left,
        "step_time_s": level_s,
        "predicted_step_time_s": chosen.step_time_s.mean,
        "stay_s": stay_s,
        "move_s": move_s,
        "restart_s": restart_s,
        "saving": saving,
        "unit": unit,
        "sentence": (
            f"{'Restart with' if pays else 'Stay; not worth moving to'} {sentences.name_of(chosen.configuration)}: "
            f"the rest takes {stay:.4g} {unit} as it is and {move:.4g} {unit} there, "
            f"{restart_s:.3g} s of restart included."
        ),
    }
    tx.events.append(run.job_id, "advice", run_id=run.id, data=data)


def _check_limits(tx: Transaction, run: RunRecord, watched: _Watched, step: int, level_s: float) -> _Watched:
    """Say, once each, that deadline or budget will not hold at the present speed."""
    job = tx.jobs.get(run.job_id)
    spec = fitting.spec_of(job)
    if run.started_at is None or (spec.limits.deadline_s is None and spec.limits.budget_usd is None):
        return watched
    elapsed = (tx.now() - run.started_at).total_seconds()
    steps_left = max(0.0, spec.epochs * spec.dataset.size / run.configuration.global_batch_size - step)
    total_s = elapsed + steps_left * level_s
    total_usd = _usd(spec, run, total_s)
    said = list(watched.said)
    for name, value, limit, unit in (
        ("deadline", total_s, spec.limits.deadline_s, "s"),
        ("budget", total_usd, spec.limits.budget_usd, "USD"),
    ):
        if limit is None or value <= limit or name in said:
            continue
        said.append(name)
        sentence = (
            f"At {level_s:.3g} s a step, with {steps_left:.0f} steps left, training ends at {value:.4g} {unit}, "
            f"beyond the {name} of {limit:.4g} {unit}."
        )
        data = {"kind": name, "step": step, "projected": value, "limit": limit, "unit": unit, "sentence": sentence}
        tx.events.append(job.id, "advice", run_id=run.id, data=data)
    return replace(watched, said=said)


def _usd(spec: wire.JobSpec, run: RunRecord, seconds: float) -> float:
    return _usd_of(spec, run.configuration, seconds)


def _usd_of(spec: wire.JobSpec, configuration: Configuration, seconds: float) -> float:
    offers = {**convert.spot_offers_of(spec), **convert.offers_of(spec)}
    return seconds * offers[configuration.instance_type].usd_per_s(configuration)


def _read(state: dict[str, Any]) -> _Watched:
    return _Watched(**{**state, "detector": DriftState(**state["detector"])})
