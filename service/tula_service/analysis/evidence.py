"""What a job's runs say: observations of step time, the candidates that are feasible, and how far to trust a fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tula_service.analysis import job_spec
from tula_service.analysis.job_data import CrossValidation, JobData
from tula_service.analysis.memory import MemoryEvidence, memory_evidence, out_of_memory_runs
from tula_service.domain import RunKind, RunState, RunSummary, StepTimeForm, configuration_mismatch
from tula_service.perfmodel.points import ObservationError, StepTimeObservations
from tula_service.perfmodel.priors import Priors
from tula_service.perfmodel.step_time_model import fit_step_time
from tula_wire import Configuration

_FEWEST_RUNS_TO_VALIDATE, _MOST_RUNS_TO_VALIDATE = 4, 12


@dataclass(frozen=True)
class Evidence:
    """What every fit, plan and choice of one job rests on.

    `candidates` fit into memory; `ruled_out` maps those that do not to a sentence. `failed` configurations may neither
    be planned nor chosen: their newest run failed for another reason than memory. `rows` names the configuration and
    the run of each observation, `measured` the step time of each configuration, s.
    """

    candidates: tuple[Configuration, ...]
    observed: StepTimeObservations | None
    rows: tuple[tuple[Configuration, str], ...]
    measured: Mapping[Configuration, float]
    memory: MemoryEvidence
    ruled_out: Mapping[Configuration, str]
    failed: frozenset[Configuration]
    num_runs: int
    num_samples: int
    warnings: tuple[str, ...]

    @property
    def run_ids(self) -> tuple[str, ...]:
        """The run of each observation."""
        return tuple(run_id for _, run_id in self.rows)


def evidence_of(data: JobData) -> Evidence:
    """Read the runs of a job. Raises ObservationError when no candidate is left."""
    warnings: list[str] = []
    if data.drift is not None:
        warnings.append(f"{data.drift}; predictions are for the speed when it was profiled.")
    rows: list[tuple[Configuration, RunSummary]] = []
    misconfigured: set[Configuration] = set()
    for summary in data.summaries:
        if summary.state is RunState.OUT_OF_MEMORY or summary.step_time_s is None:
            continue
        actual, mismatch = _as_run(summary)
        if mismatch is not None:
            warnings.append(mismatch)
            misconfigured.add(summary.configuration)
        if actual is not None:
            rows.append((actual, summary))
    failures = out_of_memory_runs(rows, data.summaries)
    memory = memory_evidence(data.spec, rows, failures.standing)
    failed = misconfigured | _failed(data, {summary.run_id for summary in failures.contradicted})
    candidates, ruled_out = _feasible(data, memory)
    timed = [(c, s) for c, s in rows if s.run_id not in data.ignored_step_times]
    return Evidence(
        candidates=candidates,
        observed=_observations(timed),
        rows=tuple((c, s.run_id) for c, s in timed),
        measured={c: s.step_time_s for c, s in timed if s.step_time_s is not None},
        memory=memory,
        ruled_out=ruled_out,
        failed=frozenset(failed - {configuration for configuration, _ in rows}),
        num_runs=len(timed),
        num_samples=sum(summary.num_samples for _, summary in timed),
        warnings=tuple(dict.fromkeys((*warnings, *failures.warnings, *memory.warnings))),
    )


def leave_one_out(evidence: Evidence, prior: Priors, form: StepTimeForm) -> CrossValidation | None:
    """Predict each run from the others. One fit a run, so None with too few runs to tell, or too many to be quick."""
    observed = evidence.observed
    if observed is None or not _FEWEST_RUNS_TO_VALIDATE <= len(observed) <= _MOST_RUNS_TO_VALIDATE:
        return None
    everything = np.arange(len(observed))
    errors = []
    for left_out in everything:
        rest = observed.take(everything != left_out)
        model = fit_step_time(rest, form=form, prior=prior, candidates=evidence.candidates)
        predicted = model.predict(observed.points.take([int(left_out)])).mean_s[0]
        errors.append(abs(predicted / observed.step_time_s[left_out] - 1.0))
    return CrossValidation(float(np.median(errors)), evidence.run_ids)


def _feasible(data: JobData, memory: MemoryEvidence) -> tuple[tuple[Configuration, ...], dict[Configuration, str]]:
    """The candidates that fit into memory, and a sentence for each that does not."""
    bound = memory.max_local_batch_size
    everything = job_spec.candidates_of(data.spec, {})  # raises where memory is not the reason
    if not bound:
        return everything, {}
    try:
        candidates = job_spec.candidates_of(data.spec, bound)
    except ObservationError:
        raise ObservationError(memory.why_nothing_fits(data.spec)) from None
    feasible = set(candidates)
    return candidates, {c: memory.why_not(c) for c in everything if c not in feasible and c.instance_type in bound}


def _as_run(summary: RunSummary) -> tuple[Configuration | None, str | None]:
    """The configuration that ran, as its process reported it, and a sentence where it differs from the planned one."""
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


def _failed(data: JobData, contradicted: set[str]) -> set[Configuration]:
    """Configurations whose newest profiling run failed, or ran out of memory where larger batches fitted."""
    newest: dict[Configuration, bool] = {}
    for run in sorted(data.runs, key=lambda run: run.key, reverse=True):
        if run.id in contradicted or (run.kind is RunKind.PROFILE and run.state is not RunState.CANCELLED):
            failed = run.id in contradicted or run.state is RunState.FAILED
            newest.setdefault(run.configuration, failed and run.key > data.retried_up_to_key)
    return {configuration for configuration, failed in newest.items() if failed}


def _observations(rows: Sequence[tuple[Configuration, RunSummary]]) -> StepTimeObservations | None:
    if not rows:
        return None
    return StepTimeObservations.at(
        [configuration for configuration, _ in rows],
        _column([summary.step_time_s for _, summary in rows]),
        relative_sd=_column([summary.relative_sd for _, summary in rows]),
        compute_time_s=_column([summary.compute_time_s for _, summary in rows]),
        exposed_comm_time_s=_column([summary.exposed_comm_time_s for _, summary in rows]),
    )


def _column(values: Sequence[float | None]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)
