"""What to profile next, decided from an `Answer`: which waiting runs stay, which are cancelled, which are new."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import tula_wire as wire
from tula_service.analysis.answer import Analysis, Answer, Infeasible
from tula_service.analysis.evidence import leave_one_out
from tula_service.analysis.job_data import CrossValidation, JobData, JobRun, Posterior
from tula_service.analysis.priors import posteriors_of
from tula_service.domain import RunState, Search
from tula_service.perfmodel.columns import column_of, columns_of
from tula_service.perfmodel.planner import Plan, PlanBudget, plan
from tula_service.perfmodel.points import ObservationError
from tula_wire import Configuration

_DEFAULT_MAX_RUNS = 8


@dataclass(frozen=True)
class NextRun:
    """A run to profile; the lowest `position` is claimed first. `predicted_step_time_s` is None before any run."""

    configuration: Configuration
    purpose: str
    position: int
    predicted_step_time_s: float | None


@dataclass(frozen=True)
class PlanDecision:
    """The plan for one version of a job's data; `usecases/planning.py` stores it.

    `cancelled` are ids of waiting runs. `predicted_step_time_s` is by id of the waiting runs that stay. `active` is
    False when profiling is over; then `posteriors` are what later jobs learn, and `cross_validation` is how well the
    model predicts runs that it has not seen.
    """

    new: tuple[NextRun, ...]
    cancelled: tuple[str, ...]
    active: bool
    reason: str
    predicted_step_time_s: Mapping[str, float | None] = field(default_factory=dict)
    posteriors: Mapping[str, Posterior] | None = None
    cross_validation: CrossValidation | None = None


def plan_of(analysis: Analysis) -> PlanDecision:
    """Decide what to profile next. Runs that have begun continue; a waiting run stays while it is still worth it."""
    runs = analysis.data.profile_runs
    waiting = [run for run in runs if run.state is RunState.PENDING]
    begun = [run for run in runs if run.state in (RunState.CLAIMED, RunState.RUNNING)]
    try:
        if isinstance(analysis, Infeasible):
            raise ObservationError(analysis.reason)
        kept, found = _next_runs(analysis, begun, _worth_keeping(analysis, waiting))
    except ObservationError as error:  # every candidate is infeasible, or failed
        return PlanDecision((), tuple(sorted(run.id for run in waiting)), bool(begun), str(error))
    kept_ids = [run.id for run in kept]
    again = _to_repeat(analysis, [run.configuration for run in (*kept, *begun)])
    active = bool(found.runs) or bool(again) or bool(kept) or bool(begun)
    over = analysis.evidence.observed is not None and not active
    validation = leave_one_out(analysis.evidence, analysis.prior, analysis.model.form) if over else None
    left = [*(run.configuration for run in found.runs), *(run.configuration for run in (*again, *kept, *begun))]
    reason = found.stop_reason or _progress(left, analysis.spec.profiling.columns)
    return PlanDecision(
        new=(*_repeated(analysis, again), *_new_runs(analysis, found)),
        cancelled=tuple(sorted(run.id for run in waiting if run.id not in kept_ids)),
        active=active,
        reason=reason + _failures(analysis),
        predicted_step_time_s=dict(
            zip(kept_ids, _expected(analysis, [run.configuration for run in kept]), strict=True)
        ),
        posteriors=posteriors_of(analysis.model) if over else None,
        cross_validation=validation,
    )


def instruction_of(spec: wire.JobSpec) -> dict[str, float]:
    """What the agent of a profiling run of this job does."""
    profiling = spec.profiling
    return {
        "profiling_warmup_steps": profiling.profiling_warmup_steps,
        "measuring_steps": profiling.measuring_steps,
        "precision": profiling.precision,
    }


def _worth_keeping(answer: Answer, waiting: Sequence[JobRun]) -> list[JobRun]:
    """The waiting runs that are feasible and whose configuration no other run has measured."""
    evidence = answer.evidence
    ids = {run.id for run in answer.data.profile_runs if not run.state.is_final}
    measured = {configuration for configuration, run_id in evidence.rows if run_id not in ids}
    feasible = set(evidence.candidates) - evidence.failed - measured
    return [run for run in waiting if run.configuration in feasible]


def _next_runs(answer: Answer, begun: Sequence[JobRun], waiting: list[JobRun]) -> tuple[list[JobRun], Plan]:
    """The waiting runs that stay, and what to add.

    Failed runs that are repeated, waiting or to be added, stay in any case. Other waiting runs stay while a plan
    without them would ask for at least as many: the design that chose them still holds. If it asks for fewer, enough
    has been measured meanwhile, and only the waiting runs that it asks for stay. A run that lost its lease half-way is
    among neither: it stays, to be completed.
    """
    again = [run.configuration for run in _to_repeat(answer, ())]
    in_use = [*(run.configuration for run in begun), *again]
    fixed = {run.configuration for run in waiting} & {*answer.evidence.measured, *again}
    if waiting:
        fresh = _plan(answer, in_use)
        if len(fresh.runs) < len(waiting) - len(fixed):
            asked = {planned.configuration for planned in fresh.runs} | fixed
            kept = [run for run in waiting if run.configuration in asked]
            present = {run.configuration for run in kept}
            new = tuple(planned for planned in fresh.runs if planned.configuration not in present)
            return kept, Plan(new, fresh.stop_reason)
    return waiting, _plan(answer, [*in_use, *(run.configuration for run in waiting)])


def _to_repeat(answer: Answer, in_use: Collection[Configuration]) -> list[JobRun]:
    """The failed runs that are feasible, of no configuration `in_use`; none once the GPU-seconds are used up."""
    budget = _budget(answer.data)
    if budget.max_gpu_seconds is not None and budget.spent_gpu_seconds >= budget.max_gpu_seconds:
        return []
    feasible = set(answer.evidence.candidates) - set(in_use)
    return [run for run in answer.evidence.retried if run.configuration in feasible]


def _repeated(answer: Answer, failed: Sequence[JobRun]) -> tuple[NextRun, ...]:
    """A run in the place of each failed one, so that it comes before what waits."""
    expected = _expected(answer, [run.configuration for run in failed])
    return tuple(
        NextRun(run.configuration, f"Repeats {run.id}, which failed.", run.position, expected[row])
        for row, run in enumerate(failed)
    )


def _plan(answer: Answer, pending: Sequence[Configuration]) -> Plan:
    evidence = answer.evidence
    return plan(
        Search(answer.spec.search),
        evidence.candidates,
        answer.model,
        goal=answer.goal,
        recommendation=answer.recommendation,
        budget=_budget(answer.data),
        pending=pending,
        unavailable=evidence.failed,
    )


def _new_runs(answer: Answer, found: Plan) -> tuple[NextRun, ...]:
    first = max((run.position for run in answer.data.profile_runs), default=-1) + 1
    expected = _expected(answer, [planned.configuration for planned in found.runs])
    return tuple(
        NextRun(planned.configuration, planned.purpose, first + row, expected[row])
        for row, planned in enumerate(found.runs)
    )


def _expected(answer: Answer, configurations: Sequence[Configuration]) -> Sequence[float | None]:
    """Their predicted step times, s; None before any run."""
    if not configurations or answer.evidence.observed is None:
        return [None] * len(configurations)
    predicted: list[float] = answer.model.predict(configurations).mean_s.tolist()
    return predicted


def _budget(data: JobData) -> PlanBudget:
    profiling = data.spec.profiling
    return PlanBudget(
        max_runs=profiling.max_runs or _DEFAULT_MAX_RUNS,
        by_default=profiling.max_runs is None,
        by_column=profiling.columns,
        max_gpu_seconds=profiling.max_gpu_seconds,
        spent_gpu_seconds=_spent_gpu_seconds(data),
        steps_per_run=profiling.profiling_warmup_steps + profiling.measuring_steps,
    )


def _spent_gpu_seconds(data: JobData) -> float:
    """Seconds times ranks of all profiling runs; where the runs of a launch overlap in time, they count once."""
    runs = [(run, run.started_at_s or 0.0, run.duration_s) for run in data.profile_runs if run.duration_s is not None]
    spans = [(_launch(run, data.spec), began, began + max(0.0, took)) for run, began, took in runs]
    return sum(s * run.configuration.world_size for s, (run, _, _) in zip(_counted_once(spans), runs, strict=True))


def _launch(run: JobRun | wire.Run, spec: wire.JobSpec) -> object:
    return column_of(run.configuration) if spec.profiling.columns else run.id


def _counted_once(spans: Sequence[tuple[object, float, float]]) -> list[float]:
    """Seconds of each span (launch, beginning, end), without those that a span of the same launch has already."""
    seconds = [0.0] * len(spans)
    until: dict[object, float] = {}
    for row in sorted(range(len(spans)), key=lambda row: spans[row][1]):
        launch, began, ended = spans[row]
        seconds[row] = max(0.0, ended - max(began, until.get(launch, began)))
        until[launch] = max(ended, until.get(launch, ended))
    return seconds


@dataclass(frozen=True)
class ProfilingCost:
    """Seconds of all ranks together, and US dollars of their nodes on demand, so far and to come.

    What is to come is None while no run has succeeded, dollars without a price per node-hour.
    """

    spent_gpu_seconds: float
    spent_usd: float | None
    waiting_gpu_seconds: float | None
    waiting_usd: float | None


def profiling_cost(job: wire.Job, now_s: float) -> ProfilingCost | None:
    """What profiling costs; None before the first run starts. A run to come counts as long as the median of those that
    succeeded, `now_s` in seconds since 1970."""
    begun = [
        (run, run.started_at.timestamp(), run.finished_at.timestamp() if run.finished_at else now_s)
        for run in job.plan
        if run.started_at is not None
    ]
    if not begun:
        return None
    seconds = _counted_once([(_launch(run, job.spec), began, ended) for run, began, ended in begun])
    spent = [(run.configuration, taken) for (run, _, _), taken in zip(begun, seconds, strict=True)]
    succeeded = [taken for (run, _, _), taken in zip(begun, seconds, strict=True) if run.state == "succeeded"]
    gpu_seconds, usd = _totals(job.spec, spent)
    if not succeeded:
        return ProfilingCost(gpu_seconds, usd, None, None)
    waiting = [(run.configuration, median(succeeded)) for run in job.plan if run.state in ("pending", "claimed")]
    return ProfilingCost(gpu_seconds, usd, *_totals(job.spec, waiting))


def _totals(spec: wire.JobSpec, spent: Sequence[tuple[Configuration, float]]) -> tuple[float, float | None]:
    """GPU-seconds and US dollars of configurations that are used for some seconds."""
    prices = {kind.instance_type: kind.price.usd_per_node_hour for kind in spec.cluster}
    usd: float | None = 0.0
    for configuration, seconds in spent:
        price = prices.get(configuration.instance_type)
        usd = None if usd is None or price is None else usd + price * configuration.num_nodes * seconds / 3600
    return sum(configuration.world_size * seconds for configuration, seconds in spent), usd


def _progress(waiting: Sequence[Configuration], by_column: bool) -> str:
    """How much is left to measure."""
    total = len(waiting)
    if not total:
        return "Waiting."
    launches = len(columns_of(waiting))
    within = f" in {launches} launch{'es' if launches != 1 else ''}" if by_column else ""
    return f"{total} profiling run{'s are' if total != 1 else ' is'} still to be measured{within}."


def _failures(answer: Answer) -> str:
    """How many configurations failed for another reason than memory, and the remedy; empty where none did."""
    runs = answer.data.profile_runs
    failed = {run.configuration for run in runs if run.state is RunState.FAILED} & answer.evidence.failed
    if not failed:
        return ""
    one = len(failed) == 1
    return (
        f" {len(failed)} configuration{'' if one else 's'} failed to run: fix the cause and register the job again to "
        f"retry {'it' if one else 'them'}."
    )
