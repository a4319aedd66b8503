"""The ledger: past recommendations, and what training runs measured after them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, get_args

import tula_wire as wire
from tula_service.analysis.answer import MODEL_VERSION, Analysis, Answer
from tula_service.analysis.explanation import estimate_of
from tula_service.analysis.job_data import has_prices
from tula_service.domain import JobOutcome, JobRecord, LedgerRecord, RunRecord
from tula_service.perfmodel.intervals import Interval
from tula_service.store import Store, Transaction
from tula_service.usecases.access import Principal, visible_job
from tula_wire import Configuration
from tula_wire.enums import Objective

_SAME_STEP_TIME = 0.02
_MAX_PAIRS = 100


def entries(
    store: Store, principal: Principal, job_id: str, *, followed: bool = False, limit: int = 200
) -> wire.Ledger:
    """Predicted and measured step times of a job, newest recommendation first; `followed`: only measured ones."""
    with store.reading() as tx:
        visible_job(tx, principal, job_id)
        found = tx.ledger.list(job_id, followed=followed, limit=limit)
    return wire.Ledger(entries=[_wire_entry(entry) for entry in found])


@dataclass(frozen=True)
class Outcome:
    """What a training measured after a recommendation, and of which job; `device` is that of its instance type."""

    job_name: str
    network: str
    device: str
    job_id: str
    entry: wire.LedgerEntry


def outcomes(store: Store, principal: Principal, *, limit: int = 1000) -> list[Outcome]:
    """Recommendations that a training run followed, over all jobs that the caller may see, newest first."""
    with store.reading() as tx:
        found = tx.ledger.outcomes(project_id=principal.project_id, limit=limit)
    return [
        Outcome(each.job_name, each.model_name, _device(each), each.entry.job_id, _wire_entry(each.entry))
        for each in found
    ]


def _device(found: JobOutcome) -> str:
    """The accelerator that the specification names for the instance type, else the instance type."""
    used = "" if found.entry.configuration is None else found.entry.configuration.instance_type
    named = next((each.get("accelerator") for each in found.spec["cluster"] if each["instance_type"] == used), None)
    return named or (used if used != wire.DEFAULT_INSTANCE_TYPE else "not named")


def followed(tx: Transaction, job: JobRecord, configuration: Configuration) -> str | None:
    """The id of the newest recommendation of this configuration, preferably for the job's own objective."""
    for objective in sorted(get_args(Objective), key=lambda value: value != job.objective):
        entry = tx.ledger.latest(job.id, objective)
        if entry is not None and entry.configuration == configuration:
            return entry.id
    return None


def record_outcome(tx: Transaction, run: RunRecord) -> None:
    """Enter what a training run measured with the recommendation that it followed, and on the job."""
    measured = run.step_time_s
    if measured is None:
        return
    if run.predicted_step_time_s is not None:
        tx.jobs.update(run.job_id, prediction_error=measured / run.predicted_step_time_s - 1.0)
    entry = None if run.recommendation_id is None else tx.ledger.get(run.recommendation_id)
    if entry is None or entry.predicted_step_time_s is None:
        return
    value, low, high = entry.predicted_step_time_s
    # A training that is cancelled and resumed must count once, not once for each start.
    ended = run.state != "cancelled"
    if ended and entry.basis == "profiled" and entry.interval_scale is not None:
        pair = [*_uncalibrated(value, low, high, entry.interval_scale), measured]
        tx.lessons.add_prediction_pair(run.job_id, pair, keep=_MAX_PAIRS)
    error, within = measured / value - 1.0, low <= measured <= high
    tx.ledger.record_outcome(entry.id, run.id, measured, error=error, within_interval=within)


def _uncalibrated(value: float, low: float, high: float, scale: float) -> tuple[float, float, float]:
    """The interval before calibration. `scale` is the calibration at the time of the prediction, not the present one,
    which may rest on later outcomes."""
    return value, value * (low / value) ** (1.0 / scale), value * (high / value) ** (1.0 / scale)


def enter(tx: Transaction, job: JobRecord, analysis: Analysis, data_version: int) -> LedgerRecord:
    """The newest entry if it says the same as this answer, else a new one. Its prices are those of the job."""
    answer = analysis if isinstance(analysis, Answer) else None
    chosen = None if answer is None else answer.choice.chosen
    entry = LedgerRecord(
        id="",
        job_id=job.id,
        objective=analysis.objective,
        basis="prior" if answer is None else answer.model.basis,
        configuration=None if chosen is None else chosen.configuration,
        prices={cluster.instance_type: cluster.price.model_dump() for cluster in analysis.data.spec.cluster},
        model_version=MODEL_VERSION,
        data_version=data_version,
        predicted_step_time_s=None if chosen is None else _values(chosen.step_time_s),
        predicted_cost_usd=_values(chosen.cost_usd) if answer and chosen and has_prices(answer.spec) else None,
        interval_scale=answer.model.interval_scale if answer and chosen else None,
    )
    newest = tx.ledger.latest(job.id, entry.objective)
    if newest is not None and _says_the_same(newest, entry):
        return newest
    kept = tx.ledger.append(entry)
    if entry.objective == job.objective:
        data: dict[str, Any] = {"recommendation_id": kept.id, "basis": entry.basis, "objective": entry.objective}
        if entry.configuration is not None:
            data["configuration"] = asdict(entry.configuration)
        tx.events.append(job.id, "recommendation", data=data)
    return kept


def _values(interval: Interval) -> tuple[float, float, float]:
    return interval.mean, interval.low, interval.high


def _says_the_same(old: LedgerRecord, new: LedgerRecord) -> bool:
    """True if nothing but the step time differs, by less than 2 %: every sample moves the step time a little."""
    facts = [(e.configuration, e.basis, dict(e.prices), e.model_version) for e in (old, new)]
    if facts[0] != facts[1] or (old.predicted_step_time_s is None) != (new.predicted_step_time_s is None):
        return False
    pairs = zip(old.predicted_step_time_s or (), new.predicted_step_time_s or (), strict=True)
    return all(abs(after / before - 1.0) < _SAME_STEP_TIME for before, after in pairs)


def _wire_entry(entry: LedgerRecord) -> wire.LedgerEntry:
    fields = {
        **vars(entry),
        "recommendation_id": entry.id,
        "predicted_step_time_s": _estimate(entry.predicted_step_time_s),
        "predicted_cost_usd": _estimate(entry.predicted_cost_usd),
    }
    return wire.LedgerEntry.model_validate(fields, extra="ignore")


def _estimate(values: tuple[float, float, float] | None) -> wire.Estimate | None:
    return None if values is None else estimate_of(Interval(*values))
