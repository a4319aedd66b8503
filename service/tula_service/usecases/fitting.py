"""What a job's runs say: observations, the candidates that are feasible, and the models fitted to them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

import tula_wire as wire
from tula_service.domain import RunKind, RunState, StepTimeForm, configuration_mismatch
from tula_service.perfmodel.intervals import Interval, calibrate_intervals
from tula_service.perfmodel.memory_model import MemoryModel
from tula_service.perfmodel.points import ObservationError, StepTimeObservations
from tula_service.perfmodel.step_time_model import StepTimeModel, fit_step_time
from tula_service.store import JobRecord, RunSummary, Transaction
from tula_service.usecases import cold_start, convert, memory_bounds
from tula_service.usecases.lessons import Lessons, lessons_of
from tula_service.usecases.out_of_memory import Failures, failures_of
from tula_wire import Configuration

__all__ = ["MODEL_VERSION", "Evidence", "calibration", "evidence_of", "fit", "spec_of"]

MODEL_VERSION = "step-time-4"
"""Names the equations and priors; part of every cache key and ledger entry, so it moves whenever they do."""

_LEAST_PAIRS_TO_CALIBRATE = 3


@dataclass(frozen=True)
class Evidence:
    """Everything a fit, a plan or a choice of one job rests on.

    `candidates` are feasible in memory; `ruled_out` maps those that are not to a sentence. `unavailable` failed for
    another reason. `rows` names configuration and run of each observation. `memory_bound` is the largest safe local
    batch by instance type, where known.
    """

    candidates: tuple[Configuration, ...]
    observed: StepTimeObservations | None
    rows: tuple[tuple[Configuration, str], ...]
    measured: Mapping[Configuration, float]
    memory: dict[str, MemoryModel]
    memory_bound: dict[str, int]
    capacity_bytes: dict[str, float]
    ruled_out: dict[Configuration, str]
    unavailable: frozenset[Configuration]
    num_runs: int
    num_samples: int
    warnings: tuple[str, ...]
    _fits: dict[tuple[str, int], float] = field(default_factory=dict, repr=False, compare=False)
    _peaks: dict[tuple[str, int], Interval] = field(default_factory=dict, repr=False, compare=False)

    def peaks(self, configurations: Sequence[Configuration]) -> list[Interval | None]:
        """Predicted peak memory of a rank of each, bytes; None where no memory model exists. Kept once predicted."""
        for name, model in self.memory.items():
            new = {c.local_batch_size for c in configurations if c.instance_type == name}
            batches = sorted(batch for batch in new if (name, batch) not in self._peaks)
            if not batches:
                continue
            found = model.predict([float(batch) for batch in batches])
            rows = zip(batches, found.mean_bytes, found.low_bytes, found.high_bytes, strict=True)
            self._peaks.update(
                {(name, batch): Interval(float(mean), float(low), float(high)) for batch, mean, low, high in rows}
            )
        return [self._peaks.get((c.instance_type, c.local_batch_size)) for c in configurations]

    def fits(self, c: Configuration) -> float | None:
        """Probability that a rank's peak fits into its memory; None where model or capacity is unknown."""
        key = (c.instance_type, c.local_batch_size)
        model, capacity = self.memory.get(c.instance_type), self.capacity_bytes.get(c.instance_type)
        if model is None or capacity is None:
            return None
        if key not in self._fits:
            self._fits[key] = model.fits(float(c.local_batch_size), capacity)
        return self._fits[key]


def spec_of(job: JobRecord) -> wire.JobSpec:
    """The job's specification; what was stored was valid then, and readers ignore what they do not know."""
    return wire.read(wire.JobSpec, job.spec)


def evidence_of(
    tx: Transaction,
    job: JobRecord,
    spec: wire.JobSpec,
    *,
    retry_failed: bool = False,
    without: str | None = None,
    as_profiled: bool = False,
) -> Evidence:
    """Read the runs of a job, leaving out the one called `without` and what it noticed.

    With `retry_failed`, runs that failed for a reason of their own may be tried again. Measurements from before a drift
    that training noticed are corrected by what the drift did to them; `as_profiled` knows of no training, and so of
    none.

    Raises ObservationError when no candidate is left.
    """
    summaries = [summary for summary in tx.samples.summaries(job.id) if summary.run_id != without]
    if as_profiled:
        summaries = [summary for summary in summaries if summary.kind is RunKind.PROFILE]
    warnings: list[str] = []
    times, drifted = _step_times(tx, job.id, summaries, without)
    if drifted is not None:
        warnings.append(f"{drifted}; what was measured before is corrected by that.")
    rows: list[tuple[Configuration, RunSummary]] = []
    unavailable: set[Configuration] = set()
    for summary in summaries:
        if summary.state is RunState.OUT_OF_MEMORY or summary.step_time_s is None:
            continue
        actual, odd = _as_run(summary)
        if odd is not None:
            warnings.append(odd)
            unavailable.add(summary.configuration)
        if actual is not None:
            rows.append((actual, summary))
    measured_as_planned = {configuration for configuration, _ in rows}
    failures = failures_of(rows, summaries)
    if not retry_failed:
        unavailable |= _failed(tx, job.id, failures) - measured_as_planned
    memory, bound, capacity, sentences = memory_bounds.fitted(spec, rows, failures.standing)
    warnings += [*(each.sentence for each in failures.contradicted), *sentences]
    try:
        candidates = convert.candidates_of(spec, bound)
    except ObservationError:
        convert.candidates_of(spec, {})  # raises where memory is not the reason
        raise ObservationError(memory_bounds.nothing_fits(spec, memory, capacity, failures.standing)) from None
    everything = convert.candidates_of(spec, {}) if bound else candidates
    kept = set(candidates)
    ruled_out = {
        c: memory_bounds.why_not(c, bound, failures.standing)
        for c in everything
        if c not in kept and c.instance_type in bound
    }
    observed = _observations(rows, times)
    return Evidence(
        candidates=candidates,
        observed=observed,
        rows=tuple((c, s.run_id) for c, s in rows),
        measured={c: times[s.run_id] for c, s in rows},
        memory=memory,
        memory_bound=bound,
        capacity_bytes=capacity,
        ruled_out=ruled_out,
        unavailable=frozenset(unavailable - measured_as_planned),
        num_runs=len(rows),
        num_samples=sum(summary.num_samples for _, summary in rows),
        warnings=tuple(dict.fromkeys(warnings)),
    )


def fit(tx: Transaction, job: JobRecord, spec: wire.JobSpec, evidence: Evidence) -> StepTimeModel:
    """The step-time model of a job as of now; before any run it rests on earlier jobs or on hardware figures."""
    lessons = lessons_of(tx, job, spec)
    prior = cold_start.prior_of(lessons, spec, evidence.candidates, measured=evidence.observed is not None)
    return fit_step_time(
        evidence.observed,
        form=StepTimeForm(spec.step_time_model),
        prior=prior,
        candidates=evidence.candidates,
        interval_scale=calibration(lessons),
    )


def _as_run(summary: RunSummary) -> tuple[Configuration | None, str | None]:
    """The configuration that really ran, as its process saw it, and what was odd about it."""
    planned = summary.configuration
    world, batch, steps = summary.world_size, summary.local_batch_size, summary.grad_accum_steps
    sentence = configuration_mismatch(
        summary.run_id, planned, world_size=world, local_batch_size=batch, grad_accum_steps=steps
    )
    if sentence is None:
        return planned, None
    batch, steps = batch or planned.local_batch_size, steps or planned.grad_accum_steps
    world = world or planned.world_size
    nodes = planned.num_nodes
    if world % nodes:
        return None, sentence
    return replace(planned, ranks_per_node=world // nodes, local_batch_size=batch, grad_accum_steps=steps), sentence


def _failed(tx: Transaction, job_id: str, failures: Failures) -> set[Configuration]:
    """Configurations whose newest profiling run failed, or ran out of memory against what larger batches showed."""
    contradicted = {each.failed.run_id for each in failures.contradicted}
    newest: dict[Configuration, bool] = {}
    for run in tx.runs.list(job_id, limit=10_000):
        if run.id in contradicted or (run.kind is RunKind.PROFILE and run.state is not RunState.CANCELLED):
            newest.setdefault(run.configuration, run.id in contradicted or run.state is RunState.FAILED)
    return {configuration for configuration, failed in newest.items() if failed}


def _step_times(
    tx: Transaction, job_id: str, summaries: Sequence[RunSummary], without: str | None
) -> tuple[dict[str, float], str | None]:
    """Step time of each run as it would be now, and what drifted, if the newest training noticed anything."""
    times = {s.run_id: float(s.step_time_s) for s in summaries if s.step_time_s is not None}
    if not any(s.kind is RunKind.TRAIN for s in summaries):
        return times, None
    newest = tx.runs.list(job_id, kind=RunKind.TRAIN, limit=1)[0]
    state = newest.drift_state or {}
    if newest.id == without or not newest.drifted or not state.get("sentence"):
        return times, None
    for run_id, factor in state["ratios"].items():
        if run_id in times:
            times[run_id] *= float(factor)
    if newest.id in times and state["level_s"] is not None:
        times[newest.id] = float(state["level_s"])
    return times, str(state["sentence"])


def _observations(
    rows: Sequence[tuple[Configuration, RunSummary]], times: Mapping[str, float]
) -> StepTimeObservations | None:
    if not rows:
        return None
    return StepTimeObservations.at(
        [configuration for configuration, _ in rows],
        [times[summary.run_id] for _, summary in rows],
        relative_sd=_column([summary.relative_sd for _, summary in rows]),
        compute_time_s=_column([summary.compute_time_s for _, summary in rows]),
        exposed_comm_time_s=_column([summary.exposed_comm_time_s for _, summary in rows]),
    )


def _column(values: Sequence[float | None]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def calibration(lessons: Lessons) -> float:
    """How much wider intervals must be, going by what training on this hardware measured after predictions."""
    if len(lessons.pairs) < _LEAST_PAIRS_TO_CALIBRATE:
        return 1.0
    predicted, low, high, measured = (np.array(column) for column in zip(*lessons.pairs, strict=True))
    return calibrate_intervals(predicted, low, high, measured)
