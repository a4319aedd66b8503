"""Recommendations, plans and what-if: after a change, a job's answer is computed once, and what follows is stored.

`load_job_data` alone reads what an analysis of a job needs; monitoring uses it too. A fit runs on a read-only snapshot,
so that no writer waits for it. If anything but measurements changed meanwhile, it is computed again, and after four
attempts under the job's lock. A plan that waits for a worker is marked on the job (`PlanState`), in the transaction of
the change: if the worker dies, the next claim computes the plan. Answers are cached once per version of a job's data,
and entered in the ledger.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

import tula_wire as wire
from tula_service.analysis import explanation
from tula_service.analysis.answer import MODEL_VERSION, Analysis, Answer, analyse
from tula_service.analysis.job_data import EarlierJob, JobData
from tula_service.analysis.plan import PlanDecision, plan_of
from tula_service.analysis.what_if import WhatIf, configurations_of, specification_at
from tula_service.domain import FloatArray, RunRecord
from tula_service.perfmodel.choice import Estimate
from tula_service.perfmodel.points import ObservationError
from tula_service.perfmodel.step_summary import summarise
from tula_service.store import Store, Transaction
from tula_service.store.jobs import JobRecord
from tula_service.usecases import ledger
from tula_service.usecases.access import Principal, visible_job
from tula_wire import Configuration
from tula_wire.enums import Objective

M = TypeVar("M", bound=BaseModel)
_BOUNDS = {"less_than_equal": "le", "greater_than_equal": "ge"}  # of an error, where it holds the bound
ATTEMPTS = 4
_STATES_KEPT = ("archived", "training")
_MAX_RUNS = 10_000
_MAX_EARLIER_JOBS = 200
_MAX_PROBES = 200
_RUNS_READ_FOR_NOISE, _STEPS_READ_FOR_NOISE = 6, 1000
_RUNS_READ_FOR_TOKENS, _STEPS_READ_FOR_TOKENS = 4, 100


def load_job_data(tx: Transaction, job: JobRecord) -> JobData:
    """Everything that an analysis of this version of the job reads; bounded to the newest runs and earlier jobs."""
    runs = sorted(tx.runs.list(job.id, limit=_MAX_RUNS), key=lambda run: (run.position, run.key))
    thresholds = tx.scaling.latest(job.id)
    profiled = [run for run in runs if run.kind == "profile"]
    earlier = tx.lessons.of_earlier_jobs(job.project_id, before=job.cursor, limit=_MAX_EARLIER_JOBS)
    return JobData(
        spec=spec_of(job),
        objective=job.objective,
        data_version=job.data_version,
        runs=runs,
        summaries=tx.samples.summaries(job.id, summarise),
        earlier_jobs=[_earlier_job(**each) for each in earlier],
        prediction_pairs=tx.lessons.prediction_pairs(job.id),
        trained_noise_scale=None if thresholds is None else thresholds[1].get("gradient_noise_scale"),
        profiled_noise=_columns(tx, profiled, "gradient_noise_scale", _RUNS_READ_FOR_NOISE, _STEPS_READ_FOR_NOISE),
        token_counts=_columns(tx, runs, "tokens_per_example", _RUNS_READ_FOR_TOKENS, _STEPS_READ_FOR_TOKENS),
        retried_up_to_key=job.retried_up_to_key,
        ignored_step_times=frozenset(run.id for run in runs if run.unsteady),
        probes=stored_probes(tx, job),
    )


def stored_probes(tx: Transaction, job: JobRecord) -> list[wire.FabricProbe]:
    """Those of the project for the job's instance types, newest first."""
    types = {cluster.instance_type for cluster in spec_of(job).cluster}
    found = tx.fabrics.list(job.project_id, instance_types=types, limit=_MAX_PROBES)
    return [read_stored(wire.FabricProbe, probe) for probe, _ in found]


def cluster_of(job: JobRecord, configuration: wire.Configuration) -> wire.ClusterSpec | None:
    """The cluster of a configuration; None where the specification has dropped it since."""
    return next((each for each in spec_of(job).cluster if each.instance_type == configuration.instance_type), None)


def spec_of(job: JobRecord) -> wire.JobSpec:
    """The job's specification."""
    return read_stored(wire.JobSpec, job.spec)


def read_stored(model: type[M], stored: Mapping[str, Any]) -> M:
    """What was valid when it was stored: unknown fields are ignored, and a number beyond a bound that has come since is
    read as that bound, so that the job stays readable and a change can correct it."""
    try:
        return wire.read(model, dict(stored))
    except ValidationError as error:
        within = copy.deepcopy(dict(stored))
        for each in error.errors():
            bound = each.get("ctx", {}).get(_BOUNDS.get(each["type"], ""))
            if bound is None:
                raise
            *path, name = each["loc"]
            functools.reduce(operator.getitem, path, within)[name] = bound  # type: ignore[arg-type,index]
        return wire.read(model, within)


def get(
    store: Store,
    principal: Principal,
    job_id: str,
    objective: Objective | None = None,
    *,
    on_miss: Callable[[], None] = lambda: None,
) -> str:
    """The recommendation as JSON: cached if nothing that it rests on has changed, else computed after `on_miss()`.

    It is that of the data at the time of the request, whatever is measured during the computation.
    """

    def look_up() -> tuple[Objective, str | None]:
        with store.reading() as tx:
            job = visible_job(tx, principal, job_id)
            wanted = objective or job.objective
            return wanted, _cached(tx, job_id, wanted, job.data_version)

    _, body = look_up()
    if body is not None:
        return body
    on_miss()
    with store.job_lock(job_id):
        wanted, body = look_up()  # another thread may have computed it, or the job's objective have changed
        return body or _compute(store, job_id, wanted, plan=False)


def replan(store: Store, job_id: str) -> str:
    """Bring a job's plan and recommendation up to date; returns the recommendation as JSON.

    Threads of one process that replan the same job queue up, and those that waited return what the first one stored.
    Raises NotFound when the job is gone, Busy when too many computations are queued.
    """
    with store.reading() as tx:
        asked = tx.jobs.get(job_id)
    with store.job_lock(job_id):
        with store.reading() as tx:
            job, body = tx.jobs.get(job_id), None
            if job.plan_state == "current":
                body = _cached(tx, job_id, job.objective, asked.data_version, or_newer=True)
        return body or _compute(store, job_id, None, plan=True)


def _compute(store: Store, job_id: str, objective: Objective | None, *, plan: bool) -> str:
    """Analyse and store what follows, with `plan` the plan too; returns the recommendation as JSON."""
    for _ in range(ATTEMPTS):
        with store.compute_slot():
            with store.reading() as tx:
                job = tx.jobs.get(job_id)
                facts, data = _facts(tx, job, plan), load_job_data(tx, job)
            analysis = analyse(data, objective)
            decision = plan_of(analysis) if plan else None
        with store.transaction() as tx:
            now = tx.jobs.lock(job_id)
            if now.data_version == job.data_version or _facts(tx, now, plan) == facts:
                return store_answer(tx, now, analysis, decision)
    with store.transaction() as tx:
        job = tx.jobs.lock(job_id)
        analysis = analyse(load_job_data(tx, job), objective)
        return store_answer(tx, job, analysis, plan_of(analysis) if plan else None)


def _facts(tx: Transaction, job: JobRecord, plan: bool) -> object:
    """Everything besides measurements that an answer rests on, or an answer with its plan."""
    runs = tx.runs.list(job.id, limit=_MAX_RUNS) if plan else ()
    states = [(run.id, run.state, run.failed_local_batch_size, run.drift_sentence) for run in runs]
    return job.spec, job.retried_up_to_key if plan else None, states


def _cached(
    tx: Transaction, job_id: str, objective: Objective, data_version: int, *, or_newer: bool = False
) -> str | None:
    """The cached recommendation for exactly this version of the job's data, or, with `or_newer`, for any since then."""
    versions: dict[str, Any] = {"data_version": data_version, "model_version": MODEL_VERSION}
    return tx.answers.get(job_id, f"recommendation:{objective}", **versions, or_newer=or_newer)


def store_answer(tx: Transaction, job: JobRecord, analysis: Analysis, decision: PlanDecision | None = None) -> str:
    """Store the plan, then render, cache and enter the answer; returns the recommendation as JSON.

    If the data have moved on and a newer answer is cached, that one is returned. The caller holds the job's lock and
    has compared the facts.
    """
    # New pending runs change no fit, so the answer also holds for the version that they make. Measurements that arrived
    # meanwhile do: then it is stored under the version that it was computed from.
    version, objective = analysis.data.data_version, analysis.objective
    is_newest = job.data_version == version
    if decision is not None:
        job = _store_plan(tx, job, analysis, decision)
    if is_newest:
        version = job.data_version
    elif (newer := _cached(tx, job.id, objective, version, or_newer=True)) is not None:
        return newer
    entry = ledger.enter(tx, job, analysis, version)
    fields: dict[str, object] = {"id": entry.recommendation_id, "job_id": job.id, "created_at": entry.created_at}
    if isinstance(analysis, Answer):
        validated = (job.cross_validated_model, tuple(job.cross_validated_runs))
        error = job.cross_validated_error if validated == (MODEL_VERSION, analysis.evidence.run_ids) else None
        fields |= explanation.recommendation_fields(analysis, error)
    else:
        fields |= explanation.infeasible_fields(analysis)
    recommendation = wire.Recommendation.model_validate(fields)
    body = recommendation.model_dump_json()
    tx.answers.put(job.id, f"recommendation:{objective}", data_version=version, model_version=MODEL_VERSION, body=body)
    if objective == job.objective:
        chosen = recommendation.chosen
        smallest, largest = explanation.savings(chosen, recommendation.candidates)
        tx.jobs.update(  # what a list of jobs shows
            job.id,
            recommended=None if chosen is None else chosen.configuration,
            predicted_time_s=None if chosen is None else chosen.total_time_s.value,
            predicted_cost_usd=None if chosen is None or chosen.cost_usd is None else chosen.cost_usd.value,
            saving_vs_smallest_batch=smallest,
            saving_vs_largest_batch=largest,
        )
    return body


def _store_plan(tx: Transaction, job: JobRecord, analysis: Analysis, decision: PlanDecision) -> JobRecord:
    for run_id in decision.cancelled:
        tx.runs.transition(run_id, expected=["pending"], to="cancelled")
    for run_id, step_time_s in decision.predicted_step_time_s.items():
        tx.runs.update(run_id, predicted_step_time_s=step_time_s)
    for new in decision.new:
        run = tx.runs.create(job.id, new)
        tx.events.append(job.id, "run", run_id=run.id, data={"state": run.state, "purpose": run.purpose})
    if decision.posteriors is not None:
        tx.lessons.put_posteriors(job.id, decision.posteriors)
    if isinstance(analysis, Answer) and decision.cross_validated_error is not None:
        tx.jobs.update(
            job.id,
            cross_validated_error=decision.cross_validated_error,
            cross_validated_runs=list(analysis.evidence.run_ids),
            cross_validated_model=MODEL_VERSION,
        )
    state, reason = "planning" if decision.active else "ready", decision.reason
    if job.state in _STATES_KEPT or (state == "ready" and job.state == "finished"):
        state = job.state
    if (state, reason) != (job.state, job.plan_reason):
        tx.events.append(job.id, "job", data={"state": state, "plan_reason": reason})
    return tx.jobs.update(job.id, state=state, plan_reason=reason, plan_state="current")


def predict(store: Store, principal: Principal, job_id: str, question: WhatIf) -> wire.Predictions:
    """Predict every configuration asked about. Raises InvalidInput for a question that no configuration answers."""
    with store.compute_slot():
        with store.reading() as tx:
            data = load_job_data(tx, visible_job(tx, principal, job_id))
        answer = analyse(replace(data, spec=specification_at(data.spec, question)))
    if not isinstance(answer, Answer):
        raise ObservationError(answer.reason)
    found = answer.what_if(configurations_of(answer, question))
    return wire.Predictions(
        job_id=job_id,
        basis=found.model.basis,
        candidates=explanation.candidates_of(found, found.estimates),
        model=explanation.model_report(found),
    )


def expectation(data: JobData, configuration: Configuration) -> Estimate | None:
    """What is expected of a run about to start; None where no model can predict it."""
    answer = analyse(data)
    return answer.estimate([configuration])[0] if isinstance(answer, Answer) else None


def _earlier_job(spec: Mapping[str, Any], **lessons: Any) -> EarlierJob:
    clusters = tuple(read_stored(wire.ClusterSpec, each) for each in spec["cluster"])
    return EarlierJob(model=read_stored(wire.ModelSpec, spec["model"]), clusters=clusters, **lessons)


def _columns(tx: Transaction, runs: Sequence[RunRecord], name: str, num_runs: int, last_step: int) -> list[FloatArray]:
    """A telemetry column of the newest runs that have samples."""
    newest = sorted((run.key for run in runs if run.num_samples), reverse=True)[:num_runs]
    return [tx.telemetry.read(key, name, last_step=last_step)[1] for key in newest]
