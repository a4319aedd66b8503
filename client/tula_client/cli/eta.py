"""How long the rest of a plan may take: what runs cost beside their steps, and the steps that the service predicts."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean, median

from tula_wire import Job, Run


def seconds_left(job: Job, took_s: Mapping[str, float], elapsed_s: Mapping[str, float]) -> float | None:
    """Seconds until every run of the plan has ended; None before any has.

    took_s: what the runs took that this `tula` has seen end; elapsed_s: how long each that goes now has been going, all
    at once. A run takes its start and end, as long as those of the median run so far, and its steps, as many of those
    planned as runs have needed until now. Where no step time is predicted it takes what runs took on average.
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
    told = run.instruction
    return 0 if told is None else told.profiling_warmup_steps + told.measuring_steps
