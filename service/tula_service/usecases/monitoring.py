"""Monitoring of training runs: changes of speed and their cause, deadline and budget, and advice with its figures."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import numpy as np

import tula_wire as wire
from tula_service.analysis import monitoring
from tula_service.analysis.answer import analyse
from tula_service.analysis.monitoring import Monitor
from tula_service.domain import RunRecord
from tula_service.errors import InvalidInput
from tula_service.perfmodel.choice import Estimate
from tula_service.perfmodel.step_summary import robust_mean
from tula_service.store import Store, Transaction
from tula_service.store.jobs import JobRecord
from tula_service.usecases.recommendations import load_job_data, spec_of

_CONFIRMING_STEPS, _LEVEL_STEPS = 20, 15
"""The newest steps that confirm an alarm, and those whose mean is the level after it: the detector fires after 15."""


def start(
    tx: Transaction, job: JobRecord, run: RunRecord, expected: Estimate | None, before: RunRecord | None = None
) -> None:
    """Start to monitor a training run; time and cost of the run `before` that it continues count toward its limits.

    Raises InvalidInput for a training that is to stop at its limits and has none of its time or money left.
    """
    spent_s = spent_usd = 0.0
    if before is not None:
        spent_s, spent_usd = _spent(spec_of(job), before, before.finished_at)
    monitor = Monitor.start(expected, spent_s=spent_s, spent_usd=spent_usd)
    limit_s = monitoring.time_limit_s(spec_of(job), run.configuration, monitor)
    if limit_s is not None and limit_s <= 0.0:
        raise InvalidInput(
            f"{spent_s:.4g} s and {spent_usd:.4g} USD are spent, and limits.on_breach is 'stop': raise "
            "limits.deadline_s or limits.budget_usd, or set on_breach to 'warn'.",
            field="limits.on_breach",
        )
    tx.runs.update(run.id, drift_state=monitor.to_json(), time_limit_s=limit_s)


def spent_until_now(tx: Transaction, run: RunRecord) -> str:
    """A sentence on what a training has spent, with the runs that it continues."""
    spent_s, spent_usd = _spent(spec_of(tx.jobs.get(run.job_id)), run, tx.now())
    money = f" and {spent_usd:.4g} USD" if spent_usd else ""
    return f"The training has spent {spent_s:.4g} s{money}, earlier starts included."


def _spent(spec: wire.JobSpec, run: RunRecord, until: datetime | None) -> tuple[float, float]:
    """Seconds and dollars of a run and of those that it continues; without prices no dollars."""
    if run.drift_state is None:
        return 0.0, 0.0
    monitor = Monitor.read(run.drift_state)
    took_s = monitor.elapsed_s
    if run.started_at is not None and until is not None:
        took_s = (until - run.started_at).total_seconds()
    rate = monitoring.usd_per_s(spec, run.configuration, monitor.peak_bytes) or 0.0
    return monitor.spent_s + took_s, monitor.spent_usd + rate * took_s


def ingest(tx: Transaction, run: RunRecord, new: wire.SampleBatch, num_new: int) -> bool:
    """Update a training run's monitor with new samples of its first rank, and announce recovery and broken limits.

    The last `num_new` rows are new: where a batch is resent in part, those that were stored before come first. Runs in
    the transaction that stores the samples, so it makes no fit. An alarm is stored with the run: True, with every
    batch, until `diagnose` has announced its cause and its advice.
    """
    if run.kind != "train" or new.rank != 0 or run.drift_state is None:
        return False
    elapsed_s = None if run.started_at is None else (tx.now() - run.started_at).total_seconds()
    times, step = np.array(new.step_time_s[-num_new:]), max(new.step)
    monitor = Monitor.read(run.drift_state).observe(times, elapsed_s=elapsed_s, warmup=new.warmup)
    if not new.warmup and (monitor.fired or monitor.limits_due(step)):
        spec, left = spec_of(tx.jobs.get(run.job_id)), None
        if new.epochs_before is not None or monitor.spent_s == 0.0:  # else its starting epoch is unknown
            left = monitoring.examples_left(spec, run.configuration, step, new.epochs_before)
        if monitor.fired:
            monitor = _check_alarm(tx, run, monitor, step, left)
        if left is not None and monitor.limits_due(step):
            recent = tx.samples.recent(run.key, limit=monitoring.CHECK_EVERY_STEPS, rank=0)
            mean_s = robust_mean(recent.step_time_s)[0] or float(times.mean())
            broken = list(monitoring.broken_limits(spec, run.configuration, monitor, step, left, mean_s))
            for advice in broken:
                tx.events.append(run.job_id, "advice", run_id=run.id, data=advice)
            announced = [*monitor.announced, *(advice["kind"] for advice in broken)]
            monitor = replace(monitor, checked_at=step, announced=announced)
    tx.runs.update(run.id, drift_state=monitor.to_json())
    return monitor.alarm is not None


def _check_alarm(tx: Transaction, run: RunRecord, monitor: Monitor, step: int, left: float | None) -> Monitor:
    detector = monitor.detector
    recent = tx.samples.recent(run.key, limit=_CONFIRMING_STEPS, rank=0)
    if detector is None or not detector.confirmed_by(recent.step_time_s):
        return replace(monitor, detector=None if detector is None else detector.rearmed())
    columns = (recent.compute_time_s, recent.input_time_s)
    newest_s = recent.step_time_s[-_LEVEL_STEPS:]
    compute_s, input_s = (None if each is None else each[-_LEVEL_STEPS:] for each in columns)
    changed = monitor.raise_alarm(step, newest_s, compute_s, input_s, left)
    if changed.alarm is not None:
        tx.runs.update(run.id, unsteady=not changed.alarm.from_start)
        return changed
    tx.runs.update(run.id, drifted=False, drift_sentence=None, unsteady=True, bump=True)
    level_s = robust_mean(newest_s)[0] or monitor.high_s
    event = monitor.event("recovered", step=step, after_steps=detector.alarm_after_steps, level_s=level_s)
    sentence = "Training runs at the predicted speed again."
    tx.events.append(run.job_id, "drift", run_id=run.id, data=event | {"sentence": sentence})
    return changed


def diagnose(store: Store, run_id: str) -> None:
    """Announce what changed, and whether another configuration pays.

    Computes on a read-only snapshot, so that no writer waits for a fit. The alarm is stored until then, so that a call
    after a failure repeats it; an alarm that was replaced meanwhile is left to the next call. Raises NotFound, Busy,
    StoreUnavailable.
    """
    with store.compute_slot():
        with store.reading() as tx:
            run = tx.runs.get(run_id)
            monitor = Monitor.read(run.drift_state or {})
            alarm = monitor.alarm
            if alarm is None:
                return
            data = load_job_data(tx, tx.jobs.get(run.job_id))
        found = monitoring.diagnose(analyse(data.ignoring(run_id)), run.configuration, monitor, alarm)
        advice = None
        if alarm.examples_left is not None:
            present = data.since(run_id, alarm.level_s, alarm.compute_s)
            advice = monitoring.reconfigure(analyse(present), run.configuration, monitor, alarm)
    with store.transaction() as tx:
        tx.jobs.lock(run.job_id)  # keeps samples out
        current = Monitor.read(tx.runs.get(run_id).drift_state or {})
        if current.alarm != alarm:
            return
        state = replace(current, alarm=None).to_json()
        tx.runs.update(run_id, drifted=True, drift_sentence=found["sentence"], drift_state=state, bump=True)
        event = current.event(alarm.kind, step=alarm.step, after_steps=alarm.after_steps, level_s=alarm.level_s)
        sentence = f"{found['sentence']}."
        tx.events.append(run.job_id, "drift", run_id=run_id, data=event | found | {"sentence": sentence})
        if advice is not None:
            tx.events.append(run.job_id, "advice", run_id=run_id, data=advice)
