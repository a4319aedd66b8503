"""Decides what to profile next: which waiting runs to keep or cancel, and which runs to add.

It also computes the cost of profiling so far, including the start-up of launches, and the expected cost of the
remaining runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeAlias

import tula_wire as wire
from tula_service.analysis.answer import Analysis, Answer, Infeasible
from tula_service.analysis.evidence import leave_one_out
from tula_service.analysis.explanation import explain_choice
from tula_service.analysis.job_data import JobData
from tula_service.analysis.transfer import export_posteriors
from tula_service.domain import NewRun, RunRecord
from tula_service.perfmodel.planner import Plan, PlanBudget, counted_launches, plan
from tula_service.perfmodel.points import ObservationError
from tula_service.perfmodel.variants import find_launch, find_launches
from tula_wire import Configuration
from tula_wire.bounds import FURTHER_WARMUP_STEPS
from tula_wire.enums import FINAL_STATES
from tula_wire.jobs import ProfilingCost

_DEFAULT_MAX_RUNS = 8
_RUNS_WITH_OPTIONS, _RUNS_PER_OPTION, _RUNS_PER_FURTHER_TYPE = 4, 2, 2
_START_UP_S = 30.0
"""The assumed start-up time of a launch in seconds, used until a launch of the job has ended."""
Span: TypeAlias = tuple[RunRecord, float, float]
"""A run with the times, in seconds since 1970, at which it began and ended."""


@dataclass(frozen=True)
class PlanDecision:
    """The plan for one version of a job's data, which `usecases/planning.py` stores.

    `cancelled` contains the ids of the waiting runs to cancel, and `predicted_step_time_s` has an entry for each
    waiting run that is kept. `active` is False if profiling is over; `posteriors` then contains the results that later
    jobs can use, and `cross_validated_error` is the model's error on runs that were left out of the fit.
    """

    new: tuple[NewRun, ...]
    cancelled: tuple[str, ...]
    active: bool
    reason: str
    predicted_step_time_s: Mapping[str, float] = field(default_factory=dict)
    posteriors: dict[str, dict[str, Any]] | None = None
    cross_validated_error: float | None = None


def decide_plan(analysis: Analysis) -> PlanDecision:
    """Return the decision on what to profile next.

    Runs in progress continue, and waiting runs are kept as long as they are worthwhile.
    """
    runs = analysis.data.profile_runs
    waiting = [run for run in runs if run.state == "pending"]
    begun = [run for run in runs if run.state in ("claimed", "running")]
    try:
        if isinstance(analysis, Infeasible):
            raise ObservationError(analysis.reason)
        kept, new_plan = _next_runs(analysis, begun, _worth_keeping(analysis, waiting))
    except ObservationError as error:  # no candidate is feasible, or the runs of all candidates have failed
        return PlanDecision((), tuple(sorted(run.id for run in waiting)), bool(begun), str(error))
    again = _to_repeat(analysis, [run.configuration for run in (*kept, *begun)])
    left = [
        *(planned.configuration for planned in new_plan.runs),
        *(run.configuration for run in (*again, *kept, *begun)),
    ]
    over = analysis.evidence.observed is not None and not left
    reason = new_plan.stop_reason or (
        _progress(left, analysis.spec.profiling.share_launches)
        if left
        else f"No further run would help: {explain_choice(analysis.choice)}"
    )
    # A repeated run has the position of the failed run, so that it precedes the waiting runs.
    last = max((run.position for run in analysis.data.profile_runs), default=-1)
    new = [_new(analysis, run.configuration, f"Repeats {run.id}, which failed.", run.position) for run in again]
    new += [
        _new(analysis, planned.configuration, planned.purpose, last + row)
        for row, planned in enumerate(new_plan.runs, 1)
    ]
    return PlanDecision(
        new=tuple(new),
        cancelled=tuple(sorted({run.id for run in waiting} - {run.id for run in kept})),
        active=bool(left),
        reason=reason + _failures(analysis),
        predicted_step_time_s={run.id: _step_time_s(analysis, run.configuration) for run in kept},
        posteriors=export_posteriors(analysis.model) if over else None,
        cross_validated_error=leave_one_out(analysis.evidence, analysis.model) if over else None,
    )


def _new(answer: Answer, configuration: Configuration, purpose: str, position: int) -> NewRun:
    return NewRun(
        "profile",
        configuration,
        purpose=purpose,
        instruction=build_instruction(answer.data.spec),
        position=position,
        predicted_step_time_s=_step_time_s(answer, configuration),
    )


def _step_time_s(answer: Answer, configuration: Configuration) -> float:
    return float(answer.model.predict([configuration]).mean_s[0])


def build_instruction(spec: wire.JobSpec) -> dict[str, float]:
    """Return the instruction that the agent of a profiling run of this job receives."""
    return spec.profiling.model_dump(include={"profiling_warmup_steps", "measuring_steps", "precision"})


def _worth_keeping(answer: Answer, waiting: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the waiting runs that are feasible and whose configuration has not been measured by another run."""
    evidence = answer.evidence
    ids = {run.id for run in answer.data.profile_runs if run.state not in FINAL_STATES}
    measured = {configuration for configuration, run_id in evidence.rows if run_id not in ids}
    feasible = set(evidence.candidates) - evidence.failed - measured
    return [run for run in waiting if run.configuration in feasible]


def _next_runs(answer: Answer, begun: Sequence[RunRecord], waiting: list[RunRecord]) -> tuple[list[RunRecord], Plan]:
    """Return the waiting runs to keep, and a plan for the runs to add.

    Runs that repeat a failed run, and interrupted runs whose lease has expired, are always kept. To decide about all
    other waiting runs, a new plan is made without them. If the new plan has at least as many runs, the old design is
    still valid, and all waiting runs are kept. If the new plan has fewer runs or, with shared launches, does not
    include a waiting launch, enough has been measured in the meantime, and only the waiting runs in the new plan are
    kept.
    """
    again = [run.configuration for run in _to_repeat(answer, ())]
    in_use = [*(run.configuration for run in begun), *again]
    fixed = {run.configuration for run in waiting} & {*answer.evidence.measured, *again}
    if waiting:
        fresh = _plan(answer, in_use)
        asked = {planned.configuration for planned in fresh.runs} | fixed
        unasked = find_launches(run.configuration for run in waiting) - find_launches(asked)
        if len(fresh.runs) < len(waiting) - len(fixed) or (unasked and answer.spec.profiling.share_launches):
            kept = [run for run in waiting if run.configuration in asked]
            present = {run.configuration for run in kept}
            new = tuple(planned for planned in fresh.runs if planned.configuration not in present)
            return kept, Plan(new, fresh.stop_reason)
    return waiting, _plan(answer, [*in_use, *(run.configuration for run in waiting)])


def _to_repeat(answer: Answer, in_use: Collection[Configuration]) -> list[RunRecord]:
    """Return the failed runs to repeat that are feasible and not `in_use`; if no GPU-seconds remain, return no runs."""
    budget = _budget(answer.data)
    if budget.max_gpu_seconds is not None and budget.spent_gpu_seconds >= budget.max_gpu_seconds:
        return []
    feasible = set(answer.evidence.candidates) - set(in_use)
    return [run for run in answer.evidence.retried if run.configuration in feasible]


def _plan(answer: Answer, pending: Sequence[Configuration]) -> Plan:
    evidence = answer.evidence
    return plan(
        answer.spec.search,
        evidence.candidates,
        answer.model,
        goal=answer.choice.goal,
        recommendation=answer.choice,
        budget=_budget(answer.data),
        pending=pending,
        unavailable=evidence.failed,
    )


def _budget(data: JobData) -> PlanBudget:
    profiling = data.spec.profiling
    instruction = build_instruction(data.spec)
    return PlanBudget(
        max_runs=most_launches(data.spec),
        by_default=profiling.max_runs is None,
        share_launches=profiling.share_launches,
        max_gpu_seconds=profiling.max_gpu_seconds,
        spent_gpu_seconds=_totals(data.spec, map(_taken, _launches(data.profile_runs, data.spec)))[0],
        steps_per_run=_steps(instruction),
        steps_per_further_run=_steps(instruction, further=True),
        failed=frozenset(
            run.configuration for run in data.profile_runs if run.state == "failed" and run.key > data.retried_up_to_key
        ),
    )


def most_launches(spec: wire.JobSpec) -> int:
    """Return the maximum number of launches in an adaptive search or, if launches are not shared, of runs."""
    options = sum(len(values) > 1 for values in spec.varied_options.values())
    further_types = len(spec.cluster) - 1
    with_options = _RUNS_WITH_OPTIONS + _RUNS_PER_OPTION * options + _RUNS_PER_FURTHER_TYPE * further_types
    return spec.profiling.max_runs or (with_options if options else _DEFAULT_MAX_RUNS)


def profiling_cost(spec: wire.JobSpec, plan: Sequence[RunRecord], now_s: float) -> ProfilingCost:
    """Return the cost of the plan's runs up to `now_s` (seconds since 1970), and the expected cost of unfinished runs.

    The expected duration of a launch is the sum of its start-up time and its predicted step times. The start-up time is
    the median over the launches that ended with measurements or, if there are none yet, 30 s. If the leases of a launch
    have expired, the launch is assumed to have ended when they expired, and its runs will be repeated; once they are
    leased again, the first attempt is no longer counted. Until all launches have ended, an adaptive search may add more
    launches up to its limit. Each added launch is expected to take as long as the longest launch in the plan, and to
    cost as much as the most expensive launch.
    """
    launches = _launches(plan, spec, now_s)
    start_ups_s = []
    under_way: set[object] = set()
    for spans in launches:
        if any(run.state not in FINAL_STATES for run, _, _ in spans):
            if any(ended_s >= now_s for _, _, ended_s in spans):
                under_way.add(_launch(spans[0][0], spec))
        elif any(run.state == "succeeded" for run, _, _ in spans) and (in_steps_s := _in_steps_s(spans)):
            start_ups_s.append(max(0.0, _taken(spans)[1] - in_steps_s))
    start_up_s = median(start_ups_s) if start_ups_s else _START_UP_S
    waiting: dict[object, list[RunRecord]] = {}
    for run in sorted(plan, key=lambda run: run.configuration.local_batch_size):
        if run.state not in FINAL_STATES:
            waiting.setdefault(_launch(run, spec), []).append(run)
    left = []
    for launch, runs in waiting.items():
        seconds = 0.0 if launch in under_way else start_up_s
        for place, run in enumerate(runs):
            further = place > 0 or launch in under_way
            seconds += _steps(run.instruction, further) * (run.predicted_step_time_s or 0.0)
        left.append((runs[0].configuration, seconds))
    taken = [_taken(spans) for spans in launches]
    spent, spent_usd = _totals(spec, taken)
    left_gpu_seconds, left_usd = _totals(spec, left)
    left_s = sum(seconds for _, seconds in left)
    added = _launches_to_add(spec, plan) if left else 0
    most_s = max((seconds for _, seconds in (*taken, *left)), default=0.0)
    most_usd = max((_totals(spec, [launch])[1] or 0.0 for launch in (*taken, *left)), default=0.0)
    return ProfilingCost(
        spent_gpu_seconds=spent,
        spent_usd=spent_usd,
        launches_left=len(left),
        runs_left=sum(map(len, waiting.values())),
        left_s=left_s,
        left_gpu_seconds=left_gpu_seconds,
        left_usd=left_usd,
        launches_at_most=len(left) + added,
        at_most_s=left_s + added * most_s,
        at_most_usd=None if left_usd is None else left_usd + added * most_usd,
    )


def _launches_to_add(spec: wire.JobSpec, plan: Sequence[RunRecord]) -> int:
    """Return the number of launches that an adaptive search may still add to the plan."""
    if spec.search != "adaptive":
        return 0
    planned = (run.configuration for run in plan if run.state != "cancelled")
    counted = counted_launches(planned, share_launches=spec.profiling.share_launches)
    return max(0, most_launches(spec) - counted)


def _launch(run: RunRecord, spec: wire.JobSpec) -> object:
    return find_launch(run.configuration) if spec.profiling.share_launches else run.id


def _launches(runs: Iterable[RunRecord], spec: wire.JobSpec, now_s: float | None = None) -> list[list[Span]]:
    """Return the time spans of all runs that have begun, grouped by launch; if `now_s` is None, omit unfinished runs.

    All spans of a launch are on one cluster, and each span except the first overlaps an earlier one.
    """
    spans, by_place = [], dict[object, list[list[Span]]]()
    for run in runs:
        ended_s = _ended_s(run, now_s)
        if run.started_at is not None and ended_s is not None:
            spans.append((run, run.started_at.timestamp(), ended_s))
    for span in sorted(spans, key=lambda span: span[1]):
        launches = by_place.setdefault(_launch(span[0], spec), [])
        if launches and span[1] <= max(ended for _, _, ended in launches[-1]):
            launches[-1].append(span)
        else:
            launches.append([span])
    return [spans for launches in by_place.values() for spans in launches]


def _taken(spans: Sequence[Span]) -> tuple[Configuration, float]:
    """Return a configuration of the launch, and the duration of the launch in seconds."""
    return spans[0][0].configuration, max(ended for _, _, ended in spans) - spans[0][1]


def _in_steps_s(spans: Sequence[Span]) -> float:
    """Return the number of seconds that the runs of a finished launch spent in steps.

    The steps of a run are counted up to the planned number. A run may have more samples than steps, because ranks other
    than the first also send a few samples to report their memory use.
    """
    runs = sorted((run for run, _, _ in spans), key=lambda run: run.configuration.local_batch_size)
    counted = [min(run.num_samples, _steps(run.instruction, place > 0)) for place, run in enumerate(runs)]
    return sum(number * (run.step_time_s or 0.0) for number, run in zip(counted, runs, strict=True))


def _ended_s(run: RunRecord, now_s: float | None) -> float | None:
    """Return the time at which a run ended, in seconds since 1970.

    For a run in progress, the result is `now_s` or the end of the run's lease, whichever is earlier.
    """
    if run.finished_at is not None:
        return run.finished_at.timestamp()
    return now_s if now_s is None or run.lease_expires_at is None else min(now_s, run.lease_expires_at.timestamp())


def _steps(instruction: Mapping[str, float] | None, further: bool = False) -> int:
    """Return the planned number of steps of a run; `further` is True if it is not the first run of its launch."""
    if instruction is None:
        return 1
    warmup_steps = instruction["profiling_warmup_steps"]
    return int((min(warmup_steps, FURTHER_WARMUP_STEPS) if further else warmup_steps) + instruction["measuring_steps"])


def _totals(spec: wire.JobSpec, used: Iterable[tuple[Configuration, float]]) -> tuple[float, float | None]:
    """Return the GPU-seconds and, if known, the cost in dollars of running these configurations for the given times."""
    prices = {cluster.instance_type: cluster.price.usd_per_node_hour for cluster in spec.cluster}
    unpriced = all(price is None for price in prices.values())
    gpu_seconds, usd = 0.0, 0.0
    for configuration, seconds in used:
        gpu_seconds += configuration.world_size * seconds
        price = prices.get(configuration.instance_type)
        unpriced |= price is None
        usd += (price or 0.0) * configuration.num_nodes * seconds / 3600.0
    return gpu_seconds, None if unpriced else usd


def _progress(waiting: Sequence[Configuration], share_launches: bool) -> str:
    """Return a sentence with the number of runs that remain to be measured."""
    total, launches = len(waiting), len(find_launches(waiting))
    within = f" in {launches} launch{'es' if launches != 1 else ''}" if share_launches else ""
    return f"{total} profiling run{'s are' if total != 1 else ' is'} still to be measured{within}."


def _failures(answer: Answer) -> str:
    """Return a sentence with the number of configurations that failed for reasons other than memory, and a remedy.

    If there are no such configurations, the result is an empty string.
    """
    runs = answer.data.profile_runs
    failed = {run.configuration for run in runs if run.state == "failed"} & answer.evidence.failed
    if not failed:
        return ""
    single = len(failed) == 1
    return (
        f" {len(failed)} configuration{'' if single else 's'} failed to run; to retry {'it' if single else 'them'}, "
        "fix the cause and register the job again."
    )
