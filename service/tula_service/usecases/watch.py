"""Training as it runs: live step time against its prediction, and budget and deadline against what is left."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

import tula_wire as wire
from tula_service.domain import RunKind
from tula_service.perfmodel import DriftState, ObservationError, watch_drift
from tula_service.store import JobRecord, NewSamples, RunRecord, Transaction
from tula_service.usecases import advice, drift, fitting
from tula_service.usecases.advice import Progress
from tula_service.usecases.recommend import Expectation
from tula_service.usecases.remaining import examples_left, usd_per_s

__all__ = ["begin", "observe"]

_LEVEL_STEPS = 8
_CHECK_EVERY_STEPS = 50
_FROM_START_STEPS = 50


@dataclass(frozen=True)
class _Watched:
    """What is remembered of a training run between two batches of samples; stored as JSON on the run.

    `spent_s` and `spent_usd` are what the runs took that this one goes on from; `elapsed_s` is its own time. Without a
    prediction there is no detector, and only limits are minded.
    """

    detector: DriftState | None = None
    low_s: float = 0.0
    high_s: float = 0.0
    restart_s: float | None = None
    checked_at: int = 0
    said: list[str] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)
    level_s: float | None = None
    sentence: str | None = None
    peak_bytes: float | None = None
    elapsed_s: float = 0.0
    spent_s: float = 0.0
    spent_usd: float = 0.0


def begin(tx: Transaction, job: JobRecord, run: RunRecord, expected: Expectation, before: RunRecord | None) -> None:
    """Watch a training run from now on, which goes on from `before`, if that is one.

    What the earlier run took counts, and what drifted in its time has drifted.
    """
    watched = _Watched(peak_bytes=expected.peak_bytes)
    if expected.step_time_s is not None:
        low, high = expected.step_time_s.low, expected.step_time_s.high
        watched = replace(watched, detector=DriftState.expecting(low, high), low_s=low, high_s=high)
    if before is not None and before.drift_state is not None:
        earlier = _read(before.drift_state)
        took_s = earlier.elapsed_s
        if before.started_at is not None and before.finished_at is not None:
            took_s = (before.finished_at - before.started_at).total_seconds()
        rate = usd_per_s(fitting.spec_of(job), before.configuration, earlier.peak_bytes) or 0.0
        watched = replace(
            watched,
            spent_s=earlier.spent_s + took_s,
            spent_usd=earlier.spent_usd + rate * took_s,
            ratios=_ratios_with(earlier, before),
            sentence=earlier.sentence,
        )
    tx.runs.update(run.id, drifted=bool(watched.sentence), drift_state=asdict(watched))


def _ratios_with(earlier: _Watched, before: RunRecord) -> dict[str, float]:
    """What an earlier run's drift corrects, its own mean step included: most of it may be from before the drift."""
    if not earlier.ratios or earlier.level_s is None or before.step_time_s is None:
        return earlier.ratios
    return {**earlier.ratios, before.id: earlier.level_s / before.step_time_s}


def observe(tx: Transaction, run: RunRecord, new: NewSamples) -> None:
    """Fold new samples of a training run into its watch; says `drift` and `advice` when there is cause.

    Runs in the transaction that stores the samples. Only the first rank counts, so that no step counts twice.
    """
    if run.kind is not RunKind.TRAIN or new.rank != 0 or run.drift_state is None:
        return
    watched = _read(run.drift_state)
    times = new.columns.step_time_s
    if run.started_at is not None:
        watched = replace(watched, elapsed_s=(tx.now() - run.started_at).total_seconds())
        if watched.restart_s is None:
            # What it took to get here, less the steps themselves, is what starting again would take.
            watched = replace(watched, restart_s=max(watched.elapsed_s - float(times.sum()), 0.0))
    if not new.warmup:
        if watched.detector is not None:
            detector = watch_drift(watched.detector, times)
            watched = replace(watched, detector=detector)
            if detector.alarm is not None:
                watched = _on_drift(tx, run, watched, detector, new)
        step = int(new.columns.step.max())
        # A launcher that restarts its processes within a run makes their steps begin anew.
        due = step < watched.checked_at or step >= watched.checked_at + _CHECK_EVERY_STEPS
        if due and _knows_how_far(watched, new):
            spec = fitting.spec_of(tx.jobs.get(run.job_id))
            at = _progress(spec, run, watched, new, float(np.median(times)))
            watched = replace(watched, checked_at=step, said=advice.mind_limits(tx, spec, run, at, said=watched.said))
    tx.runs.update(run.id, drift_state=asdict(watched))


def _on_drift(tx: Transaction, run: RunRecord, watched: _Watched, detector: DriftState, new: NewSamples) -> _Watched:
    """Say that the speed changed, correct what was measured before, and look whether another configuration pays."""
    recent = tx.samples.recent(run.key, limit=_LEVEL_STEPS, rank=0)
    level = float(np.median(recent.step_time_s))
    inside = watched.low_s <= level <= watched.high_s
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
    if _knows_how_far(watched, new):
        now = tx.jobs.get(run.job_id)  # as the drift has left it, so that the answer rests on it
        advice.reconfigure(tx, now, tx.runs.get(run.id), _progress(spec, run, watched, new, level))
    return watched


def _knows_how_far(watched: _Watched, new: NewSamples) -> bool:
    """False of a training that goes on from another and did not tell from where: what is left of it is not known."""
    return new.epochs_before is not None or watched.spent_s == 0.0


def _progress(spec: wire.JobSpec, run: RunRecord, watched: _Watched, new: NewSamples, level_s: float) -> Progress:
    """Where the training stands, at `level_s` a step."""
    return Progress(
        step=int(new.columns.step.max()),
        examples_left=examples_left(spec, run.configuration, new),
        step_time_s=level_s,
        elapsed_s=watched.elapsed_s,
        spent_s=watched.spent_s,
        spent_usd=watched.spent_usd,
        restart_s=watched.restart_s or 0.0,
        peak_bytes=watched.peak_bytes,
    )


def _read(state: dict[str, Any]) -> _Watched:
    detector = state.get("detector")
    return _Watched(**{**state, "detector": None if detector is None else DriftState(**detector)})
