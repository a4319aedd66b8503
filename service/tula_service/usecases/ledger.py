"""Maintains the ledger: past recommendations, and the results of the training runs that followed them."""

from __future__ import annotations

from typing import NamedTuple, get_args

import tula_wire as wire
from tula_service.analysis.answer import MODEL_VERSION
from tula_service.analysis.questions import Findings
from tula_service.domain import JsonObject, RunRecord
from tula_service.store import Store, Transaction
from tula_service.store.jobs import JobRecord
from tula_service.store.ledger import LedgerRecord
from tula_service.usecases.access import Principal, visible_job
from tula_wire import Configuration
from tula_wire.enums import Objective

_SAME_STEP_TIME = 0.02
_MAX_PAIRS = 100


def entries(
    store: Store, principal: Principal, job_id: str, *, followed: bool = False, limit: int = 200
) -> wire.Ledger:
    """Return a job's ledger entries, newest first; with `followed=True`, only entries that a training run followed."""
    with store.reading() as tx:
        visible_job(tx, principal, job_id)
        records = tx.ledger.list(job_id, followed=followed, limit=limit)
    return wire.Ledger(entries=list(records))


class Outcome(NamedTuple):
    """A recommendation with the result of its training run, its job, its network, and its instance type's device."""

    job_name: str
    network: str
    device: str
    entry: LedgerRecord


def outcomes(store: Store, principal: Principal, *, limit: int = 1000) -> list[Outcome]:
    """Return the recommendations that a training run followed, for all jobs that the caller may see, newest first."""
    with store.reading() as tx:
        records = tx.ledger.outcomes(project_id=principal.project_id, limit=limit)
    return [Outcome(job_name, network, _device(entry, spec), entry) for entry, job_name, network, spec in records]


def _device(entry: LedgerRecord, spec: JsonObject) -> str:
    """Return the accelerator specified for the entry's instance type or, if there is none, the instance type."""
    used = "" if entry.configuration is None else entry.configuration.instance_type
    named = next((cluster.get("accelerator") for cluster in spec["cluster"] if cluster["instance_type"] == used), None)
    return named or (used if used != wire.DEFAULT_INSTANCE_TYPE else "not named")


def followed(tx: Transaction, job: JobRecord, configuration: Configuration) -> str | None:
    """Return the id of a recommendation of this configuration that is the newest for its objective, else None.

    If there are several, the recommendation for the job's own objective takes precedence.
    """
    for objective in sorted(get_args(Objective), key=lambda value: value != job.objective):
        entry = tx.ledger.latest(job.id, objective)
        if entry is not None and entry.configuration == configuration:
            return entry.recommendation_id
    return None


def record_outcome(tx: Transaction, run: RunRecord) -> None:
    """Record a training run's result in its job and in the ledger entry of the recommendation that the run followed."""
    measured = run.step_time_s
    if measured is None:
        return
    if run.predicted_step_time_s is not None:
        tx.jobs.update(run.job_id, prediction_error=measured / run.predicted_step_time_s - 1.0)
    entry = None if run.recommendation_id is None else tx.ledger.get(run.recommendation_id)
    if entry is None or entry.predicted_step_time_s is None:
        return
    value, low, high = dict(entry.predicted_step_time_s).values()
    # A cancelled run is not counted, since it may be resumed, and a training must be counted only once.
    ended = run.state != "cancelled"
    if ended and entry.basis == "profiled" and entry.interval_scale is not None:
        pair = [*_uncalibrated(value, low, high, entry.interval_scale), measured]
        tx.posteriors.add_prediction_pair(run.job_id, pair, keep=_MAX_PAIRS)
    error, within = measured / value - 1.0, low <= measured <= high
    tx.ledger.record_outcome(entry.recommendation_id, run.id, measured, error=error, within_interval=within)


def _uncalibrated(value: float, low: float, high: float, scale: float) -> tuple[float, float, float]:
    """Return the prediction with its interval before calibration.

    `scale` is the calibration factor at the time of the prediction, since later outcomes may have changed the factor.
    """
    return value, value * (low / value) ** (1.0 / scale), value * (high / value) ** (1.0 / scale)


def enter(tx: Transaction, job: JobRecord, findings: Findings, data_version: int) -> LedgerRecord:
    """Return the newest ledger entry if it agrees with `findings`, otherwise append and return a new entry."""
    chosen = findings.chosen
    entry = LedgerRecord(
        created_at=tx.now(),
        job_id=job.id,
        objective=findings.objective,
        basis=findings.basis,
        configuration=None if chosen is None else chosen.configuration,
        prices=findings.prices,
        model_version=MODEL_VERSION,
        data_version=data_version,
        predicted_step_time_s=None if chosen is None else chosen.step_time_s,
        predicted_cost_usd=None if chosen is None else chosen.cost_usd,
        interval_scale=None if chosen is None else findings.interval_scale,
    )
    newest = tx.ledger.latest(job.id, findings.objective)
    if newest is not None and _says_the_same(newest, entry):
        return newest
    tx.ledger.append(entry)
    if entry.objective == job.objective:
        said = {"recommendation_id", "basis", "objective", "configuration"}
        data = entry.model_dump(mode="json", include=said, exclude_none=True)
        tx.events.append(job.id, "recommendation", data=data)
    return entry


def _says_the_same(old: LedgerRecord, new: LedgerRecord) -> bool:
    """Return True if the entries differ only in their predictions, and these differ by less than 2 %.

    Such differences are ignored, since every new sample changes the predictions slightly.
    """
    facts = [(e.configuration, e.basis, e.prices, e.model_version) for e in (old, new)]
    before, after = (list(dict(e.predicted_step_time_s or ()).values()) for e in (old, new))
    if facts[0] != facts[1] or len(before) != len(after):
        return False
    return all(abs(new_s / old_s - 1.0) < _SAME_STEP_TIME for old_s, new_s in zip(before, after, strict=True))
