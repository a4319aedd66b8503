"""Estimates how long the remaining runs of a plan take."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean, median

from tula_wire import Job, Run


def seconds_left(job: Job, took_s: Mapping[str, float], elapsed_s: Mapping[str, float]) -> float | None:
    """Seconds until every run of the plan has ended; None before the first has.

    took_s: durations of the runs that this `tula` has seen end. elapsed_s: seconds since the start of each active run;
    as many runs are assumed active until the end. Estimates start-up time by the median so far, and steps by the
    fraction of planned steps that earlier runs needed. Without a predicted step time, a run takes the average duration.
    """
    ended = [run for run in job.plan if run.id in took_s]
    measured = [run for run in ended if run.step_time_s is not None and _steps(run)]
    if not took_s:
        return None
    around_s = share = None
    if measured:
        needed = [min(run.num_samples, _steps(run)) for run in measured]
        pairs = list(zip(measured, needed, strict=True))
        around_s = median(max(0.0, took_s[run.id] - steps * (run.step_time_s or 0.0)) for run, steps in pairs)
        share = fmean(steps / _steps(run) for run, steps in pairs)
    average_s = fmean(took_s.values())
    total_s = 0.0
    for run in job.plan:
        if run.state not in ("pending", "claimed", "running") or run.id in took_s:
            continue
        expected_s = average_s
        if around_s is not None and share is not None and run.predicted_step_time_s is not None:
            expected_s = around_s + share * _steps(run) * run.predicted_step_time_s
        total_s += max(0.0, expected_s - elapsed_s.get(run.id, 0.0))
    return total_s / max(1, len(elapsed_s))


def _steps(run: Run) -> int:
    plan = run.instruction
    return 0 if plan is None else plan.profiling_warmup_steps + plan.measuring_steps
