"""Monitors training runs: raises alarms when the speed changes, and compares projections with deadline and budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

import numpy as np

import tula_wire as wire
from tula_service.analysis import alarm
from tula_service.analysis.alarm import Monitor
from tula_service.domain import RunRecord
from tula_service.errors import InvalidInput
from tula_service.perfmodel.pricing import Estimate
from tula_service.perfmodel.step_summary import robust_mean
from tula_service.store import Store, Transaction
from tula_service.store.jobs import JobRecord
from tula_service.usecases.access import Principal
from tula_service.usecases.job_data import read_spec
from tula_wire.format import duration, money

_CONFIRMING_STEPS, _LEVEL_STEPS = 20, 15
"""The number of newest steps that confirm an alarm, and the number of newest steps whose mean is the new step time.

The change detector fires after 15 steps.
"""
MOST_TRAININGS = 50
"""Maximum number of training runs in the metrics, which limits the number of series and the time per scrape."""
_TOKENS = "tokens_per_example"


def start(
    tx: Transaction, job: JobRecord, run: RunRecord, expected: Estimate | None, before: RunRecord | None = None
) -> None:
    """Start monitoring a training run.

    If the run continues an earlier run (`before`), the time and cost of the earlier run count toward the limits. Raises
    InvalidInput if the training run must stop at its limits and has no time or budget left.
    """
    spent_s = spent_usd = 0.0
    if before is not None:
        spent_s, spent_usd = _spent(read_spec(job), before, before.finished_at)
    monitor = Monitor.start(expected, spent_s=spent_s, spent_usd=spent_usd)
    limit_s = alarm.time_limit_s(read_spec(job), run.configuration, monitor)
    if limit_s is not None and limit_s <= 0.0:
        raise InvalidInput(
            f"The training has already spent {duration(spent_s)} and {money(spent_usd)}, and limits.on_breach is "
            "'stop': raise limits.deadline_s or limits.budget_usd, or set on_breach to 'warn'.",
            field="limits.on_breach",
        )
    tx.runs.update(run.id, monitor=monitor.to_json(), time_limit_s=limit_s)


def spent_until_now(tx: Transaction, run: RunRecord) -> str:
    """Return a sentence that states the time and cost of a training run and of the runs that it continues."""
    spent_s, spent_usd = _spent(read_spec(tx.jobs.get(run.job_id)), run, tx.now())
    paid = f" and {money(spent_usd)}" if spent_usd else ""
    return f"The training has spent {duration(spent_s)}{paid}, including earlier starts."


def _spent(spec: wire.JobSpec, run: RunRecord, until: datetime | None) -> tuple[float, float]:
    """Return the seconds and dollars (0 without prices) that a run and the runs that it continues have spent."""
    if run.monitor is None:
        return 0.0, 0.0
    monitor = Monitor.read(run.monitor)
    took_s = monitor.elapsed_s
    if run.started_at is not None and until is not None:
        took_s = (until - run.started_at).total_seconds()
    rate = alarm.usd_per_s(spec, run.configuration, monitor.peak_bytes) or 0.0
    return monitor.spent_s + took_s, monitor.spent_usd + rate * took_s


def observe_samples(tx: Transaction, run: RunRecord, new: wire.SampleBatch, num_new: int) -> None:
    """Update a training run's monitor with new samples from rank 0; emit events for speed changes and exceeded limits.

    The last `num_new` rows are assumed to be new, since a process numbers its samples in ascending order. No model is
    fitted here, because this function runs inside the transaction that stores the samples.
    """
    if run.kind != "train" or new.rank != 0 or run.monitor is None:
        return
    elapsed_s = None if run.started_at is None else (tx.now() - run.started_at).total_seconds()
    times, step = np.array(new.step_time_s[-num_new:]), max(new.step)
    monitor = Monitor.read(run.monitor).observe(times, elapsed_s=elapsed_s, warmup=new.warmup)
    monitor = monitor.at(step, new.epochs_before)
    if monitor.fired and not new.warmup:
        monitor = _check_alarm(tx, run, monitor, step)
    if not new.warmup and monitor.limits_due(step):
        monitor = _check_limits(tx, run, monitor, step)
    tx.runs.update(run.id, monitor=monitor.to_json())


def _check_alarm(tx: Transaction, run: RunRecord, monitor: Monitor, step: int) -> Monitor:
    detector = monitor.detector
    recent_s = tx.samples.recent(run.key, limit=_CONFIRMING_STEPS, rank=0).step_time_s
    level_s = robust_mean(recent_s[-_LEVEL_STEPS:])[0]
    if detector is None or level_s is None or not detector.confirmed_by(recent_s):
        return replace(monitor, detector=None if detector is None else detector.rearmed())
    raised = monitor.alarm(step, level_s)
    tx.runs.update(run.id, drift_sentence=raised.sentence, unsteady=not raised.from_start, bump=True)
    tx.events.append(run.job_id, "drift", run_id=run.id, data=raised.event)
    return monitor.expecting(level_s)


def _check_limits(tx: Transaction, run: RunRecord, monitor: Monitor, step: int) -> Monitor:
    spec = read_spec(tx.jobs.get(run.job_id))
    left = monitor.examples_left(spec, run.configuration)
    if left is None:
        return monitor
    mean_s = robust_mean(tx.samples.recent(run.key, limit=alarm.CHECK_EVERY_STEPS, rank=0).step_time_s)[0]
    if mean_s is None:
        return monitor
    broken = list(alarm.broken_limits(spec, run.configuration, monitor, step, left, mean_s))
    for advice in broken:
        tx.events.append(run.job_id, "advice", run_id=run.id, data=advice)
    announced = [*monitor.announced, *(advice["kind"] for advice in broken)]
    return replace(monitor, checked_at=step, announced=announced)


@dataclass(frozen=True)
class Progress:
    """The progress of a training run, including the work and cost of earlier starts; unknown values are None."""

    job_id: str
    job_name: str
    run_id: str
    step_time_s: float | None
    predicted_step_time_s: float | None
    done: float | None
    left_s: float | None
    spent_usd: float | None
    tokens_per_s: float | None


def running_trainings(store: Store, principal: Principal) -> list[Progress]:
    """Return the progress of the newest active training runs that `principal` may see, at most MOST_TRAININGS."""
    with store.reading() as tx:
        running = tx.runs.running_trainings(principal.project_id, limit=MOST_TRAININGS)
        return [progress(tx, run) for run in running]


def progress(tx: Transaction, run: RunRecord) -> Progress:
    """Return the progress of a running or ended training run, based on its newest samples."""
    job = tx.jobs.get(run.job_id)
    spec, configuration = read_spec(job), run.configuration
    monitor = Monitor() if run.monitor is None else Monitor.read(run.monitor)
    step_s = robust_mean(tx.samples.recent(run.key, limit=alarm.CHECK_EVERY_STEPS, rank=0).step_time_s)[0]
    left = monitor.examples_left(spec, configuration)
    tokens = spec.model.tokens_per_example or tx.telemetry.newest(run.key, [_TOKENS])[_TOKENS]
    priced = alarm.usd_per_s(spec, configuration, monitor.peak_bytes) is not None
    examples_per_s = None if step_s is None else configuration.global_batch_size / step_s
    return Progress(
        job_id=job.id,
        job_name=job.name,
        run_id=run.id,
        step_time_s=step_s,
        predicted_step_time_s=run.predicted_step_time_s,
        done=None if left is None else 1.0 - left / (spec.epochs * spec.dataset.size),
        left_s=None if left is None or examples_per_s is None else left / examples_per_s,
        spent_usd=_spent(spec, run, run.finished_at or tx.now())[1] if priced else None,
        tokens_per_s=None if tokens is None or examples_per_s is None else tokens * examples_per_s,
    )
