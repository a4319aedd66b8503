"""Training as it runs: live step time against its prediction, and budget and deadline against what is left."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from tula_service.domain import RunKind
from tula_service.perfmodel.change_detector import DriftState, watch_drift
from tula_service.store import JobRecord, NewSamples, RunRecord, Transaction
from tula_service.usecases import advice
from tula_service.usecases.background import Work
from tula_service.usecases.explain import explain
from tula_service.usecases.job_data import spec_of
from tula_service.usecases.recommendations import Expectation
from tula_service.usecases.remaining import examples_left, usd_per_s
from tula_service.usecases.watched import Alarm, Watched, read, told, written

__all__ = ["begin", "observe"]

_LEVEL_STEPS = 8
_CHECK_EVERY_STEPS = 50
_FROM_START_STEPS = 50


def begin(
    tx: Transaction,
    job: JobRecord,
    run: RunRecord,
    expected: Expectation,
    before: RunRecord | None = None,
    undrifted: Expectation | None = None,
) -> None:
    """Watch a training run from now on, which goes on from `before`, if that is one.

    What the earlier run took counts, and what drifted in its time has drifted: steps are compared with `expected`,
    which knows of that, and a recovery is told by what was `undrifted`.
    """
    watched = Watched(peak_bytes=expected.peak_bytes)
    if expected.step_time_s is not None:
        low, high = expected.step_time_s.low, expected.step_time_s.high
        watched = replace(watched, detector=DriftState.expecting(low, high), low_s=low, high_s=high)
    if before is not None and before.drift_state is not None:
        earlier = read(before.drift_state)
        took_s = earlier.elapsed_s
        if before.started_at is not None and before.finished_at is not None:
            took_s = (before.finished_at - before.started_at).total_seconds()
        rate = usd_per_s(spec_of(job), before.configuration, earlier.peak_bytes) or 0.0
        watched = replace(
            watched,
            spent_s=earlier.spent_s + took_s,
            spent_usd=earlier.spent_usd + rate * took_s,
            ratios=_ratios_with(earlier, before),
            sentence=earlier.sentence,
        )
        if earlier.sentence is not None and undrifted is not None and undrifted.step_time_s is not None:
            watched = replace(watched, low_s=undrifted.step_time_s.low, high_s=undrifted.step_time_s.high)
    tx.runs.update(run.id, drifted=bool(watched.sentence), drift_state=written(watched))


def _ratios_with(earlier: Watched, before: RunRecord) -> dict[str, float]:
    """What an earlier run's drift corrects, its own mean step included: most of it may be from before the drift."""
    if not earlier.ratios or earlier.level_s is None or before.step_time_s is None:
        return earlier.ratios
    return {**earlier.ratios, before.id: earlier.level_s / before.step_time_s}


def observe(tx: Transaction, run: RunRecord, new: NewSamples) -> Work | None:
    """Fold new samples of a training run into its watch; says `drift` and `advice` when there is cause.

    Runs in the transaction that stores the samples, so it only notices; what explains an alarm takes a fit, and is
    given back to be done afterwards, again with each batch until it was. Only the first rank counts, so that no step
    counts twice.
    """
    if run.kind is not RunKind.TRAIN or new.rank != 0 or run.drift_state is None:
        return None
    watched = read(run.drift_state)
    times = new.columns.step_time_s
    if run.started_at is not None:
        watched = replace(watched, elapsed_s=(tx.now() - run.started_at).total_seconds())
        if watched.restart_s is None:
            # What it took to get here, less the steps themselves, is what starting again would take.
            watched = replace(watched, restart_s=max(watched.elapsed_s - float(times.sum()), 0.0))
    if not new.warmup:
        if watched.detector is not None:
            watched = replace(watched, detector=watch_drift(watched.detector, times))
            watched = _noticed(tx, run, watched, new)
        step = int(new.columns.step.max())
        # A launcher that restarts its processes within a run makes their steps begin anew.
        due = step < watched.checked_at or step >= watched.checked_at + _CHECK_EVERY_STEPS
        if due and _knows_how_far(watched, new):
            spec = spec_of(tx.jobs.get(run.job_id))
            at = watched.progress(step, examples_left(spec, run.configuration, new), float(np.median(times)))
            watched = replace(watched, checked_at=step, said=advice.mind_limits(tx, spec, run, at, said=watched.said))
    tx.runs.update(run.id, drift_state=written(watched))
    return None if watched.alarm is None else partial(explain, run_id=run.id)


def _noticed(tx: Transaction, run: RunRecord, watched: Watched, new: NewSamples) -> Watched:
    """Where the detector has raised an alarm: that of a recovery is told at once, another is kept to be explained."""
    detector = watched.detector
    if detector is None or detector.alarm is None or detector.alarm_after_steps is None:
        return watched
    recent = tx.samples.recent(run.key, limit=_LEVEL_STEPS, rank=0)
    level, after_steps = float(np.median(recent.step_time_s)), detector.alarm_after_steps
    step = int(new.columns.step.max())
    # Armed again around the new level, so that a second change, or the recovery, is noticed as well.
    width = max(watched.high_s / watched.low_s, 1.0) ** 0.5
    watched = replace(watched, detector=DriftState.expecting(level / width, level * width))
    if watched.low_s <= level <= watched.high_s:
        watched = replace(watched, alarm=None, ratios={}, sentence=None, level_s=None)
        tx.runs.update(run.id, drifted=False, drift_state=written(watched), bump=True)
        data = told(watched, "recovered", step=step, after_steps=after_steps, level_s=level)
        data["sentence"] = "Training runs at the predicted speed again."
        tx.events.append(run.job_id, "drift", run_id=run.id, data=data)
        return watched
    compute = recent.compute_time_s
    known = compute[np.isfinite(compute)] if compute is not None else np.zeros(0)
    left: float | None = None
    if _knows_how_far(watched, new):
        left = examples_left(spec_of(tx.jobs.get(run.job_id)), run.configuration, new)
    return replace(
        watched,
        alarm=Alarm(
            kind=detector.alarm,
            step=step,
            after_steps=after_steps,
            from_start=watched.level_s is None and after_steps <= _FROM_START_STEPS,
            level_s=level,
            compute_s=float(np.median(known)) if known.size else None,
            examples_left=left,
        ),
    )


def _knows_how_far(watched: Watched, new: NewSamples) -> bool:
    """False of a training that goes on from another and did not tell from where: what is left of it is not known."""
    return new.epochs_before is not None or watched.spent_s == 0.0
